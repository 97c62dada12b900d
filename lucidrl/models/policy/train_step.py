"""One optimizer step: micro-batches forward and backward, with every loss normalised by global counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch.distributed import ProcessGroup

from lucidrl.algorithms.interfaces import (
    LossFunction,
    Max,
    Mean,
    Metrics,
    Min,
    Sum,
    TokenOutputs,
    reduce_metrics,
    valid_token_mask,
)
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.collectives import gather_over, sum_over
from lucidrl.distributed.columns import ColumnKind
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


def run_micro_batches(
    sharding: Sharding,
    batch: BatchedDataDict[Any],
    micro_batches: Iterator[BatchedDataDict[Any]],
    rounds: int,
    loss_fn: LossFunction,
    *,
    packed: bool,
    backward: bool,
    loss_scale: float = 1.0,
) -> StepOutcome:
    """Forward (and backward) through this rank's share of a global batch; gradients add up in the parameters.

    Args:
        loss_scale: what the gradients are to be too large by.
        rounds: forward passes to make, at least as many as there are micro-batches: all ranks make the same number,
            because they gather weights from each other.
    """
    dp_group = sharding.mesh.dp_group
    outcome = StepOutcome(
        sum_over(batch["sample_mask"].sum(), dp_group), sum_over(valid_token_mask(batch).sum(), dp_group)
    )
    for number, (micro, is_real) in enumerate(with_empty_rounds(micro_batches, batch, rounds)):
        with sharding.accumulating(is_last=number == rounds - 1):
            with span("forward"):
                outputs = sharding.root(
                    micro["input_ids"],
                    micro["input_lengths"],
                    loss_fn.needs,
                    selected=valid_token_mask(micro),
                    packed=packed,
                )
                if is_real:
                    counts = outcome.global_valid_seqs, outcome.global_valid_toks
                    loss, metrics = loss_fn(_as_declared(outputs, loss_fn), micro, *counts)
                else:
                    loss = _nothing(outputs)
            if backward:
                with span("backward"):
                    (loss * (sharding.gradient_scale * loss_scale)).backward()
        if is_real:
            outcome.losses.append(loss.detach())
            outcome.parts.append((metrics, micro["sample_mask"].sum()))
            outcome.names.append(list(micro["idx"]) if "idx" in micro else ["unnamed"] * micro.size)
    return outcome


def merged_outcomes(outcomes: Sequence[StepOutcome], rate: float, dp_group: ProcessGroup | None) -> dict[str, Any]:
    """The numbers of a `train` call.

    Returns:
        `global_loss` (one value a global batch, of all ranks), `all_mb_metrics` (metric → one value a micro-batch of
        this rank) and `metrics` (of all ranks, reduced as the loss declared).
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
            values = {name: getattr(metric, "value", metric) for name, metric in metrics.items()}
            for name, value in {**values, **common, "num_valid_samples": num_valid_samples}.items():
                per_micro_batch.setdefault(name, []).append(value)
    parts = [part for rank_parts in gather_over(own_parts, dp_group) for part in rank_parts]
    losses = torch.stack([outcome.loss for outcome in outcomes])
    return {
        "global_loss": sum_over(losses, dp_group).cpu(),
        "all_mb_metrics": per_micro_batch,
        "metrics": reduce_metrics(parts) | {"lr": rate},
    }


def with_empty_rounds(
    micro_batches: Iterator[BatchedDataDict[Any]], like: BatchedDataDict[Any], rounds: int
) -> Iterator[tuple[BatchedDataDict[Any], bool]]:
    """The micro-batches, then empty ones until there are `rounds`; and whether each is a real one."""
    number = 0
    for micro in micro_batches:
        yield micro, True
        number += 1
    for _ in range(number, rounds):
        yield _empty_row(like), False


def _empty_row(like: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """One row of a single token that counts nowhere, with the columns of `like`."""
    columns: dict[str, Any] = {}
    for name in like:
        value, is_token = like[name], like.kind(name) is ColumnKind.TOKEN
        if isinstance(value, torch.Tensor):
            columns[name] = value.new_zeros(1, *((1, *value.shape[2:]) if is_token else value.shape[1:]))
        else:
            columns[name] = [None]
    columns["input_lengths"] = like["input_lengths"].new_ones(1)
    return BatchedDataDict(columns, kinds={name: like.kind(name) for name in like})


def _in_numbers(metric: Any) -> Any:
    if not isinstance(metric, Sum | Mean | Min | Max):
        return float(metric)
    return replace(metric, **{field.name: float(getattr(metric, field.name)) for field in fields(metric)})


def _nothing(outputs: TokenOutputs) -> torch.Tensor:
    """A loss of 0 that reaches all that was computed; the loss function is not asked about rows that do not exist."""
    computed = [getattr(outputs, field.name) for field in fields(outputs)]
    return torch.stack([tensor.sum() for tensor in computed if tensor is not None]).sum() * 0.0


def _as_declared(outputs: TokenOutputs, loss_fn: LossFunction) -> TokenOutputs | torch.Tensor:
    if loss_fn.needs == {"logits"}:
        assert outputs.logits is not None
        return outputs.logits
    return outputs
