"""Training: each global batch is one optimizer step, of micro-batches whose losses are normalised by global counts.

Steps with NaN or infinite gradients are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch.distributed import ProcessGroup

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.collectives import gather_over, sum_over
from lucidrl.errors import TrainingError
from lucidrl.losses.interfaces import LossFunction, TokenOutputs, valid_token_mask
from lucidrl.losses.reductions import Max, Mean, Metrics, Min, Sum, reduce_metrics
from lucidrl.models.optim import PolicyOptimizer
from lucidrl.models.policy.row_plans import RowPlans
from lucidrl.models.policy.sharding import Sharding
from lucidrl.profiling.spans import span


@dataclass
class StepOutcome:
    """What the micro-batches of one global batch gave."""

    global_valid_seqs: torch.Tensor
    global_valid_toks: torch.Tensor
    losses: list[torch.Tensor] = field(default_factory=list)
    """Each micro-batch's share of the loss; they add up to it."""
    parts: list[tuple[Metrics, torch.Tensor]] = field(default_factory=list)
    """Metrics and number of valid samples of each micro-batch."""
    names: list[list[Any]] = field(default_factory=list)
    """What the rows of each micro-batch are called, to name them when something is wrong with them."""
    grad_norm: float = 0.0
    """Before clipping; 0 if nothing was trained."""
    is_skipped: bool = False
    """The gradients were NaN or infinite, and the weights are as before."""

    def add(self, loss: torch.Tensor, metrics: Metrics, micro: BatchedDataDict[Any]) -> None:
        """Note what a micro-batch gave."""
        self.losses.append(loss.detach())
        self.parts.append((metrics, micro["sample_mask"].sum()))
        self.names.append(list(micro["idx"]) if "idx" in micro else ["unnamed"] * micro.size)

    @property
    def loss(self) -> torch.Tensor:
        """In float64, whatever the model computes in: ranks without a micro-batch add theirs to that of the others."""
        zero = torch.zeros_like(self.global_valid_toks, dtype=torch.float64)
        return sum(self.losses, start=zero)

    def plain_parts(self) -> list[tuple[Metrics, float]]:
        """`parts` in plain numbers, which can be sent to other ranks."""
        return [
            ({name: _in_numbers(metric) for name, metric in metrics.items()}, float(num_valid_samples))
            for metrics, num_valid_samples in self.parts
        ]

    def suspects(self) -> list[Any]:
        """The rows of micro-batches whose loss is not finite; none if only gradients are not."""
        bad = [names for names, loss in zip(self.names, self.losses, strict=True) if not torch.isfinite(loss)]
        return [name for names in bad for name in names]


class Training:
    """Makes optimizer steps of this rank's rows, in step with the other ranks.

    Args:
        max_nonfinite_steps: this many skipped steps in a row end the training.
    """

    def __init__(self, sharding: Sharding, row_plans: RowPlans, max_nonfinite_steps: int):
        self._sharding, self._row_plans = sharding, row_plans
        self._max_nonfinite_steps = max_nonfinite_steps
        self.nonfinite_steps_in_a_row = 0

    def step(
        self, batch: BatchedDataDict[Any], loss_fn: LossFunction, optimizer: PolicyOptimizer | None, mbs: int | None
    ) -> StepOutcome:
        """Forward and backward through this rank's share of a global batch, then one step of the optimizer.

        Args:
            optimizer: None evaluates only.
            mbs: rows per micro-batch; by default as configured.
        """
        # Rows that are masked out as a whole take no part in the loss, and cost nothing.
        batch = batch.select_indices(batch["sample_mask"].nonzero()[:, 0])
        plan, mesh = self._row_plans.for_training(batch, mbs), self._sharding.mesh
        batch = batch.to(mesh.device)
        counts = (
            sum_over(batch["sample_mask"].sum(), mesh.dp_group),
            sum_over(valid_token_mask(batch).sum(), mesh.dp_group),
        )
        outcome = StepOutcome(*counts)
        scale = self._sharding.gradient_scale * (optimizer.loss_scale if optimizer is not None else 1.0)
        try:
            with torch.set_grad_enabled(optimizer is not None):
                for micro in self._row_plans.micro_batches(batch, plan):
                    with self._sharding.accumulating(micro.is_last):
                        with span("forward"):
                            outputs = self._sharding.root(
                                micro.rows["input_ids"],
                                micro.rows["input_lengths"],
                                loss_fn.needs,
                                selected=valid_token_mask(micro.rows),
                                packed=self._row_plans.are_packed,
                            )
                            if micro.is_real:
                                loss, metrics = loss_fn(_as_declared(outputs, loss_fn), micro.rows, *counts)
                                outcome.add(loss, metrics, micro.rows)
                            else:
                                loss = _nothing(outputs)
                        if optimizer is not None:
                            with span("backward"):
                                (loss * scale).backward()
            if optimizer is not None:
                self._update(optimizer, outcome)
        except BaseException:
            if optimizer is not None:
                optimizer.zero_grad()  # some of the gradient may be there
            raise
        return outcome

    def _update(self, optimizer: PolicyOptimizer, outcome: StepOutcome) -> None:
        """Step, and count a skipped step; too many in a row end the training. All ranks see the same norm."""
        loss_scale = optimizer.loss_scale
        with span("optimizer"):
            outcome.grad_norm = optimizer.step()
        outcome.is_skipped = not math.isfinite(outcome.grad_norm)
        if not outcome.is_skipped:
            self.nonfinite_steps_in_a_row = 0
            return
        suspects = self._names_of_all_ranks(outcome.suspects())
        # With finite losses, gradients may only have been scaled up too far; a smaller scale is found within few steps.
        if suspects or optimizer.loss_scale >= loss_scale:
            self.nonfinite_steps_in_a_row += 1
        if self.nonfinite_steps_in_a_row >= self._max_nonfinite_steps:
            named = suspects or self._names_of_all_ranks([name for names in outcome.names for name in names])
            raise TrainingError(
                f"gradients were NaN or infinite in {self.nonfinite_steps_in_a_row} optimizer steps in a row "
                f"(last in samples {', '.join(map(str, named[:8]))}); lower the learning rate or look at those samples"
            )

    def _names_of_all_ranks(self, names: list[Any]) -> list[Any]:
        """Each once; ranks may work on the same rows."""
        gathered = gather_over(names, self._sharding.mesh.world)
        return list(dict.fromkeys(name for of_rank in gathered for name in of_rank))


def merged_outcomes(outcomes: Sequence[StepOutcome], rate: float, dp_group: ProcessGroup | None) -> dict[str, Any]:
    """The numbers of a `train` call.

    Returns:
        What `PolicyWorker.train` documents, but for `rank`.
    """
    per_micro_batch: dict[str, list[float]] = {}
    own_parts: list[tuple[Metrics, float]] = []
    for outcome in outcomes:
        common = {
            "lr": rate,
            "global_valid_seqs": float(outcome.global_valid_seqs),
            "global_valid_toks": float(outcome.global_valid_toks),
        }
        for metrics, num_valid_samples in outcome.plain_parts():
            own_parts.append((metrics, num_valid_samples))
            values: dict[str, Any] = {name: getattr(metric, "value", metric) for name, metric in metrics.items()}
            for name, value in {**values, **common, "num_valid_samples": num_valid_samples}.items():
                per_micro_batch.setdefault(name, []).append(value)
    parts = [part for rank_parts in gather_over(own_parts, dp_group) for part in rank_parts]
    losses = torch.stack([outcome.loss for outcome in outcomes])
    return {
        "global_loss": sum_over(losses, dp_group).cpu(),
        "all_mb_metrics": per_micro_batch,
        "metrics": reduce_metrics(parts) | {"lr": rate},
        "grad_norm": torch.tensor(outcomes[-1].grad_norm, dtype=torch.float64),
        "num_skipped_steps": sum(outcome.is_skipped for outcome in outcomes),
    }


def _in_numbers(metric: Any) -> Any:
    if not isinstance(metric, Sum | Mean | Min | Max):
        return float(metric)
    numbers: dict[str, Any] = {field.name: float(getattr(metric, field.name)) for field in fields(metric)}
    return replace(metric, **numbers)


def _nothing(outputs: TokenOutputs) -> torch.Tensor:
    """A loss of 0 that reaches all that was computed; the loss function is not asked about rows that do not exist."""
    computed = [getattr(outputs, field.name) for field in fields(outputs)]
    return torch.stack([tensor.sum() for tensor in computed if tensor is not None]).sum() * 0.0


def _as_declared(outputs: TokenOutputs, loss_fn: LossFunction) -> TokenOutputs | torch.Tensor:
    if loss_fn.needs == {"logits"}:
        assert outputs.logits is not None
        return outputs.logits
    return outputs
