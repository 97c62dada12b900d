"""Importance weights, which correct a loss for the mismatch of generator and trainer, and metrics of this mismatch.

A weight compares the log-probabilities that a token has in training, before the first update, and in generation. Tokens
that the correction excludes must leave the counts by which a loss is normalised. These counts are known before any
micro-batch is computed, so the excluded tokens are a column of the batch, `IMPORTANCE_MASK`.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lucidrl.losses.config import ClippedPGConfig
from lucidrl.losses.interfaces import sampled_token_mask
from lucidrl.losses.masked import row_means, token_column, token_max, token_mean
from lucidrl.losses.reductions import Max, Metric, Quantile

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to ± this before `exp`; exp(20) = 5e8 is far from the limits of float32."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of a log ratio clamped to ± MAX_LOG_RATIO."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(frozen=True)
class ImportanceWeights:
    """Importance weights of the sampled tokens, without gradient."""

    log_ratio_BT: torch.Tensor
    """Log-probability in training minus log-probability in generation, at the level of the weights."""
    log_weight_BT: torch.Tensor
    """`log_ratio_BT` within the bounds."""
    is_over_BT: torch.Tensor
    """The weight was above the upper bound."""
    is_under_BT: torch.Tensor
    """The weight was below the lower bound."""

    @classmethod
    def of(cls, config: ClippedPGConfig, difference_BT: torch.Tensor, mask_BT: torch.Tensor) -> ImportanceWeights:
        """Compute the weights.

        Args:
            difference_BT: log-probability in training minus log-probability in generation; 0 where masked.
            mask_BT: the sampled tokens.
        """
        log_ratio_BT = difference_BT.detach()
        if config.importance_level == "sequence":
            log_ratio_BT = log_ratio_BT.sum(dim=1, keepdim=True).expand_as(mask_BT)
        elif config.importance_level == "sequence_mean":
            log_ratio_BT = row_means(log_ratio_BT, mask_BT)[:, None].expand_as(mask_BT)
        high = math.log(config.importance_cap)
        low = math.log(config.importance_floor) if config.importance_floor > 0 else -math.inf
        bounded_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        is_over_BT, is_under_BT = bounded_BT > high, bounded_BT < low
        return cls(log_ratio_BT, bounded_BT.clamp(low, high), is_over_BT, is_under_BT)

    def metrics(self, sampled_BT: torch.Tensor, valid_BT: torch.Tensor) -> dict[str, Metric]:
        """Metrics of the weights: how many were outside the bounds, and how much mismatch remains in the loss."""
        remaining_BT = (self.log_ratio_BT - self.log_weight_BT).abs()
        return {
            "importance/over_cap_fraction": token_mean(self.is_over_BT, sampled_BT),
            "importance/under_floor_fraction": token_mean(self.is_under_BT, sampled_BT),
            "importance/mean_weight": token_mean(self.log_weight_BT.exp(), valid_BT),
            "generation_mismatch/corrected_mean_abs_logprob_difference": token_mean(remaining_BT, valid_BT),
            "generation_mismatch/corrected_max_abs_logprob_difference": token_max(remaining_BT, valid_BT),
        }


def importance_mask(config: ClippedPGConfig, data: Mapping[str, Any]) -> torch.Tensor:
    """Return the column `IMPORTANCE_MASK` for `importance_correction="mask"`: 1 for tokens whose weight is in bounds.

    Args:
        data: a batch with the log-probabilities before the first update, `prev_logprobs`, and `generation_logprobs`.

    Example:
        >>> batch["importance_mask"] = importance_mask(config, batch)
    """
    mask_BT = sampled_token_mask(data)
    difference_BT = token_column(data, "prev_logprobs", mask_BT) - token_column(data, "generation_logprobs", mask_BT)
    weights = ImportanceWeights.of(config, difference_BT, mask_BT)
    return (mask_BT & ~weights.is_over_BT & ~weights.is_under_BT).float()


def mismatch_metrics(difference_BT: torch.Tensor, mask_BT: torch.Tensor) -> dict[str, Metric]:
    """Metrics of the differences between the log-probabilities of training and generation, which are 0 where masked."""
    distance_BT = difference_BT.detach().abs()
    of_rows_B = row_means(distance_BT, mask_BT).masked_fill(~mask_BT.any(dim=1), -torch.inf)
    return {
        "generation_mismatch/mean_abs_logprob_difference": token_mean(distance_BT, mask_BT),
        "generation_mismatch/max_abs_logprob_difference": token_max(distance_BT, mask_BT),
        "generation_mismatch/p99_abs_logprob_difference": Quantile.of(distance_BT[mask_BT], 0.99),
        "generation_mismatch/worst_sequence_mean_abs_logprob_difference": Max(of_rows_B.amax()),
        "generation_mismatch/token_mult_prob_error": token_mean(bounded_exp(distance_BT), mask_BT),
    }
