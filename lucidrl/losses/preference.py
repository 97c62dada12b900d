"""Losses on preferences: DPO, IPO and KTO of a policy, and Bradley-Terry of a reward model.

DPO: https://arxiv.org/abs/2305.18290, IPO: https://arxiv.org/abs/2310.12036, KTO: https://arxiv.org/abs/2402.01306.

Shapes: B rows, T tokens, P pairs. A pair is two neighbouring rows with equal `PAIR_IDS`. Both are in one micro-batch,
because their loss is not a sum over rows; everything else about the cut of a batch into micro-batches is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import logsigmoid, softplus

from lucidrl.errors import DataError
from lucidrl.losses.config import PreferenceConfig
from lucidrl.losses.interfaces import PAIR_IDS, LossType, Need, TokenOutputs, valid_token_mask
from lucidrl.losses.masked import token_output
from lucidrl.losses.reductions import Mean, Metrics

PREFERENCE = "preference"
"""Column, [B]: 1 for a chosen or desirable completion, -1 for a rejected or undesirable one."""
REFERENCE_SUMS = "reference_logprob_sums"
"""Column, [B] float64: log-probability of the row's completion under the reference policy."""
KL_BASELINE = "kl_baseline"
"""Column of KTO, [B]: the reference point z, equal in all rows of a step; see `PreferenceLoss`."""


class PreferenceLoss:
    """Preference losses of a policy relative to a reference policy.

    With d = log(policy / reference) of a completion, a sum over its tokens, c chosen and r rejected:

        dpo:  -log sigmoid(beta (d_c - d_r)),  a mean over pairs
        ipo:  (d_c / n_c - d_r / n_r - 1 / (2 beta))²,  a mean over pairs; n is the number of tokens
        kto:  w (1 - sigmoid(± beta (d - z))),  a mean over rows; + and w = desirable_weight if the completion is
              desirable, - and w = undesirable_weight otherwise

    KTO's reference point z estimates KL(policy || reference). It is max(0, mean of d over completions of other
    prompts), has no gradient, and comes from the batch, so that it is the same in every micro-batch.

    The loss reads the columns `PREFERENCE`, `REFERENCE_SUMS`, for pairs `PAIR_IDS`, and for kto `KL_BASELINE`. KTO
    needs no pairs; where there are some, their accuracy is measured too.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    needs: frozenset[Need] = frozenset({"logprobs"})

    def __init__(self, config: PreferenceConfig) -> None:
        self._config = config

    def __call__(
        self,
        outputs: TokenOutputs | torch.Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, Metrics]:
        mask_BT, config = valid_token_mask(data), self._config
        logprob_B = token_output(outputs, "logprobs", mask_BT).sum(dim=1)
        ratio_B = logprob_B - _column(data, REFERENCE_SUMS).to(logprob_B.dtype)
        is_chosen_B = _column(data, PREFERENCE) > 0
        is_paired = PAIR_IDS in data
        if config.loss == "kto":
            signed_B = config.beta * (ratio_B - _column(data, KL_BASELINE).to(ratio_B.dtype))
            signed_B = torch.where(is_chosen_B, signed_B, -signed_B)
            desirable, undesirable = map(signed_B.new_tensor, (config.desirable_weight, config.undesirable_weight))
            weight_B = torch.where(is_chosen_B, desirable, undesirable)
            loss = (weight_B * (1 - signed_B.sigmoid())).sum() / global_valid_seqs.clamp(min=1)
        else:
            chosen_P, rejected_P = pairs_of(data)
            if config.loss == "ipo":
                mean_B = ratio_B / mask_BT.sum(dim=1).clamp(min=1)
                loss_P = (mean_B[chosen_P] - mean_B[rejected_P] - 1 / (2 * config.beta)).square()
            else:
                loss_P = -logsigmoid(config.beta * (ratio_B[chosen_P] - ratio_B[rejected_P]))
            loss = 2 * loss_P.sum() / global_valid_seqs.clamp(min=1)
        reward_B, logprob_B = config.beta * ratio_B.detach(), logprob_B.detach()
        metrics: dict[str, Mean] = {
            "chosen_reward": _mean(reward_B[is_chosen_B]),
            "rejected_reward": _mean(reward_B[~is_chosen_B]),
            "chosen_logprob": _mean(logprob_B[is_chosen_B]),
            "rejected_logprob": _mean(logprob_B[~is_chosen_B]),
        }
        return loss, {**metrics, **(_of_pairs(reward_B, data) if is_paired else {})}


class BradleyTerryLoss:
    """The loss of a reward model: -log sigmoid(s_c - s_r) with the scores s, a mean over pairs.

    The loss reads the model's value at the token that `token_mask` marks in each row, and the columns `PREFERENCE` and
    `PAIR_IDS`.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    needs: frozenset[Need] = frozenset({"values"})

    def __call__(
        self,
        outputs: TokenOutputs | torch.Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, Metrics]:
        score_B = token_output(outputs, "values", data["token_mask"].bool()).sum(dim=1)
        chosen_P, rejected_P = pairs_of(data)
        loss = 2 * softplus(score_B[rejected_P] - score_B[chosen_P]).sum() / global_valid_seqs.clamp(min=1)
        scores = {"chosen_reward": score_B[chosen_P], "rejected_reward": score_B[rejected_P]}
        return loss, {**{name: _mean(values.detach()) for name, values in scores.items()}, **_of_pairs(score_B, data)}


def pairs_of(data: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the chosen and of the rejected completions, [P] each.

    Raises:
        DataError: a row has no partner, or both rows of a pair are chosen or rejected.
    """
    ids_B, sign_B = _column(data, PAIR_IDS), _column(data, PREFERENCE)
    is_even = len(ids_B) % 2 == 0
    if not is_even or bool((ids_B[::2] != ids_B[1::2]).any()) or bool((sign_B[::2] * sign_B[1::2] >= 0).any()):
        raise DataError(
            f"the {len(ids_B)} rows of a micro-batch are not pairs of one chosen and one rejected completion; put both "
            f"rows of a pair side by side, with the same number in the column {PAIR_IDS!r} and the same sample_mask"
        )
    first_P = torch.arange(0, len(ids_B), 2, device=ids_B.device)
    is_second_P = (sign_B[::2] < 0).long()
    return first_P + is_second_P, first_P + 1 - is_second_P


def _of_pairs(reward_B: torch.Tensor, data: Mapping[str, Any]) -> dict[str, Mean]:
    """Return the metrics of pairs; a pair with equal rewards counts as half right."""
    ids_B = data[PAIR_IDS]
    has_partner_B = torch.zeros_like(ids_B, dtype=torch.bool)
    has_partner_B[1:] = ids_B[1:] == ids_B[:-1]
    has_partner_B[:-1] |= has_partner_B[1:].clone()
    kept = {name: data[name][has_partner_B] for name in (PAIR_IDS, PREFERENCE)}
    chosen_P, rejected_P = pairs_of(kept)
    reward_B = reward_B.detach()[has_partner_B]
    margin_P = reward_B[chosen_P] - reward_B[rejected_P]
    return {"accuracy": _mean((margin_P.sign() + 1) / 2), "reward_margin": _mean(margin_P)}


def _mean(values: torch.Tensor) -> Mean:
    # Summed in float64, so that the reduced mean does not depend on how a large batch was split.
    return Mean(values.sum(dtype=torch.float64) / max(len(values), 1), weight=len(values))


def _column(data: Mapping[str, Any], name: str) -> torch.Tensor:
    if name not in data:
        raise DataError(
            f"the batch has no column {name!r}, which the loss reads; add it: lucidrl.algorithms.pairs does"
        )
    column: torch.Tensor = data[name]
    return column
