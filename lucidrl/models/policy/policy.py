"""`Policy`: what algorithms hold. It passes the work to its worker and gives results with names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lucidrl.algorithms.interfaces import LossFunction
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.models.policy.interfaces import TrainResult
from lucidrl.models.policy.worker import PolicyWorker
from lucidrl.profiling.spans import span

WEIGHTS, OPTIMIZER = "policy", "optimizer"
"""Folders of a checkpoint; the first is a complete Hugging Face model with its tokenizer."""


class Policy:
    """A policy in this process."""

    def __init__(self, worker: PolicyWorker):
        self.worker = worker

    def train(self, data: BatchedDataDict[Any], loss_fn: LossFunction, eval_mode: bool = False) -> TrainResult:
        """One pass over the rows; see `PolicyWorker.train`. In `eval_mode` they are one global batch."""
        with span("train"):
            result = self.worker.train(data, loss_fn, eval_mode=eval_mode, gbs=data.size if eval_mode else None)
        return TrainResult(
            loss=float(result["global_loss"].mean()),
            grad_norm=float(result["grad_norm"]),
            metrics=result["metrics"],
            num_skipped_steps=result["num_skipped_steps"],
        )

    def with_scores(self, data: BatchedDataDict[Any], *, previous: bool, reference: bool) -> BatchedDataDict[Any]:
        """Add the columns `prev_logprobs` and `reference_policy_logprobs`, where asked for."""
        if not (previous or reference):
            return data
        with span("score"):
            if previous:
                data["prev_logprobs"] = self.worker.get_logprobs(data)["logprobs"]
            if reference:
                scored = self.worker.get_reference_policy_logprobs(data)
                data["reference_policy_logprobs"] = scored["reference_logprobs"]
        return data

    def save(self, folder: Path) -> None:
        """Write weights, tokenizer and optimizer below a checkpoint's folder."""
        weights = str(folder / WEIGHTS)
        self.worker.save_checkpoint(weights, str(folder / OPTIMIZER), tokenizer_path=weights)

    def load(self, folder: Path) -> None:
        """Take weights and optimizer from a checkpoint's folder."""
        self.worker.load_checkpoint(str(folder / WEIGHTS), str(folder / OPTIMIZER))
