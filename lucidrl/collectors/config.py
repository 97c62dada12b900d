"""Configuration of collectors."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from lucidrl.utils.config import Config


class TextCollectorConfig(Config):
    """How many samples make a training step."""

    prompts_per_step: PositiveInt = 32
    """Prompts per step. They are all different if the dataset has at least this many."""
    samples_per_prompt: PositiveInt = 8
    """Samples per prompt. They form a group; advantages compare the rewards within a group."""
    max_turns: PositiveInt = 1
    """Most completions per sample; the collector ends a sample after this many, even if the environment is not done."""
    refill_rounds: NonNegativeInt = 0
    """Replace groups with equal rewards, from which the policy learns nothing, by groups of new prompts; at most this
    many times per step."""
