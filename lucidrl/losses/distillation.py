"""On-policy distillation: the reverse KL divergence of student and teacher on tokens that the student sampled.

Shapes: B rows, T tokens, K candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lucidrl.errors import DataError
from lucidrl.losses.config import ClippedPGConfig, Divergence
from lucidrl.losses.interfaces import Need, TokenOutputs, valid_token_mask
from lucidrl.losses.masked import token_column, token_mean, token_output
from lucidrl.losses.policy_gradient import ClippedPGLoss
from lucidrl.losses.reductions import Metrics

TEACHER_LOGPROBS = "teacher_logprobs"
"""Column: [B, T] log-probabilities of the tokens under the teacher."""
TEACHER_CANDIDATES = "teacher_candidates"
"""Column: [B, T, K + 1] the teacher's `candidates` for the column `CANDIDATE_IDS`."""
LOWEST_LOGPROB = -100.0
"""Smaller log-probabilities of all other tokens count as this; -inf if every token is a candidate."""


class DistillationLoss:
    """The policy-gradient loss, plus the reverse KL divergence KL(student || teacher) of every token.

    `sampled`: the advantage of a token grows by teacher_coefficient * (teacher log-probability - log-probability before
    the update). The expected gradient is that of teacher_coefficient * KL.

    `top_k`: the loss grows by teacher_coefficient * mean(KL), where KL is exact over the teacher's K likeliest tokens
    and all other tokens together. It is at most the divergence over the whole vocabulary, and equal if K is its size.

    The loss reads the columns of `ClippedPGLoss`, with rewards in `advantages`. It reads `teacher_logprobs` for
    `sampled`, and `candidate_ids` and `teacher_candidates` for `top_k`.
    """

    def __init__(
        self,
        config: ClippedPGConfig,
        divergence: Divergence = "sampled",
        teacher_coefficient: float = 1.0,
        on_policy: bool = False,
        measures_entropy: bool = False,
    ) -> None:
        self._policy_gradient = ClippedPGLoss(config, on_policy, measures_entropy)
        self._divergence, self._coefficient, self._on_policy = divergence, teacher_coefficient, on_policy
        self.loss_type = self._policy_gradient.loss_type
        candidates: frozenset[Need] = frozenset({"candidates"} if divergence == "top_k" else ())
        self.needs = self._policy_gradient.needs | candidates

    def __call__(
        self,
        outputs: TokenOutputs | torch.Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, Metrics]:
        mask_BT = valid_token_mask(data)
        if self._divergence == "sampled":
            now_BT = token_output(outputs, "logprobs", mask_BT).detach()
            prev_BT = now_BT if self._on_policy else token_column(data, "prev_logprobs", mask_BT)
            log_ratio_BT = prev_BT - token_column(data, TEACHER_LOGPROBS, mask_BT)
            advantages_BT = token_column(data, "advantages", mask_BT, per_row_allowed=True)
            with_teacher = {**data, "advantages": advantages_BT - self._coefficient * log_ratio_BT}
            loss, metrics = self._policy_gradient(outputs, with_teacher, global_valid_seqs, global_valid_toks)
            return loss, {**metrics, "teacher_kl": token_mean(log_ratio_BT, mask_BT)}
        loss, metrics = self._policy_gradient(outputs, data, global_valid_seqs, global_valid_toks)
        kl_BT, mass_BT = _divergence(_candidates(outputs, mask_BT), _teacher_candidates(data, mask_BT))
        kl = self._policy_gradient.mean(mask_BT, global_valid_seqs, global_valid_toks)(kl_BT)
        found = {"teacher_kl": token_mean(kl_BT, mask_BT), "teacher_candidate_mass": token_mean(mass_BT, mask_BT)}
        return loss + self._coefficient * kl, {**metrics, **found}


def _divergence(student_BTK: torch.Tensor, teacher_BTK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergence of each token, and the student's probability of all candidates, both [B, T]."""
    student_BTK, teacher_BTK = student_BTK.clamp(min=LOWEST_LOGPROB), teacher_BTK.clamp(min=LOWEST_LOGPROB)
    probability_BTK = student_BTK.exp()
    kl_BT = (probability_BTK * (student_BTK - teacher_BTK)).sum(dim=-1)
    return kl_BT, probability_BTK[..., :-1].sum(dim=-1)


def _candidates(outputs: TokenOutputs | torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    candidates = getattr(outputs, "candidates", None)
    if candidates is None:
        raise DataError("the model outputs have no candidates; add 'candidates' to the `needs` of the loss")
    return candidates.masked_fill(~mask_BT[..., None], 0)


def _teacher_candidates(data: Mapping[str, Any], mask_BT: torch.Tensor) -> torch.Tensor:
    if TEACHER_CANDIDATES not in data:
        raise DataError(
            f"the batch has no column {TEACHER_CANDIDATES!r}, which the loss reads; add it: the teacher's "
            "top_logprobs returns it"
        )
    column: torch.Tensor = data[TEACHER_CANDIDATES]
    return column.masked_fill(~mask_BT[..., None], 0)
