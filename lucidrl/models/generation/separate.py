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
from lucidrl.distributed.worker_group import WorkerGroup
from lucidrl.errors import LostWorkerError, RefitError
from lucidrl.models.generation.delivery import WeightDelivery
from lucidrl.models.generation.generation_worker import GenerationWorker
from lucidrl.models.generation.interfaces import GenerationDatumSpec, GenerationOutputSpec
from lucidrl.models.generation.placement import check_nodes, generator_nodes, generator_parts
from lucidrl.models.generation.prompts import prompt_chunks, prompts_of, with_draw_keys
from lucidrl.models.generation.replicas import Replica, Replicas
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
        self.weight_version = 0
        self._source, self._seed = policy, seed
        self._num_calls = 0
        self._max_rows = config.generation.max_concurrent_rows
        self._brought: int | None = None
        """Version of the last refit; before the first one, generators have what they load."""
        self._pad_id = int(tokenizer.pad_token_id)  # type: ignore[arg-type] # always set by `load_tokenizer`
        generation, cluster = config.generation, (cluster or ClusterConfig()).of_one()
        check_nodes(generation, cluster)
        parts = generator_parts(generation)
        # Over shared memory a generator has the GPU of a rank; nccl wants one for each member of a group. Under Ray it
        # sees its own alone.
        first_gpu = policy.group.size if generation.refit == "collective" else 0
        nodes = generator_nodes(generation, [place.node for place in policy.places])

        def start_group(number: int) -> WorkerGroup:
            return WorkerGroup(
                GenerationWorker,
                (config, tokenizer, seed),
                {"number": number, "gpu": 0 if cluster.uses_ray else first_gpu + number},
                cluster=cluster,
                log_dir=log_dir / LOGS if log_dir is not None else None,
                own_processes=True,
                role="generator",
                name=GENERATION,
                part=parts[number],
                nodes=nodes,
                makes_workers=False,
            )

        self.replicas = Replicas(len(parts), start_group, generation.max_restarts)
        self._delivery = WeightDelivery(policy, self.replicas, generation, cluster.call_timeout_s)
        try:
            self._delivery.check_devices()
        except BaseException:
            self.replicas.kill()
            raise

    @property
    def num_replaced(self) -> int:
        """How many generators have been replaced."""
        return self.replicas.num_replaced

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

        def work(replica: Replica) -> None:
            while waiting:
                try:
                    number = waiting.popleft()
                except IndexError:  # another one was faster
                    return
                rows = data if len(chunks) == 1 else data.select_indices(chunks[number])
                try:
                    answers[number] = replica.run("generate", rows, greedy)
                except LostWorkerError:
                    waiting.appendleft(number)
                    raise

        self._make_whole()
        while len(answers) < len(chunks):
            # The policy waits meanwhile, and nobody else would notice that it is lost.
            self.replicas.each(work, watch=self._source.check)
            self._make_whole()
        self.replicas.went_well()
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
            self._bring(version, self.replicas.all)
        self._source.update_weights(version)
        self.weight_version = self._brought = version

    def start_gpu_profiling(self) -> None:
        """Let those generators record that are asked to; see `lucidrl.utils.nsys`."""
        self.replicas.start_gpu_profiling()

    def stop_gpu_profiling(self) -> None:
        """Let them write what they recorded; harmless if they did not."""
        self.replicas.stop_gpu_profiling()

    def shutdown(self) -> None:
        """End the generators; may be called twice."""
        self.replicas.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _make_whole(self) -> None:
        """All generators are there afterwards, with the weights of the last refit."""
        self._replace_lost()
        lacking = [replica for replica in self.replicas.all if replica.version != self._brought]
        if not lacking:
            return
        if self._source.is_ahead:
            raise RefitError(
                f"generator {lacking[0].number} lacks version {self.weight_version} of the weights, which is gone: the "
                "policy was trained since; call update_weights before the next generate"
            )
        with span("refit"):
            self._bring(self.weight_version, lacking)

    def _bring(self, version: int, lacking: Sequence[Replica]) -> None:
        """Bring the policy's weights to replicas that lack them, and to those that take the place of lost ones."""
        while lacking:
            brought = self._delivery.bring(version, lacking)
            behind = [replica for replica in lacking if replica not in brought]
            self._replace_lost()  # each of them lacked the weights, and still does
            lacking = behind

    def _replace_lost(self) -> None:
        if any(replica.loss is not None for replica in self.replicas.all):
            self._source.check()  # if it was lost too, as with their node, that is what has to be told
            self.replicas.replace_lost()

    def _num_chunks(self, num_rows: int) -> int:
        """As few as a generator decodes at a time, and equally many for each: smaller ones cost more than they save."""
        size = len(self.replicas.all)
        return 1 if size == 1 else size * max(1, math.ceil(num_rows / (size * self._max_rows)))

    def _in_order(
        self, chunks: Sequence[Sequence[int]], answers: Sequence[BatchedDataDict[Any]]
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """The answers to all chunks, row by row as they were asked for."""
        if len(answers) == 1:
            return answers[0]
        places = torch.tensor([row for rows in chunks for row in rows]).argsort()
        return BatchedDataDict.from_batches(answers, {"output_ids": self._pad_id}).select_indices(places)
