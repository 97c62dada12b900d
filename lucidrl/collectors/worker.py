"""`CollectorWorker`: a `Collector` in a worker process that the driver calls, its plan, and the batches it returns."""

from __future__ import annotations

import logging
import math
import multiprocessing
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import cloudpickle
import numpy as np
import torch

from lucidrl.collectors import base
from lucidrl.collectors.profile import SentTrace, redirected
from lucidrl.collectors.single import Collector
from lucidrl.collectors.weights import Weights
from lucidrl.envs.arrays import Key
from lucidrl.envs.serial import EnvSpecs
from lucidrl.errors import DataError
from lucidrl.profiling.recording import Recording
from lucidrl.profiling.spans import span
from lucidrl.utils.nsys import COLLECTOR, worker_name
from lucidrl.utils.random_state import seed_everything
from lucidrl.utils.recorded import Recorded

CatResults = Literal["stack", 0, -1]
"""How the frames of several workers are joined to one batch; see `MultiSyncCollector`."""


@dataclass(frozen=True)
class Batch:
    """A batch in host memory."""

    entries: dict[Key, torch.Tensor]
    batch_size: tuple[int, ...]

    @property
    def num_frames(self) -> int:
        return math.prod(self.batch_size)


def joined(batches: Sequence[Batch], cat_results: CatResults) -> Batch:
    """Join the batches of all workers to one batch."""
    for index, batch in enumerate(batches):
        if differing := batch.entries.keys() ^ batches[0].entries.keys():
            raise DataError(
                f"the batches of workers 0 and {index} differ in {', '.join(map(str, differing))}; let policy and hook "
                "return the same entries in every worker"
            )
    batch_size = list(batches[0].batch_size)
    if cat_results == "stack":
        join, batch_size = torch.stack, [len(batches), *batch_size]
    else:
        dim = cat_results % len(batch_size)
        if dim == len(batch_size) - 1:  # time
            for batch in batches:
                _mark_end(batch)
        join, batch_size[dim] = partial(torch.cat, dim=dim), sum(batch.batch_size[dim] for batch in batches)
    entries = {key: join([batch.entries[key] for batch in batches]) for key in batches[0].entries}
    return Batch(entries, tuple(batch_size))


def _mark_end(batch: Batch) -> None:
    """Mark the last frames as truncated unless they are done: the frame after them comes from another worker."""
    done, truncated = batch.entries["next", "done"], batch.entries["next", "truncated"]
    truncated[..., -1, :] |= ~done[..., -1, :]
    done[..., -1, :] = True


_DRIVER_GONE_S = 0.1
"""Time to wait for a killed driver to exit: it closes its connections, one by one, before it exits."""


@dataclass(frozen=True)
class WorkerPlan:
    """How to start the workers of a collector."""

    shared_arguments: bytes
    """Arguments of `Collector` that are equal in all workers, pickled with cloudpickle."""
    own_arguments: Sequence[bytes]
    """Further arguments of `Collector`, by worker, pickled with cloudpickle."""
    num_threads: int
    base_seed: int
    """Seed of the random generators until `set_seed` is called; each worker has a separate stream."""
    timeout_s: float
    """Timeout of a batch and of a call."""
    start_timeout_s: float
    ray_options: Sequence[Mapping[str, Any]] | None = None
    """Options of `ray.remote`, by worker; None starts local processes."""
    max_restarts: int = 0
    """Most consecutive restarts of one worker without a batch in between."""
    release: Callable[[], None] = lambda: None
    """Called when all workers have ended; may be called twice."""


@dataclass(frozen=True)
class Reply:
    """The return value of every method that the driver calls."""

    value: Any
    state: Mapping[str, Any]
    """State of the collector."""
    is_recording: bool
    """Whether a trace is not written yet."""
    traces: Sequence[SentTrace]
    """Traces written since the last reply; the driver saves them."""


class CollectorWorker(Recorded):
    """Runs a `Collector` in a worker process.

    Args:
        base_seed: seed of the random generators until `set_seed` is called; each worker has a separate stream.
        sends_traces: send traces to the driver, which may be on another machine, instead of saving them here.
        number: index of the worker.
    """

    def __init__(self, base_seed: int, sends_traces: bool, number: int = 0):
        logging.getLogger(base.__name__).setLevel(logging.ERROR)  # the driver warns, once for all workers
        self._recording = Recording(worker_name(COLLECTOR, number), operators=False)
        self._base_seed = base_seed
        self._traces: list[SentTrace] | None = [] if sends_traces else None
        self._collector: Collector | None = None
        self._failure: BaseException | None = None

    def start(
        self, shared: bytes, own: bytes, stream: int, state: Mapping[str, Any] | None, calls: Mapping[str, bytes]
    ) -> Reply:
        """Create the collector; return its `EnvSpecs`, pickled with cloudpickle: scripts may define spec classes.

        Args:
            shared, own: arguments of the collector, pickled with cloudpickle.
            stream: index of this worker's random stream.
            state: after a restart, the state of the previous process's collector.
            calls: methods to call, each with its arguments, pickled with cloudpickle.
        """
        seed_everything(self._base_seed, stream)
        self._collector = Collector(**cloudpickle.loads(shared), **cloudpickle.loads(own))
        if state is not None:
            self._collector.load_state_dict(state)
        for method, args in calls.items():
            self.call(method, args)
        return self._reply(cloudpickle.dumps(EnvSpecs.of(self._collector.env)))

    def collect(self, num_frames: int, num_frames_before: int, newer: tuple[Weights, int] | None) -> Reply:
        """Collect a `Batch`.

        If the rollout fails and there are traces to send, return None with the traces; the next call raises the error.

        Args:
            num_frames_before: frames requested from all workers before this call; decides whether to act at random.
            newer: weights and policy version, if newer weights were published since the last call.
        """
        if self._failure is not None:
            raise self._failure
        collector = self._made()
        if newer is not None:  # never during a rollout: a batch has one policy version
            weights, version = newer
            collector.update_policy_weights_(weights or None, version=version)
        collector.num_frames = num_frames_before
        try:
            with span("collect"):
                batch = collector.rollout(num_frames)
        except BaseException as error:
            if not self._traces:
                raise
            self._failure = error
            return self._reply(None)
        entries: dict[Key, Any] = dict(batch.items(include_nested=True, leaves_only=True))
        return self._reply(Batch(entries, tuple(batch.batch_size)))

    def call(self, method: str, args: bytes) -> Reply:
        """Call a method of the collector. `args` are pickled with cloudpickle, so they may contain functions."""
        arguments = cloudpickle.loads(args)
        if method == "start_profile" and self._traces is not None:
            settings, worker_idx = arguments
            arguments = redirected(settings, worker_idx, self._traces), worker_idx
        elif method == "set_seed":  # the policy may use any random generator of this process
            random.seed(*arguments)
            np.random.seed(*arguments)
        return self._reply(base.method_of(self._made(), method)(*arguments))

    def shutdown(self) -> None:
        self.stop_gpu_profiling()
        collector = self._collector
        if collector is None:
            return
        # At this point the driver accepts no more traces. Without a driver, this process may be killed during a write.
        if collector.profiler.is_active and (self._traces is not None or _driver_is_gone()):
            collector.profiler.forget()
        collector.shutdown()

    def _made(self) -> Collector:
        assert self._collector is not None, "the driver calls `start` first"
        return self._collector

    def _reply(self, value: Any) -> Reply:
        collector = self._made()
        traces = list(self._traces or ())
        if self._traces:
            self._traces.clear()
        return Reply(value, collector.state_dict(), collector.profiler.is_active, traces)


def _driver_is_gone() -> bool:
    driver = multiprocessing.parent_process()
    assert driver is not None
    driver.join(_DRIVER_GONE_S)
    return not driver.is_alive()
