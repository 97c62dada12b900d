"""Generation in processes of its own, driven from where the policy is driven; they get its weights by a refit."""

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
from lucidrl.distributed.workers.interfaces import Arguments, Hosting
from lucidrl.distributed.workers.pool import PoolWorker, WorkerPool
from lucidrl.errors import LostWorkerError, RefitError
from lucidrl.models.generation.delivery import GeneratorState, WeightDelivery
from lucidrl.models.generation.generation_worker import GenerationWorker
from lucidrl.models.generation.interfaces import GenerationDatumSpec, GenerationOutputSpec
from lucidrl.models.generation.placement import check_nodes, generator_nodes
from lucidrl.models.generation.prompts import prompt_chunks, prompts_of, with_draw_keys
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.policy import Policy
from lucidrl.profiling.spans import span
from lucidrl.utils.nsys import GENERATION

LOGS = "generation"
"""Folder of the generators' logs, below that of the run's."""


class SeparateGenerator:
    """Generators that share the prompts of each call, all with the same version of a policy's weights.

    One that dies, or misses its deadline, is replaced, and what it was busy with is done again; the answers are the
    same. An error that one raises is raised here, and all generators have ended.

    Args:
        policy: whose weights they get.
        config: of the policy; `config.generation` says how many generators there are and how weights reach them.
        cluster: where they run, their threads and deadlines.
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
        self.policy_version = 0
        self._source, self._seed = policy, seed
        self._num_calls = 0
        self._max_rows = config.generation.max_concurrent_rows
        self._brought: int | None = None
        """Version of the last refit; before the first one, generators have what they load."""
        self._pad_id = int(tokenizer.pad_token_id)  # always set by `load_tokenizer`
        generation, cluster = config.generation, (cluster or ClusterConfig()).of_one()
        check_nodes(generation, cluster)
        # Over shared memory a generator has the GPU of a rank; nccl wants one for each member of a group. Under Ray it
        # sees its own alone.
        first_gpu = policy.group.size if generation.refit == "collective" else 0
        arguments = [
            Arguments(
                (config, tokenizer, seed), {"number": number, "gpu": 0 if cluster.uses_ray else first_gpu + number}
            )
            for number in range(generation.num_workers)
        ]
        hosting = Hosting(
            role="generator",
            name=GENERATION,
            log_dir=log_dir / LOGS if log_dir is not None else None,
            nodes=generator_nodes(generation, [place.node for place in policy.places]),
        )
        self._states: dict[int, GeneratorState] = {}

        def note_place(worker: PoolWorker) -> None:
            self._states[worker.number] = GeneratorState(worker.run("report_place"))

        self.pool = WorkerPool(
            GenerationWorker,
            arguments,
            cluster=cluster,
            hosting=hosting,
            max_restarts=generation.max_restarts,
            setting="policy.generation.",
            on_start=note_place,
        )
        self._delivery = WeightDelivery(policy, self.pool, self._states, generation, cluster.call_timeout_s)
        try:
            self._delivery.check_devices()
        except BaseException:
            self.pool.kill()
            raise

    @property
    def num_replaced(self) -> int:
        """How many times generators were restarted."""
        return self.pool.num_restarts

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every prompt with the weights of the last refit.

        The rows are cut into chunks, and whoever is free takes the next one; their answers depend on the rows and the
        number of generators alone.

        Raises:
            WorkerError: if a worker of the policy dies meanwhile, or generators were lost too often.
        """
        prompts, data = prompts_of(data), with_draw_keys(data, self._seed, self._num_calls)
        self._num_calls += 1
        chunks = prompt_chunks(prompts, self._num_chunks(len(prompts)))
        answers: dict[int, BatchedDataDict[Any]] = {}
        waiting = deque(range(len(chunks)))

        def work(worker: PoolWorker) -> None:
            while waiting:
                try:
                    number = waiting.popleft()
                except IndexError:  # another one was faster
                    return
                rows = data if len(chunks) == 1 else data.select_indices(chunks[number])
                try:
                    answers[number] = worker.run("generate", rows, greedy)
                    worker.succeeded()
                except LostWorkerError:
                    waiting.appendleft(number)
                    raise

        self._make_whole()
        while len(answers) < len(chunks):
            # The policy waits meanwhile, and nobody else would notice that it is lost.
            self.pool.each(work, watch=self._source.check)
            self._make_whole()
        return self._in_order(chunks, [answers[number] for number in range(len(chunks))])

    def update_weights(self, version: int) -> None:
        """Bring the policy's current weights to all generators; they are this version from now on.

        Raises:
            RefitError: if they do not get there.
            WorkerError: if a worker of the policy dies, or generators were lost too often. In either case generators
                that live have a whole version, and nothing is answered until all have the same.
        """
        with span("refit"):
            self._replace_lost()
            self._bring(version, self.pool.workers)
        self._source.update_weights(version)
        self.policy_version = self._brought = version

    def start_gpu_profiling(self) -> None:
        """Let those generators record that are asked to; see `lucidrl.utils.nsys`."""
        self.pool.start_gpu_profiling()

    def stop_gpu_profiling(self) -> None:
        """Let them write what they recorded; harmless if they did not."""
        self.pool.stop_gpu_profiling()

    def shutdown(self) -> None:
        """End the generators; may be called twice."""
        self.pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _make_whole(self) -> None:
        """All generators are there afterwards, with the weights of the last refit."""
        self._replace_lost()
        lacking = [worker for worker in self.pool.workers if self._states[worker.number].version != self._brought]
        if not lacking:
            return
        if self._source.is_ahead:
            raise RefitError(
                f"generator {lacking[0].number} lacks version {self.policy_version} of the weights, which is gone: the "
                "policy was trained since; call update_weights before the next generate"
            )
        with span("refit"):
            self._bring(self.policy_version, lacking)

    def _bring(self, version: int, lacking: Sequence[PoolWorker]) -> None:
        """Bring the policy's weights to generators that lack them, restarting those that are lost meanwhile."""
        while lacking:
            brought = self._delivery.bring(version, lacking)
            behind = [worker for worker in lacking if worker not in brought]
            self._replace_lost()  # each of them lacked the weights, and still does
            lacking = behind

    def _replace_lost(self) -> None:
        if self.pool.lost:
            self._source.check()  # if the policy was lost too, as with their node, that is what to report
            self.pool.restart_lost()

    def _num_chunks(self, num_rows: int) -> int:
        """As few as a generator decodes at a time, and equally many for each: smaller ones cost more than they save."""
        size = len(self.pool.workers)
        return 1 if size == 1 else size * max(1, math.ceil(num_rows / (size * self._max_rows)))

    def _in_order(
        self, chunks: Sequence[Sequence[int]], answers: Sequence[BatchedDataDict[Any]]
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """The answers to all chunks, row by row as they were asked for."""
        if len(answers) == 1:
            return answers[0]
        places = torch.tensor([row for rows in chunks for row in rows]).argsort()
        return BatchedDataDict.from_batches(answers, {"output_ids": self._pad_id}).select_indices(places)
