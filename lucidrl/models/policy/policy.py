"""`Policy`: the driver's handle on policy workers. It splits rows over ranks and merges their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedTokenizerBase

from lucidrl.checkpoint.manifest import FileDigest
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.batching import shard_plan
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.group import WorkerGroup
from lucidrl.distributed.workers.place import Place
from lucidrl.errors import DataError
from lucidrl.losses.interfaces import PAIR_IDS, LossFunction
from lucidrl.models.generation.interfaces import GenerationDatumSpec, GenerationOutputSpec
from lucidrl.models.generation.sampling import with_draw_keys
from lucidrl.models.loading import DTYPES, empty_model
from lucidrl.models.lora import add_adapters
from lucidrl.models.optim import PolicyOptimizer
from lucidrl.models.parameter_groups import WeightInfo
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from lucidrl.models.policy.fsdp1_policy_worker import FSDP1PolicyWorker
from lucidrl.models.policy.interfaces import Role, TrainResult
from lucidrl.models.policy.row_plans import paired_rows
from lucidrl.models.policy.worker import PolicyWorker
from lucidrl.models.sources import WEIGHTS
from lucidrl.profiling.spans import span
from lucidrl.utils.config import validate
from lucidrl.utils.nsys import POLICY, profile_request

OPTIMIZER = "optimizer"
"""Folder inside a checkpoint that has the optimizer's state."""


def worker_class_of(config: PolicyConfig) -> type[PolicyWorker]:
    """Return the worker class that a config selects."""
    return DTensorPolicyWorker if config.dtensor_cfg.enabled else FSDP1PolicyWorker


def check_optimizer(config: PolicyConfig) -> None:
    """Raise ConfigError if adapters, optimizer, its groups or the schedule do not fit the model; load no weights."""
    names = [""]
    if config.optimizer.groups or config.lora is not None:  # only they need the names
        names = list(trained_shapes(config))
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in names]
    PolicyOptimizer(parameters, config, weights=[WeightInfo(name) for name in names])


def trained_shapes(config: PolicyConfig) -> dict[str, torch.Size]:
    """Return name and shape of the weights that a policy trains; load no weights."""
    model = empty_model(config.model_name, DTYPES[config.precision], config.trust_remote_code)
    if config.lora is not None:
        add_adapters(model, config.lora)
    return {name: weight.shape for name, weight in model.named_parameters() if weight.requires_grad}


class Policy:
    """A policy on one or more ranks, which can also generate samples.

    Data parallel ranks get consecutive rows; ranks of a context or tensor parallel group get the same rows.

    Args:
        cluster: number and placement of workers; by default one worker, in this process.
        log_dir: folder for the logs of several workers.
        name: first part of the workers' names in profiles; errors name the workers of a teacher with it too.
        own_processes: run even a single worker in a separate process.

    Other arguments are those of `PolicyWorker`.
    """

    num_restarts = 0
    """Always 0, because a policy never restarts a worker; part of `GenerationInterface`."""
    refit_gb_per_s = None
    """Always None, because nothing is copied; part of `GenerationInterface`."""

    def __init__(
        self,
        config: PolicyConfig | Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        *,
        cluster: ClusterConfig | None = None,
        log_dir: Path | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        seed: int = 0,
        role: Role = "policy",
        name: str = POLICY,
        own_processes: bool = False,
    ):
        profile_request()  # raises now if invalid, not in the first step
        config = validate(PolicyConfig, config)
        cluster = cluster or ClusterConfig()
        worker_class = worker_class_of(config)
        self.layout = worker_class.layout_of(config, cluster.num_workers)
        self.policy_version = 0
        """Version of the weights, set by the training loop."""
        self.is_ahead = False
        """Whether the weights have changed since `policy_version` was set."""
        self._gbs = config.train_global_batch_size
        self._seed, self._num_calls = seed, 0
        self._has_optimizer = init_optimizer
        self._pad_id = int(tokenizer.pad_token_id)  # always set by `load_tokenizer`
        options = {
            "init_optimizer": init_optimizer,
            "init_reference_model": init_reference_model,
            "seed": seed,
            "role": role,
            "name": name,
            # Collectives run during the start too; the group enforces the two timeouts themselves.
            "timeout_s": max(cluster.start_timeout_s, cluster.call_timeout_s),
        }
        self.group = WorkerGroup(
            worker_class,
            (config, tokenizer),
            options,
            cluster=cluster,
            log_dir=log_dir,
            own_processes=own_processes,
            name=name,
            role="rank" if name == POLICY else f"{name} rank",
        )
        self.places: list[Place] = self.group.run_all("report_place")
        device = "GPU" if self.places[0].device.startswith("GPU") else "CPU"  # the workers': the driver may have none
        self._layout_name = f"{worker_class.__name__} {self.layout} on {device}"

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        num_epochs: int = 1,
        gbs: int | None = None,
    ) -> TrainResult:
        """Pass over the rows `num_epochs` times, in the same order; see `PolicyWorker.train`.

        With `eval_mode`, the rows are one global batch. The metrics are those of all epochs together.

        Args:
            gbs: rows per optimizer step; by default `train_global_batch_size`, or all rows.
        """
        gbs = data.size if eval_mode else gbs or self._gbs or data.size
        if num_epochs > 1:
            data = BatchedDataDict.from_batches([data] * num_epochs)
        self.is_ahead |= not eval_mode
        with span("train"):
            shards = self._shards(data, gbs)
            result = self.group.run_each("train", [(shard, loss_fn, eval_mode, gbs) for shard in shards])[0]
        return TrainResult(
            loss=float(result["global_loss"].mean()),
            grad_norm=float(result["grad_norm"]),
            metrics=result["metrics"],
            num_skipped_steps=result["num_skipped_steps"],
        )

    def with_scores(self, data: BatchedDataDict[Any], *, previous: bool, reference: bool) -> BatchedDataDict[Any]:
        """Add the columns `prev_logprobs` (if `previous`) and `reference_policy_logprobs` (if `reference`)."""
        if not (previous or reference):
            return data
        scored: BatchedDataDict[Any] = BatchedDataDict({name: data[name] for name in ("input_ids", "input_lengths")})
        with span("score"):
            shards = self._shards(scored, None)
            for name, of_reference in (("prev_logprobs", False), ("reference_policy_logprobs", True)):
                if not (reference if of_reference else previous):
                    continue
                with span("reference" if of_reference else "logprobs"):
                    results = self.group.run_each("scorer.logprobs", [(shard, None, of_reference) for shard in shards])
                    data[name] = torch.cat([part["logprobs"] for part in self._by_data_rank(results)])
        return data

    def get_logprobs(self, data: BatchedDataDict[Any]) -> torch.Tensor:
        """Return the log-probability of every token, [B, T]; see `LogprobOutputSpec`."""
        shards = self._shards(BatchedDataDict({name: data[name] for name in ("input_ids", "input_lengths")}), None)
        results = self.group.run_each("scorer.logprobs", [(shard,) for shard in shards])
        return torch.cat([part["logprobs"] for part in self._by_data_rank(results)])

    def values(self, data: BatchedDataDict[Any]) -> torch.Tensor:
        """Return the scores of a reward model, [B]; see `Scorer.values`."""
        names = ("input_ids", "input_lengths", "token_mask")
        with span("score"):
            shards = self._shards(BatchedDataDict({name: data[name] for name in names}), None)
            results = self.group.run_each("scorer.values", [(shard,) for shard in shards])
            return torch.cat(list(self._by_data_rank(results)))

    def top_logprobs(self, data: BatchedDataDict[Any], top_k: int, num_ids: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest tokens in place of each sampled token; see `Scorer.top_logprobs`."""
        names = ("input_ids", "input_lengths", "token_mask", "sample_mask")
        shards = self._shards(BatchedDataDict({name: data[name] for name in names}), None)
        results = self.group.run_each("scorer.top_logprobs", [(shard, top_k, num_ids) for shard in shards])
        ids, logprobs = zip(*self._by_data_rank(results), strict=True)
        return torch.cat(ids), torch.cat(logprobs)

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every prompt with the current weights; see `GenerationDatumSpec` and `GenerationOutputSpec`."""
        if self.layout.dp > 1:  # a single rank counts its own calls, across resumes too
            data = with_draw_keys(data, self._seed, self._num_calls)
        self._num_calls += 1
        results = self.group.run_each("generator.generate", [(shard, greedy) for shard in self._shards(data, None)])
        parts = self._by_data_rank(results)
        output = parts[0] if len(parts) == 1 else BatchedDataDict.from_batches(parts, {"output_ids": self._pad_id})
        output["policy_versions"] = torch.full_like(output["generation_lengths"], self.policy_version)
        return output

    def release_memory(self) -> None:
        """Drop the cached keys and values of all ranks."""
        self.group.run_all("generator.release_memory")

    def check(self) -> None:
        """Raise WorkerError if a worker has exited; for long waits between calls."""
        self.group.check()

    def update_weights(self, version: int) -> None:
        """Set the version. Nothing is sent, because the policy generates with the trained weights."""
        self.policy_version, self.is_ahead = version, False

    def save(self, folder: Path) -> None:
        """Write weights, tokenizer and optimizer (if any) into a checkpoint folder."""
        self.begin_save(folder)
        self.finish_save()

    def reserve_save(self, folder: Path, *, weights_only: bool = False) -> bool:
        """Allocate the memory of `begin_save` in the background; False before the first optimizer update."""
        optimizer = None if weights_only else self._optimizer_path(folder)
        return all(self.group.run_all("checkpoints.reserve", str(folder / WEIGHTS), optimizer))

    def begin_save(self, folder: Path, *, weights_only: bool = False) -> None:
        """Copy the tensors of `save`, without the optimizer if `weights_only`, and write them in the background."""
        weights, optimizer = str(folder / WEIGHTS), None if weights_only else self._optimizer_path(folder)
        self.group.run_all("checkpoints.begin", weights, optimizer, weights)

    def is_save_written(self) -> bool:
        """Return whether all workers have finished writing."""
        return all(self.group.run_all("checkpoints.writer.is_done"))

    def finish_save(self) -> dict[Path, FileDigest]:
        """Wait until all files are on disk; return their digests."""
        written = self.group.run_all("checkpoints.finish")
        return {path: digest for files in written for path, digest in files.items()}

    def load(self, folder: Path) -> None:
        """Load weights and optimizer from a verified checkpoint folder."""
        self.is_ahead = True
        self.group.run_all("checkpoints.load", str(folder / WEIGHTS), self._optimizer_path(folder), verify=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the layout, and each rank's state except weights and optimizer, as plain values."""
        return {"layout": self._layout_name, "ranks": self.group.run_all("state_dict")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore every rank's state. On another layout, every rank gets rank 0's state, without the random state."""
        ranks = state["ranks"]
        if state["layout"] != self._layout_name:
            common = {name: value for name, value in ranks[0].items() if name != "process"}
            ranks = [common] * self.group.size
        self.group.run_each("load_state_dict", [(rank,) for rank in ranks])

    def start_gpu_profiling(self) -> None:
        """Start recording on the selected workers; see `lucidrl.utils.nsys`."""
        self.group.start_gpu_profiling()

    def stop_gpu_profiling(self) -> None:
        """Stop recording and write the traces, if any."""
        self.group.stop_gpu_profiling()

    def shutdown(self) -> None:
        """Stop the workers; may be called twice."""
        self.group.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _optimizer_path(self, folder: Path) -> str | None:
        return str(folder / OPTIMIZER) if self._has_optimizer else None

    def _shards(self, data: BatchedDataDict[Any], gbs: int | None) -> list[BatchedDataDict[Any]]:
        """Return the rows of each rank; data parallel ranks split every global batch."""
        if self.layout.dp == 1:
            return [data] * self.layout.size
        if PAIR_IDS in data:
            if gbs not in (None, data.size):
                raise DataError(
                    f"{data.size} rows of pairs do not split into global batches of {gbs} rows; train on all pairs of "
                    "a batch in one optimizer step"
                )
            pairs = paired_rows(data)
            [parts] = shard_plan(len(pairs), self.layout.dp, allow_uneven=True)
            plan = [[[row for pair in part for row in pairs[pair]] for part in parts]]
        else:
            plan = shard_plan(data.size, self.layout.dp, gbs, allow_uneven=True)
        shares = [data.select_indices([row for batch in plan for row in batch[rank]]) for rank in range(self.layout.dp)]
        return [shares[self.layout.data_rank(rank)] for rank in range(self.layout.size)]

    def _by_data_rank(self, results: Sequence[Any]) -> Sequence[Any]:
        """Return one result per data parallel rank, in order; ranks with the same rows have equal results."""
        return results[:: self.layout.cp * self.layout.tp]
