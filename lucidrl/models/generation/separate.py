"""Generation in separate processes; a refit copies the policy's weights to them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedTokenizerBase

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.interfaces import Arguments, Hosting, NodeChoice
from lucidrl.distributed.workers.pool import PoolWorker, WorkerPool
from lucidrl.errors import ConfigError, LostWorkerError, RefitError
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.generation_worker import GenerationWorker
from lucidrl.models.generation.interfaces import GenerationDatumSpec, GenerationOutputSpec
from lucidrl.models.generation.refit import GeneratorState, Refit, check_device
from lucidrl.models.generation.refit_guard import RefitGuard
from lucidrl.models.generation.replica import Replica
from lucidrl.models.generation.sampling import prompts_of, with_draw_keys
from lucidrl.models.generation.vllm_worker import VllmWorker
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.policy import Policy
from lucidrl.profiling.spans import span
from lucidrl.utils.nsys import GENERATION

ENGINES: dict[str, type[Replica]] = {"builtin": GenerationWorker, "vllm": VllmWorker}
"""`policy.generation.engine` → the worker of a replica."""
FIRST_STEP, STEP, LIVENESS = "its first decoding step", "a decoding step", "a liveness check"
"""How errors name the calls of `ContinuousGenerator`."""


class SeparateGenerator:
    """Generator replicas that split the prompts of each call, all with the same version of a policy's weights.

    A replica that exits or times out is restarted, and its prompts are sent again; completions do not change. If a
    replica raises an error, all replicas are killed and the error is raised here.

    Args:
        policy: source of the weights.
        config: config of the policy; `config.generation` sets the number of replicas and the kind of refit.
        cluster: launcher, threads and timeouts of the replicas.
        log_dir: the replicas write their logs to its folder `generation`.
        seed: seed of the sampling of rows without `draw_keys`.
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
        self.policy_version = 0
        self._policy, self._seed = policy, seed
        self._num_calls = 0
        self._max_rows, self._sleeps = config.generation.max_concurrent_rows, config.generation.sleep
        self._refitted: int | None = None
        """Version of the last refit; None before the first refit."""
        self._pad_id = int(tokenizer.pad_token_id)  # always set by `load_tokenizer`
        generation, cluster = config.generation, (cluster or ClusterConfig()).of_one()
        check_nodes(generation, cluster)
        # With shared memory, a generator uses the GPUs of ranks. With a broadcast it needs other GPUs, because nccl
        # needs one GPU per rank. Under Ray, a generator sees only the GPUs that Ray assigned.
        first_gpu = policy.group.size if generation.refit == "collective" else 0
        gpus = [first_gpu + number * generation.ranks_per_replica for number in range(generation.num_workers)]
        arguments = [
            Arguments((config, tokenizer, seed), {"number": number, "gpu": 0 if cluster.uses_ray else gpu})
            for number, gpu in enumerate(gpus)
        ]
        hosting = Hosting(
            role="generator",
            name=GENERATION,
            log_dir=log_dir / "generation" if log_dir is not None else None,
            nodes=generator_nodes(generation, [place.node for place in policy.places]),
            phase_settings={
                FIRST_STEP: "cluster.start_timeout_s",
                STEP: "policy.generation.step_timeout_s",
                LIVENESS: "policy.generation.step_timeout_s",
            },
            num_ranks=generation.ranks_per_replica,
        )
        self._states: dict[int, GeneratorState] = {}

        def note_place(worker: PoolWorker) -> None:
            places = worker.run("report_places")
            for place in places:
                check_device(generation, worker.number, place.device, policy.places)
            self._states[worker.number] = GeneratorState(places)

        self.pool = WorkerPool(
            ENGINES[generation.engine],
            arguments,
            cluster=cluster,
            hosting=hosting,
            max_restarts=generation.max_restarts,
            setting="policy.generation.",
            on_start=note_place,
        )
        self.guard = guard = RefitGuard(policy, self.pool, config, tokenizer)
        self._refit = Refit(policy, self.pool, self._states, generation, cluster.call_timeout_s, guard)

    @property
    def num_restarts(self) -> int:
        """Restarts of generators so far."""
        return self.pool.num_restarts

    @property
    def refit_gb_per_s(self) -> float | None:
        """Rate of the last refit, in GB of 10**9 bytes; None before the first refit."""
        return self._refit.gb_per_s

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every prompt with the weights of the last refit.

        Each idle generator takes the next chunk of rows. Completions depend on the rows and the number of generators,
        not on which generator takes which chunk.

        Raises:
            WorkerError: a rank of the policy exited meanwhile, or a generator exceeded `max_restarts`.
        """
        prompts, data = prompts_of(data), with_draw_keys(data, self._seed, self._num_calls).copy()
        for column in ("may_continue", "continues"):
            # Which replica has the cache of a conversation depends on time; results must not, not even their rounding.
            data.pop(column, None)
        self._num_calls += 1
        size = len(self.pool.workers)
        # A chunk is as large as a generator decodes at a time: smaller chunks cost more than they save.
        per_generator = max(1, math.ceil(len(prompts) / (size * self._max_rows)))
        chunks = prompt_chunks(prompts, 1 if size == 1 else size * per_generator)
        completed: dict[int, BatchedDataDict[Any]] = {}
        waiting = deque(range(len(chunks)))

        def work(worker: PoolWorker) -> None:
            while True:
                try:
                    number = waiting.popleft()
                except IndexError:
                    return
                rows = data if len(chunks) == 1 else data.select_indices(chunks[number])
                try:
                    completed[number] = worker.run("generate", rows, greedy)
                    worker.succeeded()
                except LostWorkerError:
                    waiting.appendleft(number)
                    raise

        self._ensure_current()
        while len(completed) < len(chunks):
            self.pool.each(work, watch=self._policy.check)  # no other call would notice that a rank died
            self._ensure_current()
        if len(chunks) == 1:
            return completed[0]
        outputs = [completed[number] for number in range(len(chunks))]
        original_order = torch.tensor([row for rows in chunks for row in rows]).argsort()
        return BatchedDataDict.from_batches(outputs, {"output_ids": self._pad_id}).select_indices(original_order)

    def update_weights(self, version: int) -> None:
        """Copy the policy's current weights to all generators; `version` is the version of these weights.

        Raises:
            RefitError: the transfer failed.
            WorkerError: a rank of the policy exited, or a generator exceeded `max_restarts`. Each running generator
                still has complete weights of one version; the next `generate` first brings all to the same version.
        """
        with span("refit"):
            self._restart_lost()
            self._run_refit(version, self.pool.workers)
        self._policy.update_weights(version)
        self.policy_version = self._refitted = version

    def release_memory(self) -> None:
        """Let the replicas sleep, if `policy.generation.sleep` is set; see `GenerationInterface`."""
        if self._sleeps:
            running = [worker for worker in self.pool.workers if worker.loss is None]
            self.pool.each(lambda worker: worker.run("release_memory"), running)

    def recover(self) -> bool:
        """Restart lost generators and bring them to the version of the last refit; return whether any needed it.

        Raises:
            WorkerError: a rank of the policy exited, or a generator exceeded `max_restarts`.
        """
        self._policy.check()
        is_needed = bool(self.pool.lost or self._behind)
        if is_needed:
            self._ensure_current()
        return is_needed

    def start_gpu_profiling(self) -> None:
        """Start recording on the requested generators; see `lucidrl.utils.nsys`."""
        self.pool.start_gpu_profiling()

    def stop_gpu_profiling(self) -> None:
        """Stop recording and write the traces, if any."""
        self.pool.stop_gpu_profiling()

    def shutdown(self) -> None:
        """Stop the generators; may be called twice."""
        self.pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    @property
    def ready(self) -> list[int]:
        """Numbers of the generators that run and have weights of a refit; before the first refit, of all that run."""
        return [
            worker.number
            for worker in self.pool.workers
            if worker.loss is None and (self._refitted is None or self._states[worker.number].version is not None)
        ]

    @property
    def _behind(self) -> list[PoolWorker]:
        """Generators without the version of the last refit."""
        return [worker for worker in self.pool.workers if self._states[worker.number].version != self._refitted]

    def _ensure_current(self) -> None:
        """Restart lost generators, and bring all generators to the version of the last refit."""
        self._restart_lost()
        behind = self._behind
        if not behind:
            return
        if self._policy.is_ahead:
            raise RefitError(
                f"generator {behind[0].number} lacks version {self.policy_version} of the weights, and the policy no "
                "longer has this version; call update_weights before generate"
            )
        with span("refit"):
            self._run_refit(self.policy_version, behind)

    def _run_refit(self, version: int, receivers: Sequence[PoolWorker]) -> None:
        """Copy the weights; restart generators that are lost meanwhile and repeat the refit for them."""
        while receivers:
            receivers = self._refit.run(version, receivers)
            self._restart_lost()

    def _restart_lost(self) -> None:
        if self.pool.lost:
            self._policy.check()  # if the policy was lost too, as with a whole node, report that
            self.pool.restart_lost()


def prompt_chunks(prompts: Sequence[bytes], most: int) -> list[list[int]]:
    """Split rows into 1 to `most` chunks of about equal size; rows with the same prompt stay together.

    Chunks depend on the arguments alone: log-probabilities of rows that are batched differently may differ in the last
    bits.
    """
    rows_of: dict[bytes, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(prompt, []).append(row)
    most = min(most, len(rows_of))
    if most <= 1:
        return [list(range(len(prompts)))]
    chunks: list[list[int]] = [[] for _ in range(most)]
    done = 0
    for rows in rows_of.values():
        chunks[done * most // len(prompts)] += rows
        done += len(rows)
    return [chunk for chunk in chunks if chunk]


def generator_hostings(config: GenerationConfig) -> list[Hosting]:
    """Return one `Hosting` per separate generator; empty if the policy generates."""
    if config.placement == "policy":
        return []
    total, setting = config.num_workers, "policy.generation.num_workers"
    ranks = config.ranks_per_replica
    return [
        Hosting(first_number=number, pool_size=total, size_setting=setting, num_ranks=ranks) for number in range(total)
    ]


def generator_nodes(config: GenerationConfig, policy_nodes: Sequence[str]) -> NodeChoice | None:
    """Return the nodes that generators may use; None for all nodes. `refit=ipc` needs the nodes of the policy."""
    if config.nodes == "any" and config.refit != "ipc":
        return None
    return NodeChoice(tuple(sorted(set(policy_nodes))), is_excluding=config.nodes == "other")


def check_nodes(config: GenerationConfig, cluster: ClusterConfig) -> None:
    """Refuse `policy.generation.nodes` if generators do not run under Ray."""
    if config.nodes != "any" and not cluster.uses_ray:
        raise ConfigError(
            f"policy.generation.nodes={config.nodes} chooses nodes of a Ray cluster, but the generators run as "
            "processes on this machine; set cluster.address, or remove policy.generation.nodes"
        )
