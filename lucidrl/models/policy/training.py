"""Training: one optimizer update per global batch; losses of micro-batches are normalised by global counts.

Updates with NaN or infinite gradients are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch.distributed import ProcessGroup

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.process_group import gather_over, sum_over
from lucidrl.errors import TrainingError
from lucidrl.losses.interfaces import CANDIDATE_IDS, LossFunction, TokenOutputs, valid_row_mask, valid_token_mask
from lucidrl.losses.reductions import Metric, Metrics, Quantile, Sum, reduce_metrics
from lucidrl.models.optim import PolicyOptimizer
from lucidrl.models.policy.row_plans import MicroBatch, RowPlans
from lucidrl.models.policy.sharding import Sharding
from lucidrl.profiling.spans import span


@dataclass
class StepResult:
    """Results of one global batch on this rank."""

    global_valid_seqs: torch.Tensor
    global_valid_toks: torch.Tensor
    losses: list[torch.Tensor] = field(default_factory=list)
    """One summand of the loss per micro-batch."""
    parts: list[tuple[Metrics, torch.Tensor]] = field(default_factory=list)
    """(Metrics, number of valid samples) per micro-batch."""
    names: list[list[Any]] = field(default_factory=list)
    """Sample ids (column `idx`) per micro-batch, for errors."""
    grad_norm: float = 0.0
    """Gradient norm before clipping; 0 in evaluation."""

    @property
    def is_skipped(self) -> bool:
        """Whether gradients were NaN or infinite, so that the weights did not change."""
        return not math.isfinite(self.grad_norm)

    def add(self, loss: torch.Tensor, metrics: Metrics, micro: BatchedDataDict[Any]) -> None:
        self.losses.append(loss.detach())
        self.parts.append((metrics, micro["sample_mask"].sum()))
        self.names.append(list(micro["idx"]) if "idx" in micro else ["unnamed"] * micro.size)

    @property
    def loss(self) -> torch.Tensor:
        """Sum of `losses`, in float64 on every rank, even on ranks without a micro-batch."""
        zero = torch.zeros_like(self.global_valid_toks, dtype=torch.float64)
        return sum(self.losses, start=zero)

    def metrics_as_floats(self) -> list[tuple[Metrics, float]]:
        """`parts` with Python numbers, which can be sent to other ranks."""
        return [
            ({name: _as_floats(metric) for name, metric in metrics.items()}, float(num_valid_samples))
            for metrics, num_valid_samples in self.parts
        ]

    def suspects(self) -> list[Any]:
        """Return the samples of micro-batches with a NaN or infinite loss; empty if all losses are finite."""
        bad = [names for names, loss in zip(self.names, self.losses, strict=True) if not torch.isfinite(loss)]
        return [name for names in bad for name in names]


class Training:
    """Makes optimizer updates from this rank's rows, in lock-step with the other ranks.

    Args:
        max_nonfinite_steps: raise TrainingError after this many consecutive skipped steps.
    """

    def __init__(self, sharding: Sharding, row_plans: RowPlans, max_nonfinite_steps: int):
        self._sharding, self._row_plans = sharding, row_plans
        self._max_nonfinite_steps = max_nonfinite_steps
        self.nonfinite_steps_in_a_row = 0

    def step(
        self, batch: BatchedDataDict[Any], loss_fn: LossFunction, optimizer: PolicyOptimizer | None, mbs: int | None
    ) -> StepResult:
        """Run forward and backward pass on this rank's rows of a global batch, then one optimizer update.

        Args:
            optimizer: None to evaluate only.
            mbs: rows per micro-batch; by default as configured.
        """
        # Skip fully masked rows: they do not contribute to the loss.
        batch = batch.select_indices(batch["sample_mask"].nonzero()[:, 0])
        plan, mesh = self._row_plans.for_training(batch, mbs), self._sharding.mesh
        batch = batch.to(mesh.device)
        result = StepResult(
            global_valid_seqs=sum_over(valid_row_mask(batch).sum(), mesh.dp_group),
            global_valid_toks=sum_over(valid_token_mask(batch).sum(), mesh.dp_group),
        )
        scale = self._sharding.gradient_scale * (optimizer.loss_scale if optimizer is not None else 1.0)
        try:
            with torch.set_grad_enabled(optimizer is not None):
                for micro in self._row_plans.micro_batches(batch, plan):
                    with self._sharding.accumulating(micro.is_last):
                        with span("forward"):
                            loss = self._loss(micro, loss_fn, result)
                        if optimizer is not None:
                            with span("backward"):
                                (loss * scale).backward()
            if optimizer is not None:
                self._update(optimizer, result)
        except BaseException:
            if optimizer is not None:
                optimizer.zero_grad()  # drop a partial gradient
            raise
        return result

    def _loss(self, micro: MicroBatch, loss_fn: LossFunction, result: StepResult) -> torch.Tensor:
        """Return the loss of a micro-batch; add it and its metrics to `result`."""
        model = self._sharding.model
        num_before = model.num_computed_tokens
        outputs = self._sharding.root(
            micro.rows["input_ids"],
            micro.rows["input_lengths"],
            loss_fn.needs,
            selected=valid_token_mask(micro.rows),
            packed=micro.is_packed,
            shared=self._row_plans.share_prefixes,
            candidate_ids=micro.rows[CANDIDATE_IDS] if "candidates" in loss_fn.needs else None,
        )
        if not micro.is_real:
            return _zero_loss(outputs)
        counts = result.global_valid_seqs, result.global_valid_toks
        loss, metrics = loss_fn(_declared_outputs(outputs, loss_fn), micro.rows, *counts)
        tokens = {
            "row_tokens": Sum(micro.rows["input_lengths"].sum()),
            "computed_tokens": Sum(model.num_computed_tokens - num_before),
        }
        result.add(loss, {**metrics, **tokens}, micro.rows)
        return loss

    def _update(self, optimizer: PolicyOptimizer, result: StepResult) -> None:
        """Update the weights; raise TrainingError after too many consecutive skipped updates.

        All ranks get the same gradient norm, so all ranks raise together.
        """
        loss_scale = optimizer.loss_scale
        with span("optimizer"):
            result.grad_norm = optimizer.step()
        if not result.is_skipped:
            self.nonfinite_steps_in_a_row = 0
            return
        suspects = self._over_all_ranks(result.suspects())
        # With finite losses the loss scale may just be too large; the optimizer lowers it within a few steps.
        if suspects or optimizer.loss_scale >= loss_scale:
            self.nonfinite_steps_in_a_row += 1
        if self.nonfinite_steps_in_a_row >= self._max_nonfinite_steps:
            named = suspects or self._over_all_ranks([name for names in result.names for name in names])
            raise TrainingError(
                f"gradients were NaN or infinite in {self.nonfinite_steps_in_a_row} optimizer steps in a row "
                f"(last in samples {', '.join(map(str, named[:8]))}); lower the learning rate or check these samples"
            )

    def _over_all_ranks(self, names: list[Any]) -> list[Any]:
        """Gather names from all ranks, without duplicates (ranks may share rows)."""
        gathered = gather_over(names, self._sharding.mesh.world)
        return list(dict.fromkeys(name for of_rank in gathered for name in of_rank))


def merged_results(results: Sequence[StepResult], rate: float, dp_group: ProcessGroup | None) -> dict[str, Any]:
    """Return the result of `PolicyWorker.train`, without `rank`."""
    per_micro_batch: dict[str, list[float]] = {}
    own_parts: list[tuple[Metrics, float]] = []
    for result in results:
        common = {
            "lr": rate,
            "global_valid_seqs": float(result.global_valid_seqs),
            "global_valid_toks": float(result.global_valid_toks),
        }
        for metrics, num_valid_samples in result.metrics_as_floats():
            own_parts.append((metrics, num_valid_samples))
            values: dict[str, Any] = {name: getattr(metric, "value", metric) for name, metric in metrics.items()}
            for name, value in {**values, **common, "num_valid_samples": num_valid_samples}.items():
                per_micro_batch.setdefault(name, []).append(value)
    parts = [part for rank_parts in gather_over(own_parts, dp_group) for part in rank_parts]
    losses = torch.stack([result.loss for result in results])
    return {
        "global_loss": sum_over(losses, dp_group).cpu(),
        "all_mb_metrics": per_micro_batch,
        "metrics": reduce_metrics(parts) | {"lr": rate},
        "grad_norm": torch.tensor(results[-1].grad_norm, dtype=torch.float64),
        "num_skipped_steps": sum(result.is_skipped for result in results),
    }


def _as_floats(metric: Any) -> Any:
    if not isinstance(metric, Metric):
        return float(metric)
    if isinstance(metric, Quantile):
        return replace(metric, counts=torch.as_tensor(metric.counts).tolist())
    numbers: dict[str, Any] = {field.name: float(getattr(metric, field.name)) for field in fields(metric)}
    return replace(metric, **numbers)


def _zero_loss(outputs: TokenOutputs) -> torch.Tensor:
    """Return a loss of 0 that depends on all outputs, for an empty micro-batch: backward must run on every rank."""
    computed = [getattr(outputs, field.name) for field in fields(outputs)]
    return torch.stack([tensor.sum() for tensor in computed if tensor is not None]).sum() * 0.0


def _declared_outputs(outputs: TokenOutputs, loss_fn: LossFunction) -> TokenOutputs | torch.Tensor:
    if loss_fn.needs == {"logits"}:
        assert outputs.logits is not None
        return outputs.logits
    return outputs
