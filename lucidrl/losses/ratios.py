"""Ratios of probabilities, and the divergence of the policy from a reference, from log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

MAX_LOG_RATIO = 20.0
"""Log ratios are held to ± this before `exp`: a ratio of 5e8 is beyond use, and far from the limits of float32."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """A ratio from its logarithm, which is held to ± MAX_LOG_RATIO."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _k1(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio


def _k2(log_ratio: torch.Tensor) -> torch.Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    # Where the policy lost nearly all of the reference's probability, k3 goes on along its tangent: a clamp would
    # leave no pull back, or one the wrong way, exactly where it is needed most.
    bounded = (-log_ratio).clamp(max=MAX_LOG_RATIO)
    beyond = (-log_ratio - MAX_LOG_RATIO).clamp(min=0)
    return torch.expm1(bounded) - bounded + math.expm1(MAX_LOG_RATIO) * beyond


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}
"""Per-token estimators of KL(policy ‖ reference) from log(policy / reference) of tokens that the policy drew."""
