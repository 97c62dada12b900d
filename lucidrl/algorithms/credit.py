"""From the rewards of a step to the advantages of its tokens.

Shapes: B samples, R training rows (one per sample, or several if the chat template rewrote its history), T tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from lucidrl.algorithms.advantages import compute_advantages, has_signal, standardized
from lucidrl.algorithms.config import AdvantageConfig, AdvantageEstimator, GRPOConfig
from lucidrl.collectors.rollouts import Rollouts
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.losses.interfaces import sampled_token_mask


def kept_samples(config: GRPOConfig, rollouts: Rollouts) -> torch.Tensor:
    """[B] bool: the settings leave the sample in the loss."""
    kept_B = torch.ones_like(rollouts.is_valid)
    if config.drop_groups_without_signal:
        is_plain = config.advantages.estimator is AdvantageEstimator.PLAIN
        groups = torch.zeros_like(rollouts.group_ids) if is_plain else rollouts.group_ids
        if config.advantages.rewards == "separate" and rollouts.components:
            scored = rollouts.components.values()
            differs = [has_signal(part.scores, groups, rollouts.is_valid & ~part.scores.isnan()) for part in scored]
            kept_B &= torch.stack(differs).any(dim=0)
        else:
            kept_B &= has_signal(rollouts.rewards, groups, rollouts.is_valid)
    if config.mask_truncated:
        kept_B &= ~rollouts.is_truncated
    return kept_B


def token_advantages(
    config: AdvantageConfig,
    rollouts: Rollouts,
    batch: BatchedDataDict[Any],
    samples_R: torch.Tensor,
    kept_R: torch.Tensor,
) -> torch.Tensor:
    """Return the advantages, [R], or [R, T] if they differ between the tokens of a row.

    Args:
        batch: the rows, with `sample_mask` 0 where dropped, and with `prev_logprobs` and `reference_policy_logprobs` if
            the reward has a KL penalty.
        samples_R: index of the sample of each row.
        kept_R: the rows that the loss does not ignore; only their tokens are standardised.
    """
    rewards_B, kl_RT = rollouts.rewards, None
    if config.kl_coefficient > 0:
        kl_RT = config.kl_coefficient * token_kl(batch)
        if config.kl_level == "sequence":
            penalty_B = kl_RT.new_zeros(len(rewards_B)).index_add(0, samples_R, kl_RT.sum(dim=1))
            rewards_B = (rewards_B - penalty_B).float()
    names = [sample.name for sample in rollouts.samples]
    advantages_R = compute_advantages(
        config, rewards_B, rollouts.group_ids, rollouts.is_valid, names, rollouts.components
    )[samples_R]
    has_token_kl = kl_RT is not None and config.kl_level == "token"
    if not has_token_kl and config.standardize != "token":
        return advantages_R
    mask_RT = sampled_token_mask(batch) & kept_R.bool()[:, None]
    advantages_RT = advantages_R[:, None].double().expand(mask_RT.shape)
    if has_token_kl:
        assert kl_RT is not None
        advantages_RT = advantages_RT - to_go(kl_RT, samples_R)
    if config.standardize == "token":
        return standardized(advantages_RT, mask_RT)
    return advantages_RT.masked_fill(~mask_RT, 0).float()


def token_kl(batch: BatchedDataDict[Any]) -> torch.Tensor:
    """[R, T] float64: log(policy / reference) of each sampled token before the update, 0 for other tokens."""
    difference_RT = batch["prev_logprobs"].double() - batch["reference_policy_logprobs"].double()
    return difference_RT.masked_fill(~sampled_token_mask(batch), 0)


def to_go(values_RT: torch.Tensor, samples_R: torch.Tensor) -> torch.Tensor:
    """[R, T]: the sum over each token and all later ones of its sample; later rows of a sample are later in time."""
    in_row_RT = values_RT.flip(1).cumsum(1).flip(1)
    is_later_RR = (samples_R[:, None] == samples_R[None, :]).triu(diagonal=1)
    later_rows_R = is_later_RR.to(values_RT.dtype) @ values_RT.sum(dim=1)
    return in_row_RT + later_rows_R[:, None]


def mean_kl(batch: BatchedDataDict[Any]) -> float:
    """Return the mean of `token_kl` over the sampled tokens; NaN without tokens."""
    num_tokens = int(sampled_token_mask(batch).sum())
    return float(token_kl(batch).sum()) / num_tokens if num_tokens else math.nan
