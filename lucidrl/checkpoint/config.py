"""When checkpoints are saved, what they contain, and which are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from lucidrl.utils.config import Config

CONFIG_NAME, CHECKPOINTS_NAME = "config.yaml", "checkpoints"
"""Names of the settings file and of the checkpoints folder in a run folder."""


class CheckpointConfig(Config):
    """When checkpoints are saved, what they contain, and which are kept."""

    every: NonNegativeInt = 50
    """Steps between checkpoints; 0 saves only the last step."""
    final: bool = True
    """Save the last step even if it is not a multiple of `every`. A run that is stopped early always saves."""
    weights_only: bool = False
    """Save weights without optimizer state: about a third of the size in float32, but no run can resume from it."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep, in addition to the best."""
    metric: str | None = "reward"
    """Validation metric whose best checkpoint is also kept."""
    mode: Literal["max", "min"] = "max"
    """Whether a higher or a lower value of the metric is better."""
    background: bool = True
    """Write while training continues; needs host memory for one copy of weights and optimizer state."""


class SFTCheckpointConfig(CheckpointConfig):
    """Checkpoints of supervised fine-tuning; the best one has the lowest held-out loss."""

    metric: str | None = "loss"
    """Validation metric that selects the best checkpoint, which is kept too; null keeps none."""
    mode: Literal["max", "min"] = "min"
    """Whether a higher or a lower value of the metric is better."""
