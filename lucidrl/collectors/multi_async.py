"""MultiAsyncCollector: each worker collects whole batches and never waits for the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from lucidrl.collectors.multi import BatchOrder, MultiCollector
from lucidrl.collectors.worker import Batch
from lucidrl.collectors.workers import CollectorWorkers
from lucidrl.envs.creator import EnvFactory


class AsyncOrder(BatchOrder):
    """Each batch is of the worker that finishes first; all workers are always busy with their next one."""

    def frames_of_worker(self, frames_per_batch: int, num_workers: int) -> int:
        return frames_per_batch

    def envs_per_step(self, workers: CollectorWorkers) -> int:
        return math.prod(workers.specs[0].batch_size)

    def next_batch(self, workers: CollectorWorkers, num_frames: int, num_wanted: Callable[[int], int]) -> Batch | None:
        for index in range(workers.size):
            if index not in workers.requested:
                self._request(workers, index, num_frames, num_wanted)
        if not workers.requested:
            return None
        index, batch = workers.next_batch()
        self._request(workers, index, num_frames + math.prod(batch.batch_size), num_wanted)
        return batch

    def _request(
        self, workers: CollectorWorkers, index: int, num_frames: int, num_wanted: Callable[[int], int]
    ) -> None:
        """Request the next batch of a worker, unless the requested ones suffice."""
        num_before, envs_per_step = num_frames + sum(workers.requested.values()), self.envs_per_step(workers)
        if wanted := num_wanted(num_before):
            workers.request(index, math.ceil(wanted / envs_per_step) * envs_per_step, num_before)


class MultiAsyncCollector(MultiCollector):
    """Each batch is of the worker that finishes first.

    All workers are always busy with their next batch, even while the consumer works on one. So a batch may be of older
    weights; ("collector", "policy_version") is their version.

        collector = MultiAsyncCollector([make_env] * 4, policy, frames_per_batch=1000, total_frames=1_000_000)
        for batch in collector:
            train(batch)
            collector.update_policy_weights_()
        collector.shutdown()

    See `MultiCollector` for the arguments.
    """

    def __init__(self, create_env_fn: EnvFactory | Sequence[EnvFactory], policy: Any = None, **arguments: Any):
        super().__init__(create_env_fn, policy, AsyncOrder(), **arguments)
