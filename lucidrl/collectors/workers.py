"""The workers of a collector, as its driver sees them: called together or one by one, restarted and ended together.

They are a `WorkerPool`. After a failure that no restart repairs, all workers are ended: a collector cannot go on
without one of them.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cloudpickle
import torch

from lucidrl.collectors.parts import Weights, check_weights
from lucidrl.collectors.worker import Answer, Batch, CollectorWorker, Past, Started
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.interfaces import Arguments, Hosting
from lucidrl.distributed.workers.messages import Message, Stored
from lucidrl.distributed.workers.outcomes import START
from lucidrl.distributed.workers.pool import PoolWorker, WorkerPool
from lucidrl.envs.stacked import EnvSpecs
from lucidrl.errors import WorkerError

_log = logging.getLogger(__name__)

ROLLOUT = "a rollout"
"""The phase in which a batch is collected."""
_KEPT = ("set_post_collect_hook", "set_profiling_enabled")
"""Methods that change how a worker collects; a restarted worker gets the last call of each."""
_LONGEST_TIMEOUT_S = 30 * 24 * 3600.0
_SHUTDOWN_TIMEOUT_S = 1.0
_RAY_SHUTDOWN_TIMEOUT_S = 4.0
_TRACE_TIMEOUT_S = 10.0
"""To end the rollout and write the trace, for a worker that records."""


@dataclass(frozen=True)
class WorkerPlan:
    """What the workers of a collector are, wherever they run."""

    shared_arguments: bytes
    """Of all workers' collectors, by cloudpickle."""
    own_arguments: Sequence[bytes]
    """Of each worker's collector, by cloudpickle."""
    weight_shapes: Mapping[str, torch.Size]
    """Of the policy."""
    num_threads: int
    base_seed: int
    """Of everything that is not seeded; workers have different streams of it."""
    timeout_s: float
    """Of a batch and of a call."""
    start_timeout_s: float


@dataclass(frozen=True)
class RayPlan:
    """How workers run on a Ray cluster."""

    options: Sequence[Mapping[str, Any]]
    """Of `ray.remote`, by worker."""
    max_restarts: int
    """Consecutive restarts of one worker without a batch in between."""
    release: Callable[[], None]
    """Called when all workers have ended; may be called twice."""


@dataclass(eq=False)
class _Request:
    """A call that a worker has not answered yet."""

    index: int
    phase: str
    method: str
    args: Sequence[Any]
    future: Future[Any] = field(default_factory=Future)
    """What the call returns, after what came with it was taken."""

    @property
    def is_for_batch(self) -> bool:
        return self.method == "collect"


class CollectorWorkers:
    """Workers that have started. Batches are for one thread; calls may come from any.

    Args:
        ray: by default they are processes of this machine, and never restarted.

    Raises:
        WorkerError: here and in all calls, if a worker raises, exits or times out. Errors of ours that a worker raises
            (`LucidError`) keep their type. All workers have ended then.
    """

    def __init__(self, plan: WorkerPlan, ray: RayPlan | None = None):
        self.size = len(plan.own_arguments)
        self.pids = [0] * self.size
        """Of the workers' processes, on whichever machine."""
        self.specs: list[EnvSpecs] = []
        """Of the workers' envs."""
        self.recording: set[int] = set()
        """Workers with a trace to write before they end."""
        self._plan, self._ray = plan, ray
        self._timeout_s = min(plan.timeout_s, _LONGEST_TIMEOUT_S)
        self._start_timeout_s = min(plan.start_timeout_s, _LONGEST_TIMEOUT_S)
        self._ended: str | None = None
        self._calling, self._changing = threading.Lock(), threading.RLock()
        self._shared_arguments = Stored.of(plan.shared_arguments)
        self._weights: Message | None = None
        self._has_weights = [True] * self.size  # the newest ones, by worker
        self._specs: list[bytes] = [b""] * self.size
        self._past = [Past()] * self.size
        self._unanswered: list[list[_Request]] = [[] for _ in range(self.size)]
        self._failures: dict[int, BaseException] = {}  # the first one of each worker
        self._arrivals: queue.SimpleQueue[tuple[_Request, Future[Any]]] = queue.SimpleQueue()
        try:
            self._pool = WorkerPool(
                CollectorWorker,
                [Arguments((plan.base_seed, ray is not None))] * self.size,
                cluster=ClusterConfig(
                    launcher="local" if ray is None else "ray",
                    num_threads=plan.num_threads,
                    start_timeout_s=self._start_timeout_s,
                    call_timeout_s=self._timeout_s,
                ),
                hosting=Hosting(
                    role="worker",
                    name="collector_worker",
                    start_method="forkserver",
                    imports_main=False,
                    preload=[CollectorWorker.__module__],
                    captures_output=False,
                    start_setting="start_timeout_s",
                    call_setting="timeout_s",
                ),
                ray_options=None if ray is None else ray.options,
                max_restarts=0 if ray is None else ray.max_restarts,
                on_start=self._start,
            )
        except BaseException:
            self._release()
            raise
        self.specs = [cloudpickle.loads(specs) for specs in self._specs]
        atexit.register(self.shutdown)  # before the pool's own, which was registered earlier

    @property
    def num_restarts(self) -> int:
        return self._pool.num_restarts

    def publish(self, weights: Weights, version: int) -> None:
        """What every worker takes, whole, when it begins its next batch.

        Raises:
            ConfigError: if these are not the weights of the policy; nothing has happened then.
        """
        check_weights(weights, self._plan.weight_shapes)
        # A copy: the policy may change before a worker begins its next batch.
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}
        with self._changing:
            if not self._ended:
                self._weights = Stored.of((copies, version))
                self._has_weights = [False] * self.size

    def call(self, method: str, args: Sequence[bytes]) -> list[Any]:
        """Call a method of every worker's collector, each with its arguments by cloudpickle; the results, by worker.

        A worker answers after the rollout that it is busy with.
        """
        return self._call_each(method, "call", [(method, of_worker) for of_worker in args])

    def seed(self, seeds: Sequence[int]) -> list[int]:
        """Seed every worker; the first seed that each does not use."""
        return self._call_each("set_seed", "seed", [(seed,) for seed in seeds])

    def request(self, index: int, num_frames: int, num_frames_before: int) -> None:
        """Ask a worker for a batch, without waiting for it."""
        self._check_alive(ROLLOUT)
        self._ask(_Request(index, ROLLOUT, "collect", (num_frames, num_frames_before)))

    def next_batch(self) -> tuple[int, Batch]:
        """The batch that comes first of those that were asked for, and its worker."""
        self._check_alive(ROLLOUT)
        with self._in_whole(ROLLOUT):
            while True:
                request, future = self._arrivals.get()
                if future.exception() is not None:
                    self._recover(request, future)
                elif (batch := future.result()) is None:  # it sent its trace before its error
                    self._ask(request)
                else:
                    return request.index, batch

    def shutdown(self) -> None:
        """Let the workers close their envs; those that take too long are killed. May be called twice."""
        if self._ended:
            return
        self._ended = "was shut down"
        try:
            self._write_traces()
            self._pool.shutdown(_SHUTDOWN_TIMEOUT_S if self._ray is None else _RAY_SHUTDOWN_TIMEOUT_S)
        finally:
            self._kill("was shut down")

    def _start(self, worker: PoolWorker) -> None:
        """Let a new process make its collector, in the worker's thread."""
        index = worker.number
        stream = index + (worker.num_starts - 1) * self.size  # a restarted worker does not repeat what others drew
        arguments = (self._shared_arguments, self._plan.own_arguments[index], stream, self._past[index])
        answer: Answer = worker.run("start", *arguments, timeout_s=self._start_timeout_s, phase=START)
        started: Started = answer.value
        self.pids[index], self._specs[index] = started.pid, started.specs

    def _call_each(self, phase: str, method: str, args: Sequence[Sequence[Any]]) -> list[Any]:
        with self._calling, self._in_whole(phase):
            self._check_alive(phase)
            requests = [_Request(index, phase, method, of_worker) for index, of_worker in enumerate(args)]
            for request in requests:
                self._ask(request)
            while True:
                by_future = {request.future: request for request in requests}
                done, _ = wait(by_future, return_when=FIRST_EXCEPTION)
                failed = [future for future in done if future.exception() is not None]
                if not failed:
                    return [request.future.result() for request in requests]
                for future in failed:
                    self._recover(by_future[future], future)

    def _ask(self, request: _Request) -> None:
        with self._changing:
            self._unanswered[request.index].append(request)
            self._submit(request)

    def _submit(self, request: _Request) -> None:
        args, index = request.args, request.index
        if request.is_for_batch:
            args = (*args, None if self._has_weights[index] else self._weights)
            self._has_weights[index] = True
        request.future = Future()
        answer = self._pool.submit(index, request.method, *args, timeout_s=self._timeout_s, phase=request.phase)
        answer.add_done_callback(partial(self._answered, request, request.future))

    def _answered(self, request: _Request, future: Future[Any], answer: Future[Answer]) -> None:
        """Take what came of a call, in the worker's thread and so in the order of its calls."""
        error = answer.exception()
        if error is None:
            self._take(request, answer.result())
            future.set_result(answer.result().value)
        else:
            self._failures.setdefault(request.index, error)
            future.set_exception(error)
        if request.is_for_batch:
            self._arrivals.put((request, future))

    def _take(self, request: _Request, answer: Answer) -> None:
        index = request.index
        self._unanswered[index].remove(request)
        calls = dict(self._past[index].calls or {})
        if request.method == "call" and request.args[0] in _KEPT:
            calls[request.args[0]] = request.args[1]
        self._past[index] = Past(answer.state, calls)
        if answer.is_recording:
            self.recording.add(index)
        else:
            self.recording.discard(index)
        for trace in answer.traces:
            trace.save(index)
        if isinstance(answer.value, Batch):
            self._pool.workers[index].succeeded()

    def _recover(self, request: _Request, future: Future[Any]) -> None:
        """Restart the worker that failed in a call, or raise the failure."""
        with self._changing:
            self._check_alive(request.phase)
            if request.future is not future:  # another thread has restarted the worker
                return
            if self._pool.workers[request.index].loss is None or not self._pool.max_restarts:
                self._kill(f"failed in {request.phase}")
                raise self._failures[request.index]
            self._restart()

    def _restart(self) -> None:
        """Restart all lost workers, and send them the calls that they did not answer."""
        for worker in self._pool.lost:
            wait([request.future for request in self._unanswered[worker.number]])  # they fail at once
            if worker.number in self.recording:
                self.recording.discard(worker.number)
                _log.warning("the trace that worker %d was recording is lost", worker.number)
        for worker in self._pool.restart_lost():
            index = worker.number
            self._failures.pop(index, None)
            self._has_weights[index] = self._weights is None
            for request in self._unanswered[index]:
                self._submit(request)

    @contextmanager
    def _in_whole(self, phase: str) -> Iterator[None]:
        """End the workers if the driver is interrupted, for instance by Ctrl-C, and so does not know what they do."""
        try:
            yield
        except BaseException:
            self._kill(f"was interrupted in {phase}")
            raise

    def _check_alive(self, phase: str) -> None:
        if self._ended:
            raise WorkerError(f"{phase} cannot begin: the collector {self._ended}; make another one")

    def _write_traces(self) -> None:
        """Let workers that record end their rollout and write what they have."""
        requests = [
            _Request(index, "disable_profile", "call", ("disable_profile", cloudpickle.dumps(())))
            for index in sorted(self.recording)
        ]
        for request in requests:
            self._ask(request)
        wait([request.future for request in requests], _TRACE_TIMEOUT_S)
        self.recording.clear()
        if lost := [request.index for request in requests if not request.future.done()]:
            _log.warning(
                "collector workers %s were busy for more than %g s and killed; their traces are lost",
                lost,
                _TRACE_TIMEOUT_S,
            )

    def _kill(self, ended: str) -> None:
        self._ended = self._ended or ended
        try:
            self._write_traces()
        finally:
            self._pool.kill()
            self._release()

    def _release(self) -> None:
        """Leave no object in Ray's object store."""
        atexit.unregister(self.shutdown)
        self._weights = None
        self._shared_arguments = Stored.of(None)
        if self._ray is not None:
            self._ray.release()
