"""One call of `train`: global batches, each one optimizer step; steps with NaN or infinite gradients are left out."""

from __future__ import annotations

import math
from typing import Any

import torch

from lucidrl.algorithms.interfaces import LossFunction
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.collectives import gather_over, largest_over
from lucidrl.errors import TrainingError
from lucidrl.models.policy.optim import PolicyOptimizer
from lucidrl.models.policy.row_plans import RowPlans
from lucidrl.models.policy.sharding import Sharding
from lucidrl.models.policy.train_step import StepOutcome, merged_outcomes, run_micro_batches
from lucidrl.profiling.spans import span


class Training:
    """Walks the rows of this rank, in step with the other ranks.

    Args:
        max_nonfinite_steps: this many steps left out in a row end the training.
    """

    def __init__(self, sharding: Sharding, row_plans: RowPlans, device: torch.device, max_nonfinite_steps: int):
        self._sharding = sharding
        self._row_plans = row_plans
        self._device = device
        self._max_nonfinite_steps = max_nonfinite_steps
        self.nonfinite_steps_in_a_row = 0

    @span("train")
    def run(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        optimizer: PolicyOptimizer | None,
        rate: float,
        gbs: int | None,
        mbs: int | None,
    ) -> dict[str, Any]:
        """See `PolicyWorker.train`.

        Args:
            optimizer: None evaluates only.
            rate: the learning rate to report.
        """
        outcomes, grad_norm, num_skipped = [], 0.0, 0
        try:
            for batch in self._row_plans.global_batches(data, gbs):
                with torch.set_grad_enabled(optimizer is not None):
                    outcome = self._run_batch(batch, loss_fn, optimizer, mbs)
                outcomes.append(outcome)
                if optimizer is not None:
                    loss_scale = optimizer.loss_scale
                    with span("optimizer"):
                        grad_norm = optimizer.step()
                    num_skipped += self._note_step(grad_norm, outcome, optimizer.loss_scale < loss_scale)
        finally:
            if optimizer is not None:
                optimizer.zero_grad()  # after an exception in the loss, some of the gradient is there
        if optimizer is not None:
            optimizer.schedule()
        return {
            **merged_outcomes(outcomes, rate, self._sharding.mesh.dp_group),
            "grad_norm": torch.tensor(grad_norm, dtype=torch.float64),
            "num_skipped_steps": num_skipped,
        }

    def _run_batch(
        self, batch: BatchedDataDict[Any], loss_fn: LossFunction, optimizer: PolicyOptimizer | None, mbs: int | None
    ) -> StepOutcome:
        # Rows that are masked out as a whole take no part in the loss, and cost nothing.
        batch = batch.select_indices(batch["sample_mask"].nonzero()[:, 0]).to(self._device)
        plan = self._row_plans.for_training(batch, mbs)
        return run_micro_batches(
            self._sharding,
            batch,
            batch.microbatches(plan, length_multiple=self._row_plans.sequence_length_round),
            largest_over(len(plan), self._sharding.mesh.world),
            loss_fn,
            packed=self._row_plans.are_packed,
            backward=optimizer is not None,
            loss_scale=optimizer.loss_scale if optimizer is not None else 1.0,
        )

    def _note_step(self, grad_norm: float, outcome: StepOutcome, is_scale_lowered: bool) -> bool:
        """Count a skipped step; too many in a row end the training. All ranks see the same norm, and do the same."""
        if math.isfinite(grad_norm):
            self.nonfinite_steps_in_a_row = 0
            return False
        suspects = self._names_of_all_ranks(outcome.suspects())
        # With finite losses, gradients may only have been scaled up too far; a smaller scale is found within few steps.
        if suspects or not is_scale_lowered:
            self.nonfinite_steps_in_a_row += 1
        if self.nonfinite_steps_in_a_row >= self._max_nonfinite_steps:
            named = suspects or self._names_of_all_ranks([name for names in outcome.names for name in names])
            raise TrainingError(
                f"gradients were NaN or infinite in {self.nonfinite_steps_in_a_row} optimizer steps in a row "
                f"(last in samples {', '.join(map(str, named[:8]))}); lower the learning rate or look at those samples"
            )
        return True

    def _names_of_all_ranks(self, names: list[Any]) -> list[Any]:
        """Each once; ranks may work on the same rows."""
        gathered = gather_over(names, self._sharding.mesh.world)
        return list(dict.fromkeys(name for of_rank in gathered for name in of_rank))
