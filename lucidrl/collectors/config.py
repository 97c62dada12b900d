"""Configuration of collectors."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from lucidrl.utils.config import Config


class TextCollectorConfig(Config):
    """How many conversations one training step is made of."""

    prompts_per_step: PositiveInt = 32
    """Prompts asked in one step; all different, unless there are fewer than this."""
    samples_per_prompt: PositiveInt = 8
    """Completions of each prompt; they form the group that rewards are compared in."""
    max_turns: PositiveInt = 1
    """Most answers in one conversation; an environment that is not done by then is cut off."""
    refill_rounds: NonNegativeInt = 0
    """Groups whose rewards are all equal teach nothing: replace them by new prompts, in at most this many rounds."""
