"""On-policy distillation: GRPO's loop, in which a teacher scores every token that the student sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lucidrl.algorithms.config import DistillConfig
from lucidrl.algorithms.grpo import GRPO
from lucidrl.collectors.rollouts import Rollouts
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.losses.distillation import TEACHER_CANDIDATES, TEACHER_LOGPROBS, DistillationLoss
from lucidrl.losses.interfaces import CANDIDATE_IDS, LossFunction
from lucidrl.models.policy.policy import Policy
from lucidrl.profiling.spans import span


@dataclass(kw_only=True)
class Distillation(GRPO):
    """On-policy distillation with the components of its run."""

    config: DistillConfig
    teacher: Policy
    num_ids: int
    """Size of the vocabulary that student and teacher share."""

    def loss_fn(self) -> LossFunction:
        return DistillationLoss(
            self.loss_config,
            self.config.divergence,
            self.config.teacher_coefficient,
            on_policy=self.on_policy,
            measures_entropy=self.entropy.is_on,
        )

    def prepare(self, rollouts: Rollouts, is_plotted: bool = False) -> BatchedDataDict[Any]:
        """Return GRPO's training batch, with advantages times `reward_coefficient` and the scores of the teacher."""
        batch = super().prepare(rollouts, is_plotted)
        batch["advantages"] *= self.config.reward_coefficient
        rows = batch["sample_mask"].nonzero()[:, 0]  # masked rows are not scored
        rows = rows if len(rows) else torch.zeros(1, dtype=torch.int64)  # but the loss reads the columns
        for name, scores in self._scores(batch.select_indices(rows)).items():
            batch[name] = scores.new_zeros(batch.size, *scores.shape[1:]).index_copy(0, rows, scores)
        return batch

    @span("teacher")
    def _scores(self, samples: BatchedDataDict[Any]) -> dict[str, torch.Tensor]:
        """Return the columns that the loss reads."""
        if self.config.divergence == "sampled":
            return {TEACHER_LOGPROBS: self.teacher.get_logprobs(samples)}
        ids, logprobs = self.teacher.top_logprobs(samples, self.config.top_k, self.num_ids)
        return {CANDIDATE_IDS: ids, TEACHER_CANDIDATES: logprobs}
