"""What passes between an algorithm and a control policy, beside the frames of `lucidrl.losses.interfaces`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ControlTrainResult:
    """What one call of `ControlPolicy.train` did."""

    metrics: dict[str, float]
    """Means over all minibatches; gradient norms and learning rates, those of the critic with `critic_` before."""
    num_skipped_steps: int
    """Optimizer steps left out because gradients were NaN or infinite."""


@dataclass(frozen=True)
class ObservationSpace:
    """Observations that a network can read: one array of numbers."""

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
    """Numbers between limits, which may be infinite."""

    low: torch.Tensor
    high: torch.Tensor
    """Of the shape of an action."""


ActionSpace = DiscreteActions | ContinuousActions
