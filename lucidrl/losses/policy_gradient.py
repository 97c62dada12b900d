"""The clipped policy gradient: over tokens for GRPO and related algorithms, over frames for PPO.

Shapes: B rows, T tokens; N frames.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from lucidrl.errors import ConfigError
from lucidrl.losses.config import ClippedPGConfig
from lucidrl.losses.importance import MAX_LOG_RATIO, ImportanceWeights, bounded_exp, mismatch_metrics
from lucidrl.losses.interfaces import (
    IMPORTANCE_MASK,
    STALENESS,
    FrameLosses,
    FrameOutputs,
    Frames,
    LossType,
    Need,
    TokenOutputs,
    sampled_token_mask,
    valid_token_mask,
)
from lucidrl.losses.masked import (
    global_mean_share,
    row_means,
    token_column,
    token_max,
    token_mean,
    token_min,
    token_output,
)
from lucidrl.losses.reductions import Metric, Metrics, Sum


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    # Beyond MAX_LOG_RATIO, k3 continues along its tangent: a clamp would give far-off tokens no gradient at all.
    bounded = (-log_ratio).clamp(max=MAX_LOG_RATIO)
    beyond = (-log_ratio - MAX_LOG_RATIO).clamp(min=0)
    return torch.expm1(bounded) - bounded + math.expm1(MAX_LOG_RATIO) * beyond


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": _k3,
}
"""Per-token estimators of KL(policy ‖ reference) from log(policy / reference) of sampled tokens."""


class ClippedPGLoss:
    """Clipped policy gradient with optional KL penalty, entropy bonus and correction for the generator's mismatch.

    With r = exp(logprobs - prev_logprobs), A the advantage and w the detached importance weight (1 without correction),

        loss = mean(w * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) + kl_coefficient * kl
                    - entropy_coefficient * entropy)

    where, for A < 0, `dual_clip` bounds the maximum at -A dual_clip. With `objective="cispo"`, the maximum is replaced
    by -A c logprobs, where c is the clipped ratio without gradient. docs/algorithms.md has the formula of each variant.

    The loss reads the columns `advantages` ([B, T],
    or [B] for whole rows) and, if the config needs them, `prev_logprobs`, `reference_policy_logprobs`,
    `generation_logprobs` and `importance_mask`. A batch with `generation_logprobs` always gets mismatch metrics.
    """

    def __init__(self, config: ClippedPGConfig, on_policy: bool = False, measures_entropy: bool = False) -> None:
        """Check that the config is complete.

        Args:
            on_policy: the batch serves one update only, so the current log-probabilities replace `prev_logprobs`.
            measures_entropy: report the entropy even if its coefficient is 0.
        """
        if config.normalization == "constant" and config.constant_length is None:
            raise ConfigError("normalization=constant needs a divisor; set constant_length to the most tokens per row")
        self.config = config
        self.on_policy = on_policy
        self.loss_type = LossType.TOKEN_LEVEL if config.normalization == "token" else LossType.SEQUENCE_LEVEL
        self._has_entropy = config.entropy_coefficient > 0 or measures_entropy
        self.needs: frozenset[Need] = frozenset({"logprobs", "entropy"} if self._has_entropy else {"logprobs"})

    def __call__(
        self,
        outputs: TokenOutputs | torch.Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, Metrics]:
        mask_BT = valid_token_mask(data)
        mean = self.mean(mask_BT, global_valid_seqs, global_valid_toks)
        logprobs_BT = token_output(outputs, "logprobs", mask_BT)
        prev_BT = logprobs_BT.detach() if self.on_policy else token_column(data, "prev_logprobs", mask_BT)

        surrogate_BT, metrics = self._surrogate(logprobs_BT, logprobs_BT - prev_BT, data, mask_BT)
        weight_BT, weight_metrics = self._importance_weight(logprobs_BT, data, mask_BT)
        if weight_BT is not None:
            surrogate_BT = surrogate_BT * weight_BT
        loss = mean(surrogate_BT)
        metrics |= weight_metrics
        metrics |= {"policy_loss": token_mean(surrogate_BT, mask_BT), "num_valid_tokens": Sum(mask_BT.sum())}

        if self.config.kl_coefficient > 0:
            reference_BT = token_column(data, "reference_policy_logprobs", mask_BT)
            kl_BT = KL_ESTIMATORS[self.config.kl_estimator](logprobs_BT - reference_BT)
            loss = loss + self.config.kl_coefficient * mean(kl_BT)
            metrics["kl"] = token_mean(kl_BT, mask_BT)
        if self._has_entropy:
            entropy_BT = token_output(outputs, "entropy", mask_BT)
            loss = loss - self.config.entropy_coefficient * mean(entropy_BT)
            metrics["entropy"] = token_mean(entropy_BT, mask_BT)
        return loss, metrics

    def mean(
        self, mask_BT: torch.Tensor, global_valid_seqs: torch.Tensor, global_valid_toks: torch.Tensor
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function that turns values [B, T] into this micro-batch's summand of the normalised mean."""
        return partial(
            global_mean_share,
            mask_BT=mask_BT,
            loss_type=self.loss_type,
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
            constant_length=self.config.constant_length if self.config.normalization == "constant" else None,
        )

    def _surrogate(
        self, logprobs_BT: torch.Tensor, log_ratio_BT: torch.Tensor, data: Mapping[str, Any], mask_BT: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Return the policy loss of each token, with metrics."""
        config = self.config
        advantages_BT = token_column(data, "advantages", mask_BT, per_row_allowed=True)
        if config.ratio_level == "sequence":
            log_ratio_BT = row_means(log_ratio_BT, mask_BT)[:, None].expand_as(mask_BT)
        elif config.ratio_level == "sequence_product":
            log_ratio_BT = log_ratio_BT.sum(dim=1, keepdim=True).expand_as(mask_BT)
        ratio_BT = bounded_exp(log_ratio_BT)
        low, high = 1 - config.clip_low, 1 + config.clip_high
        clipped_BT = ratio_BT.clamp(low, high)
        metrics: dict[str, Metric] = {
            "ratio/mean": token_mean(ratio_BT, mask_BT),
            "ratio/min": token_min(ratio_BT, mask_BT),
            "ratio/max": token_max(ratio_BT, mask_BT),
        }
        if config.objective == "cispo":  # every token has a gradient; the fractions count bounded weights
            metrics["clip_fraction/low"] = token_mean(ratio_BT < low, mask_BT)
            metrics["clip_fraction/high"] = token_mean(ratio_BT > high, mask_BT)
            return -advantages_BT * clipped_BT.detach() * logprobs_BT, metrics
        surrogate_BT = torch.maximum(-advantages_BT * ratio_BT, -advantages_BT * clipped_BT)
        # Counts only tokens without gradient: a token above `high` with negative advantage still has a gradient.
        metrics["clip_fraction/low"] = token_mean((advantages_BT < 0) & (ratio_BT < low), mask_BT)
        metrics["clip_fraction/high"] = token_mean((advantages_BT > 0) & (ratio_BT > high), mask_BT)
        if config.dual_clip is not None:
            most_BT = torch.where(advantages_BT < 0, -advantages_BT * config.dual_clip, torch.inf)
            metrics["clip_fraction/dual"] = token_mean(surrogate_BT > most_BT, mask_BT)
            surrogate_BT = torch.minimum(surrogate_BT, most_BT)
        return surrogate_BT, metrics

    def _importance_weight(
        self, now_BT: torch.Tensor, data: Mapping[str, Any], valid_BT: torch.Tensor
    ) -> tuple[torch.Tensor | None, dict[str, Metric]]:
        """Return the importance weight of each token (None without correction), and metrics of the mismatch.

        Args:
            now_BT: current log-probabilities.
        """
        correction, sampled_BT = self.config.importance_correction, sampled_token_mask(data)
        if correction == "none" and "generation_logprobs" not in data:
            return None, {}
        if correction == "mask" and IMPORTANCE_MASK not in data:
            token_column(data, IMPORTANCE_MASK, sampled_BT)  # raises, and names the function that makes the column
        # The excluded tokens have no current log-probabilities.
        takes_now = self.on_policy and IMPORTANCE_MASK not in data
        prev_BT = now_BT.detach() if takes_now else token_column(data, "prev_logprobs", sampled_BT)
        difference_BT = prev_BT - token_column(data, "generation_logprobs", sampled_BT)
        metrics = mismatch_metrics(difference_BT, sampled_BT)
        if correction == "none":
            return None, metrics
        weights = ImportanceWeights.of(self.config, difference_BT, sampled_BT)
        metrics |= weights.metrics(sampled_BT, valid_BT)
        weight_BT = weights.log_weight_BT.exp()
        if STALENESS in data:
            metrics["importance/mean_weight_late"] = token_mean(weight_BT, valid_BT & (data[STALENESS] > 0))
        return weight_BT, metrics


class ClippedFrameLoss:
    """The clipped loss of PPO. With r = probability now / probability when sampled, and A the advantage,

        policy loss = mean(max(-A r, -A clip(r, 1 - clip, 1 + clip))) - entropy_coefficient * mean(entropy)
        critic loss = mean((value - value target)²) / 2

    Both are plain means, so minibatches of equal size average to the loss of the batch.
    """

    def __init__(self, clip: float, entropy_coefficient: float):
        self._clip, self._entropy_coefficient = clip, entropy_coefficient

    def __call__(self, outputs: FrameOutputs, frames: Frames) -> FrameLosses:
        log_ratio_N = outputs.logprobs - frames.logprobs
        ratio_N = bounded_exp(log_ratio_N)
        clipped_N = ratio_N.clamp(1 - self._clip, 1 + self._clip)
        loss_policy = torch.maximum(-frames.advantages * ratio_N, -frames.advantages * clipped_N).mean()
        loss_value = 0.5 * (outputs.values - frames.value_targets).square().mean()
        entropy = outputs.entropy.mean()
        with torch.no_grad():
            metrics = {
                "loss_policy": loss_policy.detach(),
                "loss_value": loss_value.detach(),
                "entropy": entropy.detach(),
                # r - 1 - log r is never negative and has less variance than -log r.
                "approx_kl": (ratio_N - 1 - log_ratio_N).mean(),
                "clip_fraction": (ratio_N != clipped_N).to(ratio_N.dtype).mean(),
            }
        return FrameLosses(loss_policy - self._entropy_coefficient * entropy, loss_value, metrics)
