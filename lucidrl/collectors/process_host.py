"""Workers that are processes of this machine, with weights in memory that they share."""

from __future__ import annotations

import os
import queue
from collections import deque
from contextlib import suppress
from functools import partial

from lucidrl.collectors.parts import Weights
from lucidrl.collectors.weights import SharedWeights, WeightWriter
from lucidrl.collectors.worker_host import WorkerPlan
from lucidrl.collectors.worker_main import WorkerSettings
from lucidrl.collectors.worker_process import WorkerProcess
from lucidrl.distributed.launchers.rank_process import Outcome


class _QueuedArrivals:
    """Those who put it in are threads of their own."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
        self.here: deque[tuple[int, Outcome]] = deque()

    def put(self, index: int, outcome: Outcome) -> None:
        self._queue.put((index, outcome))

    def take_in(self, timeout_s: float) -> None:
        with suppress(queue.Empty):
            self.here.append(self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait())
            while True:
                self.here.append(self._queue.get_nowait())


class ProcessHost:
    """Starts processes; see `WorkerHost`.

    Args:
        weights: that the policy has to begin with.
    """

    def __init__(self, weights: Weights):
        self._weights = SharedWeights.like(weights)
        self._writer = WeightWriter(self._weights)
        self.replies = _QueuedArrivals()
        self.batches = _QueuedArrivals()

    def start(self, index: int, plan: WorkerPlan) -> WorkerProcess:
        return WorkerProcess(
            WorkerSettings(index, dict(os.environ), plan.num_threads, plan.base_seed),
            self._weights,
            (plan.shared_arguments, plan.own_arguments[index]),
            plan.timeout_s,
            partial(self.replies.put, index),
            partial(self.batches.put, index),
        )

    def publish(self, weights: Weights, version: int) -> None:
        self._writer.publish(weights, version)

    def close(self) -> None:
        """The memory is gone with its last holder."""
