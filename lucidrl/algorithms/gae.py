"""Generalized advantage estimation: how much better than expected each action turned out.

Shapes: B any batch dims (one trajectory after another in each row), T time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AdvantageEstimates:
    """What each frame teaches the policy and the critic; both [B, T]."""

    advantages: torch.Tensor
    value_targets: torch.Tensor
    """Estimated returns: advantages + values."""


@torch.no_grad()
def generalized_advantages(
    rewards_BT: torch.Tensor,
    values_BT: torch.Tensor,
    next_values_BT: torch.Tensor,
    terminated_BT: torch.Tensor,
    done_BT: torch.Tensor,
    *,
    discount: float,
    gae_lambda: float,
) -> AdvantageEstimates:
    """Advantages as exponentially weighted sums of temporal differences.

    With d = reward + discount * next value - value, A(t) = d(t) + discount * gae_lambda * A(t + 1) within an episode.
    A terminated episode is worth nothing beyond its end; one that was truncated, or that goes on in the next batch, is
    worth what the critic says of its last observation.

    Args:
        values_BT: of the observations acted on.
        next_values_BT: of the observations that followed, at the end of an episode its true last one.
        terminated_BT: bool, where an episode came to its own end.
        done_BT: bool, where it ended for any reason; the sums do not reach beyond.
        gae_lambda: 0 trusts the critic after one step, 1 sums up rewards to the end.
    """
    differences_BT = rewards_BT + discount * next_values_BT * ~terminated_BT - values_BT
    weights_BT = discount * gae_lambda * (~done_BT).to(differences_BT.dtype)
    advantages_BT = torch.empty_like(differences_BT)
    following = torch.zeros_like(differences_BT[..., 0])
    for time in reversed(range(differences_BT.shape[-1])):
        following = differences_BT[..., time] + weights_BT[..., time] * following
        advantages_BT[..., time] = following
    return AdvantageEstimates(advantages_BT, advantages_BT + values_BT)
