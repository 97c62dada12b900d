"""Configuration of collectors."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from lucidrl.utils.config import Config


class TextCollectorConfig(Config):
    """How many samples make a training step."""

    prompts_per_step: PositiveInt = 32
    """Prompts per step; all different, unless there are fewer than this."""
    samples_per_prompt: PositiveInt = 8
    """Completions per prompt; they form the group that rewards are compared in."""
    max_turns: PositiveInt = 1
    """Most completions per sample; the collector ends a sample whose environment is not done by then."""
    refill_rounds: NonNegativeInt = 0
    """Groups whose rewards are all equal teach nothing: replace them by new prompts, in at most this many rounds."""
