"""Types shared by algorithms and control policies; see `lucidrl.losses.interfaces` for more, such as `Frames`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ControlTrainResult:
    """Result of one `ControlPolicy.train` call."""

    metrics: dict[str, float]
    """Means over all minibatches, gradient norms and learning rates; names of the critic's metrics start with
    `critic_`."""
    num_skipped_steps: int
    """Optimizer updates skipped because gradients were NaN or infinite."""


@dataclass(frozen=True)
class ObservationSpace:
    """Observations that a network can process: one numeric array."""

    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class DiscreteActions:
    """One of `n` actions, as a one-hot vector."""

    n: int


@dataclass(frozen=True)
class ContinuousActions:
    """Numbers between `low` and `high`, which have the shape of an action and may be infinite."""

    low: torch.Tensor
    high: torch.Tensor


ActionSpace = DiscreteActions | ContinuousActions
