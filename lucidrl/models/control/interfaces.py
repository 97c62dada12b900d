"""Types shared by algorithms and control policies, beside the frames of `lucidrl.losses.interfaces`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ControlTrainResult:
    """Result of one `ControlPolicy.train` call."""

    metrics: dict[str, float]
    """Means over all minibatches, gradient norms and learning rates; the critic's have the prefix `critic_`."""
    num_skipped_steps: int
    """Optimizer steps skipped because gradients were NaN or infinite."""


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
    """Numbers between limits, which may be infinite; limits have the shape of an action."""

    low: torch.Tensor
    high: torch.Tensor


ActionSpace = DiscreteActions | ContinuousActions
