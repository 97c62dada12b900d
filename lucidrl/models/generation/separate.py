"""Generation in processes of its own, driven from where the policy is driven; they get its weights by a refit."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedTokenizerBase

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.batching import shard_plan
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.weight_buckets import TensorInfo, fitting_bucket_bytes, plan_buckets
from lucidrl.distributed.weight_group import TIMEOUT_S
from lucidrl.distributed.worker_group import WorkerGroup
from lucidrl.errors import LucidError, RefitError
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.generation_worker import GenerationWorker
from lucidrl.models.generation.interfaces import GenerationDatumSpec, GenerationOutputSpec
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.policy import Policy
from lucidrl.profiling.spans import span
from lucidrl.utils.nsys import GENERATION

LOGS = "generation"
"""Folder of the generators' logs, below that of the run's."""

_BYTES_PER_MB = 1 << 20
_LOCAL_IP = "127.0.0.1"
"""Policy and generators are processes of this machine."""


class SeparateGenerator:
    """Generators that share the prompts of each call, all with the same version of a policy's weights.

    Args:
        policy: whose weights they get.
        config: of the policy; `config.generation` says how many generators there are and how weights reach them.
        cluster: threads and deadlines of the generators.
        log_dir: where they write their logs.
        seed: of draws of rows that bring no `draw_keys` of their own.
    """

    def __init__(
        self,
        policy: Policy,
        config: PolicyConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        cluster: ClusterConfig | None = None,
        log_dir: Path | None = None,
        seed: int = 0,
    ):
        self.weight_version = 0
        self._policy, self._source = policy.group, policy
        self._config = config.generation
        self._has_met = False
        # Over shared memory a generator has the GPU of a rank; nccl wants one for each member of a group.
        first_gpu = policy.group.size if config.generation.refit == "collective" else 0
        self._pad_id = int(tokenizer.pad_token_id)  # always set by `load_tokenizer`
        self.group = WorkerGroup(
            GenerationWorker,
            (config, tokenizer, seed, first_gpu),
            cluster=(cluster or ClusterConfig()).model_copy(update={"num_workers": config.generation.num_workers}),
            log_dir=log_dir / LOGS if log_dir is not None else None,
            own_processes=True,
            role="generator",
            name=GENERATION,
        )

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every prompt with the weights of the last refit."""
        (rows_of_worker,) = shard_plan(data.size, self.group.size, allow_uneven=True)
        shards = [(data.select_indices(rows), greedy) for rows in rows_of_worker]
        parts = self.group.run_each("generate", shards)
        return parts[0] if len(parts) == 1 else BatchedDataDict.from_batches(parts, {"output_ids": self._pad_id})

    def update_weights(self, version: int) -> None:
        """Bring the policy's current weights to all generators; they are this version from now on.

        Raises:
            RefitError: if they do not get there.
            WorkerError: if a worker dies. In either case generators that live have the whole version of before.
        """
        with span("refit"):
            self._policy.run_all("set_refit_header", version, self._config.verify_refit)
            if self._config.refit == "ipc":
                self._refit_by_ipc(version)
            else:
                self._refit_by_collective()
            self.group.run_all("commit_refit", version)
        self._source.update_weights(version)
        self.weight_version = version

    def start_gpu_profiling(self) -> None:
        """Let those generators record that are asked to; see `lucidrl.utils.nsys`."""
        self.group.start_gpu_profiling()

    def stop_gpu_profiling(self) -> None:
        """Let them write what they recorded; harmless if they did not."""
        self.group.stop_gpu_profiling()

    def shutdown(self) -> None:
        """End the generators; may be called twice."""
        self.group.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _refit_by_ipc(self, version: int) -> None:
        """The policy packs a bucket while the generators take the one before.

        On a GPU it packs into two pieces of memory in turn. So before it is asked for the next bucket but one, the
        generators must have said that they are done with this one.
        """
        free_bytes = min(self.group.run_all("begin_refit", version))
        prepared = self._policy.run_all("prepare_weights_for_ipc")
        sizes = prepared[0][0]
        buckets = buckets_of_names(sizes, self._config, min(free_bytes, *(free for _, free in prepared)))
        taken: Future[None] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="refit") as generators:  # left when the last call has ended
            for names in buckets:
                parts = self._policy.run_all("get_weights_ipc_handles", names)
                if taken is not None:
                    taken.result()
                handles = {device: handle for part in parts for device, handle in part.items()}
                taken = generators.submit(self._run_generators, "take_weights", handles)
            if taken is not None:
                taken.result()

    def _refit_by_collective(self) -> None:
        """The generators receive while the policy sends; they all meet before the first time."""
        if not self._has_met:
            self._meet()
            self._has_met = True
        self._at_once(
            lambda: self._run_generators("receive_weights"),
            lambda: self._policy.run_all("broadcast_weights_for_collective"),
        )

    def _meet(self) -> None:
        ip, port, world_size = _LOCAL_IP, _free_port(), 1 + self.group.size
        addresses = [(ip, port, rank, world_size, TIMEOUT_S) for rank in range(1, world_size)]
        self._at_once(
            lambda: self.group.run_each("join_collective", addresses),
            lambda: self._policy.run_all("init_collective", ip, port, world_size),
        )
        self.group.run_all("prepare_collective", self._policy.run_all("prepare_info_for_collective")[0])

    def _run_generators(self, method: str, *args: Any) -> None:
        """Call a method that returns what went wrong, if anything did."""
        problems = [problem for problem in self.group.run_all(method, *args) if problem is not None]
        if problems:
            raise RefitError(problems[0])

    def _at_once(self, of_generators: Callable[[], object], of_policy: Callable[[], object]) -> None:
        """Make both calls at the same time. If both fail, one may be the cause of the other, and both are told."""
        with ThreadPoolExecutor(1, thread_name_prefix="refit") as executor:  # left when both calls have ended
            answer = executor.submit(of_generators)
            try:
                of_policy()
            except LucidError as error:
                if (failure := answer.exception()) is not None:
                    error.add_note(f"meanwhile in the generators: {failure}")
                raise
            answer.result()


def buckets_of_names(sizes: Sequence[tuple[str, int]], config: GenerationConfig, free_bytes: float) -> list[list[str]]:
    """Names that travel together, in order: as many as the config and half the free memory allow, but at least one.

    Raises:
        RefitError: if the largest weight alone does not fit twice.
    """
    infos = [TensorInfo(name, (size_bytes,), torch.uint8) for name, size_bytes in sizes]
    bucket_bytes = fitting_bucket_bytes(infos, config.refit_bucket_mb * _BYTES_PER_MB, free_bytes)
    return [[info.name for info in bucket.tensors] for bucket in plan_buckets(infos, bucket_bytes)]


def _free_port() -> int:
    with socket.create_server((_LOCAL_IP, 0)) as listener:
        return listener.getsockname()[1]
