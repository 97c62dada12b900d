"""The driver's side of a collector's workers: calls to one or all workers, restarts, and shutdown.

The workers form a `WorkerPool`. A collector needs all workers, so a failure that no restart repairs ends all of them.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cloudpickle

from lucidrl.collectors.weights import Weights
from lucidrl.collectors.worker import Batch, CollectorWorker, Reply, WorkerPlan
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.interfaces import Arguments, Hosting
from lucidrl.distributed.workers.messages import Message, Stored
from lucidrl.distributed.workers.outcomes import START
from lucidrl.distributed.workers.pool import PoolWorker, WorkerPool
from lucidrl.envs.serial import EnvSpecs
from lucidrl.errors import WorkerError
from lucidrl.profiling.spans import recorder
from lucidrl.utils.nsys import COLLECTOR

_log = logging.getLogger(__name__)

ROLLOUT = "a rollout"
"""Name of the phase in which a worker collects a batch, for errors."""
WAITING_BATCHES = "batches waiting in the collector"
"""Counter in traces."""
_REPEATED = ("set_post_collect_hook", "set_profiling_enabled")
"""Methods that change how a worker collects; a restarted worker repeats the last call of each."""
_LONGEST_TIMEOUT_S = 30 * 24 * 3600.0
_SHUTDOWN_TIMEOUT_S = 1.0
_RAY_SHUTDOWN_TIMEOUT_S = 10.0
_TRACE_TIMEOUT_S = 10.0
"""Timeout for a recording worker to end its rollout and write its trace."""


@dataclass(eq=False)
class _Request:
    """A call that a worker has not finished yet."""

    index: int
    method: str
    """Method of `CollectorWorker`: "collect" or "call"."""
    args: Sequence[Any]
    future: Future[Any] = field(default_factory=Future)
    """The result, available once the rest of the reply is processed."""

    @property
    def is_for_batch(self) -> bool:
        return self.method == "collect"

    @property
    def phase(self) -> str:
        return ROLLOUT if self.is_for_batch else self.args[0]


@dataclass
class _WorkerRecord:
    """The driver's record of one worker; it is kept when the worker's process is restarted."""

    specs: EnvSpecs | None = None
    state: Mapping[str, Any] | None = None
    """State of the collector in the last reply."""
    repeated_calls: dict[str, bytes] = field(default_factory=dict)
    """Arguments of the calls that a restarted worker repeats, by method."""
    has_newest_weights: bool = True
    unfinished: list[_Request] = field(default_factory=list)
    failure: BaseException | None = None
    """The first failure since the last start."""


class CollectorWorkers:
    """Started workers. Request and receive batches in one thread; `call` and `publish` work in any thread.

    Raises:
        WorkerError: a worker raised, exited or timed out; every method can raise this. A `LucidError` of a worker
            keeps its type. All workers have ended.
    """

    def __init__(self, plan: WorkerPlan):
        self.size = len(plan.own_arguments)
        self.requested: dict[int, int] = {}
        """Sizes in frames of the batches that were requested and not received yet, by worker."""
        self.recording: set[int] = set()
        """Indices of the workers whose trace is not written yet."""
        self._plan = plan
        self._timeout_s = min(plan.timeout_s, _LONGEST_TIMEOUT_S)
        self._start_timeout_s = min(plan.start_timeout_s, _LONGEST_TIMEOUT_S)
        self._ended: str | None = None
        self._calling, self._changing = threading.Lock(), threading.RLock()
        self._shared_arguments = Stored.of(plan.shared_arguments)
        self._weights: Message | None = None
        self._records = [_WorkerRecord() for _ in range(self.size)]
        self._arrivals: queue.SimpleQueue[tuple[_Request, Future[Any]]] = queue.SimpleQueue()
        try:
            self.pool = WorkerPool(
                CollectorWorker,
                [Arguments((plan.base_seed, plan.ray_options is not None, number)) for number in range(self.size)],
                cluster=ClusterConfig(
                    launcher="local" if plan.ray_options is None else "ray",
                    num_threads=plan.num_threads,
                    start_timeout_s=self._start_timeout_s,
                    call_timeout_s=self._timeout_s,
                ),
                hosting=Hosting(
                    role="worker",
                    name=COLLECTOR,
                    start_method="forkserver",
                    imports_main=False,
                    preload=[CollectorWorker.__module__],
                    captures_output=False,
                    start_setting="start_timeout_s",
                    call_setting="timeout_s",
                ),
                ray_options=plan.ray_options,
                max_restarts=plan.max_restarts,
                on_start=self._start,
            )
        except BaseException:
            self._release()
            raise
        self.specs = [record.specs for record in self._records if record.specs is not None]
        """Specs of the workers' envs."""
        atexit.register(self.shutdown)  # runs before the pool's shutdown, which was registered earlier

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers; each is valid on the worker's machine."""
        return [pid for worker in self.pool.workers for pid in worker.process.pids]

    @property
    def num_restarts(self) -> int:
        return self.pool.num_restarts

    def publish(self, weights: Weights, version: int) -> None:
        """Send these weights to every worker with its next request of a batch."""
        # A copy: the policy may change before a worker begins its next batch.
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}
        with self._changing:
            if not self._ended:
                self._weights = Stored.of((copies, version))
                for record in self._records:
                    record.has_newest_weights = False

    def call(self, method: str, args: Sequence[bytes]) -> list[Any]:
        """Call a method of every worker's collector after its current rollout; return the results, by worker.

        Args:
            args: arguments by worker, pickled with cloudpickle.
        """
        with self._calling, self._killed_on_error(method):
            self._check_alive(method)
            requests = [_Request(index, "call", (method, of_worker)) for index, of_worker in enumerate(args)]
            for request in requests:
                self._send(request)
            while True:
                by_future = {request.future: request for request in requests}
                done, _ = wait(by_future, return_when=FIRST_EXCEPTION)
                failed = [future for future in done if future.exception() is not None]
                if not failed:
                    return [request.future.result() for request in requests]
                for future in failed:
                    self._recover(by_future[future], future)

    def request(self, index: int, num_frames: int, num_frames_before: int) -> None:
        """Request a batch from a worker, without waiting for the batch.

        Args:
            num_frames_before: frames requested from all workers before this call; decides whether to act at random.
        """
        self._check_alive(ROLLOUT)
        self._send(_Request(index, "collect", (num_frames, num_frames_before)))
        self.requested[index] = num_frames

    def next_batch(self) -> tuple[int, Batch]:
        """Wait for the first of the requested batches; return the index of the worker and the batch."""
        self._check_alive(ROLLOUT)
        with self._killed_on_error(ROLLOUT):
            while True:
                request, future = self._arrivals.get()
                recorder.count(WAITING_BATCHES, self._arrivals.qsize())
                if future.exception() is not None:
                    self._recover(request, future)
                elif (batch := future.result()) is None:  # the rollout failed; the next call raises the error
                    self._send(request)
                else:
                    del self.requested[request.index]
                    return request.index, batch

    def shutdown(self) -> None:
        """Let the workers close their envs; kill workers that exceed the timeout. May be called twice."""
        if self._ended:
            return
        self._ended = "was shut down"
        try:
            self._write_traces()
            is_local = self._plan.ray_options is None
            self.pool.shutdown(_SHUTDOWN_TIMEOUT_S if is_local else _RAY_SHUTDOWN_TIMEOUT_S)
        finally:
            self._kill("was shut down")

    def _start(self, worker: PoolWorker) -> None:
        """Create the collector in a new process; runs in the worker's thread of the driver."""
        index, record = worker.number, self._records[worker.number]
        stream = index + (worker.num_starts - 1) * self.size  # every start of every worker has another random stream
        own_arguments = self._plan.own_arguments[index]
        arguments = (self._shared_arguments, own_arguments, stream, record.state, record.repeated_calls)
        reply: Reply = worker.run("start", *arguments, timeout_s=self._start_timeout_s, phase=START)
        record.specs = cloudpickle.loads(reply.value)

    def _send(self, request: _Request) -> None:
        with self._changing:
            self._records[request.index].unfinished.append(request)
            self._submit(request)

    def _submit(self, request: _Request) -> None:
        args, record = request.args, self._records[request.index]
        if request.is_for_batch:
            args = (*args, None if record.has_newest_weights else self._weights)
            record.has_newest_weights = True
        request.future = Future()
        reply = self.pool.submit(request.index, request.method, *args, timeout_s=self._timeout_s, phase=request.phase)
        reply.add_done_callback(partial(self._replied, request, request.future))

    def _replied(self, request: _Request, future: Future[Any], reply: Future[Reply]) -> None:
        """Process a reply; runs in the worker's thread of the driver, so the order of replies is that of the calls."""
        error = reply.exception()
        if error is None:
            self._take(request, reply.result())
            future.set_result(reply.result().value)
        else:
            record = self._records[request.index]
            record.failure = record.failure or error
            future.set_exception(error)
        if request.is_for_batch:
            self._arrivals.put((request, future))
            recorder.count(WAITING_BATCHES, self._arrivals.qsize())

    def _take(self, request: _Request, reply: Reply) -> None:
        index, record = request.index, self._records[request.index]
        record.unfinished.remove(request)
        record.state = reply.state
        if request.method == "call" and request.args[0] in _REPEATED:
            record.repeated_calls[request.args[0]] = request.args[1]
        if reply.is_recording:
            self.recording.add(index)
        else:
            self.recording.discard(index)
        for trace in reply.traces:
            trace.save(index)
        if isinstance(reply.value, Batch):
            self.pool.workers[index].succeeded()

    def _recover(self, request: _Request, future: Future[Any]) -> None:
        """Restart the worker whose call failed, or raise the failure."""
        with self._changing:
            self._check_alive(request.phase)
            if request.future is not future:  # another thread has restarted the worker
                return
            if self.pool.workers[request.index].loss is None or not self.pool.max_restarts:
                self._kill(f"failed in {request.phase}")
                failure = self._records[request.index].failure
                assert failure is not None
                raise failure
            self._restart()

    def _restart(self) -> None:
        """Restart all lost workers, and resend their unfinished calls."""
        for worker in self.pool.lost:
            wait([request.future for request in self._records[worker.number].unfinished])  # these fail at once
            if worker.number in self.recording:
                self.recording.discard(worker.number)
                _log.warning("the trace that collector worker %d was recording is lost", worker.number)
        for worker in self.pool.restart_lost():
            record = self._records[worker.number]
            record.failure, record.has_newest_weights = None, self._weights is None
            for request in record.unfinished:
                self._submit(request)

    @contextmanager
    def _killed_on_error(self, phase: str) -> Iterator[None]:
        """Kill the workers if an exception, such as Ctrl-C, interrupts the driver while they work."""
        try:
            yield
        except BaseException:
            self._kill(f"was interrupted in {phase}")
            raise

    def _check_alive(self, phase: str) -> None:
        if self._ended:
            raise WorkerError(f"{phase} cannot begin: the collector {self._ended}; create a new collector")

    def _write_traces(self) -> None:
        """Let recording workers end their rollout and write their trace."""
        args = ("disable_profile", cloudpickle.dumps(()))
        requests = [_Request(index, "call", args) for index in sorted(self.recording)]
        for request in requests:
            self._send(request)
        wait([request.future for request in requests], _TRACE_TIMEOUT_S)
        self.recording.clear()
        if lost := [request.index for request in requests if not request.future.done()]:
            _log.warning(
                "collector workers %s were still busy after %g s and were killed; their traces are lost",
                lost,
                _TRACE_TIMEOUT_S,
            )

    def _kill(self, ended: str) -> None:
        self._ended = self._ended or ended
        try:
            self._write_traces()
        finally:
            self.pool.kill()
            self._release()

    def _release(self) -> None:
        """Free the weights and arguments in Ray's object store, and release the resources of the plan."""
        atexit.unregister(self.shutdown)
        self._weights = None
        self._shared_arguments = Stored.of(None)
        self._plan.release()
