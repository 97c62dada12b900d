"""One optimizer step: micro-batches forward and backward, with every loss normalised by global counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lucidrl.algorithms.interfaces import LossFunction, Metrics, TokenOutputs, valid_token_mask
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.models.logprobs import LogprobModel
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
        return (
            torch.stack(self.losses).sum()
            if self.losses
            else torch.zeros_like(self.global_valid_toks, dtype=torch.float32)
        )

    def suspects(self) -> list[Any]:
        """The rows of micro-batches whose loss is not finite; all rows if every loss is (the gradient is not)."""
        bad = [names for names, loss in zip(self.names, self.losses, strict=True) if not torch.isfinite(loss)]
        return [name for names in (bad or self.names) for name in names]


def run_micro_batches(
    model: LogprobModel,
    batch: BatchedDataDict[Any],
    micro_batches: Iterator[BatchedDataDict[Any]],
    loss_fn: LossFunction,
    *,
    packed: bool,
    backward: bool,
) -> StepOutcome:
    """Forward (and backward) through a global batch; gradients add up in the parameters."""
    outcome = StepOutcome(batch["sample_mask"].sum(), valid_token_mask(batch).sum())
    for micro in micro_batches:
        with span("forward"):
            outputs = model(
                micro["input_ids"],
                micro["input_lengths"],
                loss_fn.needs,
                selected=valid_token_mask(micro),
                packed=packed,
            )
            loss, metrics = loss_fn(
                _as_declared(outputs, loss_fn), micro, outcome.global_valid_seqs, outcome.global_valid_toks
            )
        if backward:
            with span("backward"):
                loss.backward()
        outcome.losses.append(loss.detach())
        outcome.parts.append((metrics, micro["sample_mask"].sum()))
        outcome.names.append(list(micro["idx"]) if "idx" in micro else ["unnamed"] * micro.size)
    return outcome


def _as_declared(outputs: TokenOutputs, loss_fn: LossFunction) -> TokenOutputs | torch.Tensor:
    if loss_fn.needs == {"logits"}:
        assert outputs.logits is not None
        return outputs.logits
    return outputs
