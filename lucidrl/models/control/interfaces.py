"""What passes between an algorithm and a control policy.

Shapes: N frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch


@dataclass(frozen=True)
class Frames:
    """Frames to learn from, in any order."""

    observations: torch.Tensor
    """[N, ...]"""
    latent_actions: torch.Tensor
    """[N, ...], what the policy drew; see `ActionHead`."""
    logprobs: torch.Tensor
    """[N], of these under the policy that drew them."""
    values: torch.Tensor
    """[N], of the observations, by the critic as it was then."""
    advantages: torch.Tensor
    """[N]"""
    value_targets: torch.Tensor
    """[N], what the critic should have said."""

    def __len__(self) -> int:
        return len(self.logprobs)

    def select(self, indices: torch.Tensor) -> Frames:
        return replace(self, **{field.name: getattr(self, field.name)[indices] for field in fields(self)})


@dataclass(frozen=True)
class FrameOutputs:
    """What policy and critic say of frames, with gradients."""

    logprobs: torch.Tensor
    """[N], of the actions that were taken."""
    entropy: torch.Tensor
    """[N], of the distribution they would be drawn from now."""
    values: torch.Tensor
    """[N], of the observations."""


@dataclass(frozen=True)
class FrameLosses:
    """The objectives of both roles over some frames, each a mean over them, and what else was measured."""

    policy: torch.Tensor
    critic: torch.Tensor
    metrics: Mapping[str, torch.Tensor]
    """Means over the frames."""


class FrameLoss(Protocol):
    """An objective for policy and critic."""

    def __call__(self, outputs: FrameOutputs, frames: Frames) -> FrameLosses: ...


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
