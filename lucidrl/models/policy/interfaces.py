"""What a policy gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch


class LogprobOutputSpec(TypedDict):
    """Scores of a batch."""

    logprobs: torch.Tensor
    """[B, T] float32; position i belongs to token i, position 0 and padding hold 0."""


class ReferenceLogprobOutputSpec(TypedDict):
    """Scores of a batch under the reference policy."""

    reference_logprobs: torch.Tensor
    """[B, T] float32, laid out as `logprobs`."""


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker may be told beside its config."""

    seed: int = 0
    """Of the weights of an untrained model, and of draws."""
    timeout_s: float = 600.0
    """Longest that a rank waits for the others in one exchange."""


@dataclass(frozen=True)
class TrainResult:
    """What one call of `train` did."""

    loss: float
    """Mean over the call's optimizer steps of the globally normalised loss."""
    grad_norm: float
    """Of the last optimizer step, before clipping."""
    metrics: dict[str, float]
    """The loss function's metrics, reduced as it declared."""
    num_skipped_steps: int
    """Optimizer steps left out because gradients were NaN or infinite."""
