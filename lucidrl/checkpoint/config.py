"""When checkpoints are saved, what they contain, and which are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from lucidrl.utils.config import Config

CONFIG_NAME, CHECKPOINTS_NAME = "config.yaml", "checkpoints"
"""Settings and checkpoints in a run folder."""


class CheckpointConfig(Config):
    """When checkpoints are saved, what they contain, and which are kept."""

    every: NonNegativeInt = 50
    """Steps between checkpoints; 0 saves only the last step."""
    final: bool = True
    """Also save the last step; with false, only if `every` says so. A run that is stopped early always saves."""
    weights_only: bool = False
    """Save no optimizer: about a third of the size in float32, but runs cannot resume from such a checkpoint."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep, beside the best."""
    metric: str | None = "reward"
    """Validation metric whose best checkpoint is also kept."""
    mode: Literal["max", "min"] = "max"
    """Whether a larger or a smaller metric is better."""
    background: bool = True
    """Write while training continues; needs host memory for one copy of weights and optimizer."""


class SFTCheckpointConfig(CheckpointConfig):
    """Checkpoints of supervised fine-tuning; the best one has the lowest held-out loss."""

    metric: str | None = "loss"
    """Validation metric that selects the best checkpoint, which is kept too; null keeps none."""
    mode: Literal["max", "min"] = "min"
    """Whether a higher or a lower value of the metric is better."""
