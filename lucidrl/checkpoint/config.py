"""When checkpoints are written, what they hold, and which are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from lucidrl.utils.config import Config


class CheckpointConfig(Config):
    """When checkpoints are written."""

    every: NonNegativeInt = 50
    """Steps between checkpoints, beside the one at the end; 0 = only that one."""
    final: bool = True
    """Save the last step as well; false leaves that to `every`. A run that is stopped before its end saves anyway."""
    weights_only: bool = False
    """Save no optimizer: about a third of the size in float32, but a run cannot be resumed from such a checkpoint."""
    keep_last: PositiveInt = 2
    """How many of the newest are kept, beside the best."""
    metric: str | None = "reward"
    """Validation metric whose best checkpoint is kept as well."""
    mode: Literal["max", "min"] = "max"
    """Whether more or less of it is better."""
    background: bool = True
    """Write while training goes on; costs host memory for one copy of weights and optimizer."""
