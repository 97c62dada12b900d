"""`WorkerPool`: independent workers with futures and restarts.

A worker that exits or hangs loses only its pending calls. The driver has one thread per worker: calls to one worker run
in order, calls to different workers overlap.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.interfaces import Arguments, Hosting, Worker
from lucidrl.distributed.workers.processes import ProcessGroup
from lucidrl.errors import ConfigError, LostWorkerError, LucidError, WorkerError
from lucidrl.profiling.worker_times import worker_clock
from lucidrl.utils.watching import wait_watching

_log = logging.getLogger(__name__)

T = TypeVar("T")


class PoolWorker:
    """One worker of a pool, across its restarts."""

    def __init__(self, number: int, start_process: Callable[[int], ProcessGroup]):
        self.number = number
        self.loss: LostWorkerError | None = None
        """The failure that ended the worker's process; None while the process runs."""
        self.num_starts = 0
        self.restarts_in_a_row = 0
        """Consecutive restarts without a success in between."""
        self._start_process = start_process
        self._process: ProcessGroup | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._work, name=f"pool worker {number}", daemon=True).start()

    @property
    def process(self) -> ProcessGroup:
        """The worker's current process."""
        assert self._process is not None, f"worker {self.number} has not started"
        return self._process

    def run(self, method: str, *args: Any, timeout_s: float | None = None, phase: str | None = None) -> Any:
        """Call a method of the worker and wait; allowed only in the worker's thread, see `WorkerPool.each`.

        Args:
            phase: how errors name the call; by default the method.

        Raises:
            LostWorkerError: if the worker's process exits or times out, or was lost before and is not restarted yet.
        """
        if self.loss is not None:  # a call that was queued meanwhile must not reach the next process either
            raise self.loss
        (result,) = self.process.run(method, [Arguments(args)], timeout_s, phase)
        return result

    def succeeded(self) -> None:
        """Reset the count of consecutive restarts after finished work."""
        self.restarts_in_a_row = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run a function in the worker's thread, after everything that was submitted before."""
        future: Future[T] = Future()

        def do() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        with self._closing:
            if self._is_closed:
                future.set_exception(WorkerError(f"worker {self.number} was shut down; start another pool"))
            else:
                self._calls.put(do)
        return future

    def start_process(self) -> None:
        self._process = self._start_process(self.number)
        self.num_starts += 1

    def make(self) -> None:
        self.process.make_workers()
        self.loss = None

    def shutdown(self, timeout_s: float | None) -> None:
        if self._process is not None:
            self._process.shutdown(timeout_s)
        self._close()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._close()

    def _close(self) -> None:
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # an idle worker holds no result


class WorkerPool:
    """Workers in processes on this machine or on Ray nodes; all have started when the constructor returns.

    The caller decides about restarts: a call to a lost worker raises, `restart_lost` starts another process, and the
    caller retries the call.

    Args:
        worker_class: any class with a `shutdown` method, importable by name.
        arguments: constructor arguments, one entry per worker.
        cluster: where workers run, their threads and timeouts; `num_workers` and `num_nodes` are ignored.
        hosting: how the processes are set up.
        ray_options: options of `ray.remote`, one entry per worker; replaces `hosting.ray_options`.
        max_restarts: most consecutive restarts of one worker without a success in between (`PoolWorker.succeeded`).
        setting: prefix of setting names in errors, such as `policy.generation.`.
        on_start: called with a worker after each start, in the worker's thread, to restore its state.

    Raises:
        WorkerError: if a worker does not start; then all workers are killed. A `LucidError` of a worker keeps its type.
    """

    def __init__(
        self,
        worker_class: type[Worker],
        arguments: Sequence[Arguments],
        *,
        cluster: ClusterConfig | None = None,
        hosting: Hosting | None = None,
        ray_options: Sequence[Mapping[str, Any]] | None = None,
        max_restarts: int = 0,
        setting: str = "",
        on_start: Callable[[PoolWorker], None] | None = None,
    ):
        cluster, hosting = (cluster or ClusterConfig()).of_one(), hosting or Hosting(role="worker")
        if max_restarts < 0:
            raise ConfigError(
                f"{setting}max_restarts={max_restarts} is negative; set 0 to never restart, or a positive number"
            )
        self.max_restarts = max_restarts
        self.num_restarts = 0
        """Restarts of all workers so far."""
        self._restarts_setting = f"{setting}max_restarts"
        self._hosting = replace(hosting, pool_size=len(arguments), size_setting=f"{setting}num_workers")
        self._on_start = on_start
        self._ended = False
        self._are_recording = False
        self._noting = threading.Lock()
        self.on_loss: Callable[[PoolWorker], None] = lambda worker: None
        """Called when a worker is lost, before it can be restarted; in any thread."""

        def start_process(number: int) -> ProcessGroup:
            options = hosting.ray_options if ray_options is None else ray_options[number]
            own_hosting = replace(self._hosting, first_number=number, ray_options=options)
            return ProcessGroup(worker_class, arguments[number], cluster, own_hosting)

        self.workers = [PoolWorker(number, start_process) for number in range(len(arguments))]
        self._start(self.workers)
        if lost := [worker.loss for worker in self.workers if worker.loss is not None]:
            self.kill()
            raise lost[0]

    @property
    def lost(self) -> list[PoolWorker]:
        """Workers whose process was lost."""
        return [worker for worker in self.workers if worker.loss is not None]

    def submit(
        self, number: int, method: str, *args: Any, timeout_s: float | None = None, phase: str | None = None
    ) -> Future[Any]:
        """Call a method of a worker, after all calls submitted to it before; the timeout begins with the call.

        `Future.result` raises LostWorkerError if the worker is lost; `PoolWorker.loss` is then set until a restart.
        """
        worker = self.workers[number]

        def call() -> Any:
            try:
                return worker.run(method, *args, timeout_s=timeout_s, phase=phase)
            except LostWorkerError as loss:
                self._note(worker, loss)
                raise

        return worker.submit(call)

    def each(
        self,
        work: Callable[[PoolWorker], T],
        workers: Sequence[PoolWorker] | None = None,
        watch: Callable[[], None] | None = None,
    ) -> list[T]:
        """Run a function for all workers, or for `workers`, at the same time, each in the worker's thread.

        Args:
            watch: see `wait_watching`.

        Returns:
            The results of the workers that were not lost; lost workers have `PoolWorker.loss` set.

        Raises:
            The first error of the function, except LostWorkerError, or of `watch`; all workers are killed.
        """
        chosen = self.workers if workers is None else workers
        lost = object()

        def attempt(worker: PoolWorker) -> Any:
            try:
                return work(worker)
            except LostWorkerError as loss:
                self._note(worker, loss)
                return lost

        futures: list[Future[Any]] = []
        try:
            futures += [worker.submit(partial(attempt, worker)) for worker in chosen]
            with worker_clock.waiting():
                wait_watching(futures, watch or (lambda: None), until_one_raises=True)
            for future in futures:
                if future.done():
                    future.result()  # raises if this worker failed
            results = [future.result() for future in futures]
        except BaseException:  # Ctrl-C too: the calls that threads wait for must end
            self.kill()
            raise
        return [result for result in results if result is not lost]

    def move_logs(self, folder: Path) -> None:
        """Let workers on this machine write their logs to `folder` from now on, even after restarts."""
        self._hosting = replace(self._hosting, log_dir=folder)
        self.each(lambda worker: worker.process.move_logs(folder))

    def restart_lost(self) -> list[PoolWorker]:
        """Restart all lost workers and return them.

        Raises:
            WorkerError: if a worker has no restart left; its `__cause__` is the failure that ended the worker.
        """
        restarted: list[PoolWorker] = []
        while lost := self.lost:
            for worker in lost:
                if worker.restarts_in_a_row >= self.max_restarts:
                    raise WorkerError(
                        f"{self._name(worker)} failed, and {self._restarts_setting}={self.max_restarts} allows no more "
                        f"restarts in a row; fix the cause: {worker.loss}"
                    ) from worker.loss
                worker.restarts_in_a_row += 1
                self.num_restarts += 1
                counted = f"restart {worker.restarts_in_a_row} of at most {self.max_restarts} in a row"
                _log.warning("restarting %s: %s", self._name(worker), counted)
                restarted += [worker] if worker not in restarted else []
            try:
                self._start(lost)
            except LucidError as error:
                names = ", ".join(map(self._name, lost))
                error.add_note(f"raised while restarting {names} after this failure: {lost[-1].loss}")
                raise
        return restarted

    def start_gpu_profiling(self) -> None:
        """Start recording in the workers that the profile request selects, and after restarts; see `utils.nsys`."""
        self._are_recording = True
        self.each(lambda worker: worker.process.start_gpu_profiling())

    def stop_gpu_profiling(self) -> None:
        """Stop recording and write the traces; does nothing if no worker records or the pool has ended."""
        self._are_recording = False
        if not self._ended:
            self.each(lambda worker: worker.process.stop_gpu_profiling())

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Let all workers finish their call and shut down; kill those that time out. May be called twice."""
        if self._ended:
            return
        self._ended = True
        threads = [threading.Thread(target=worker.shutdown, args=(timeout_s,)) for worker in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def kill(self) -> None:
        """Kill all workers, even while they start; may be called twice."""
        self._ended = True
        for worker in self.workers:
            with suppress(Exception):  # the others must be killed too
                worker.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _start(self, workers: Sequence[PoolWorker]) -> None:
        def make(worker: PoolWorker) -> None:
            worker.make()
            if self._on_start is not None:
                self._on_start(worker)
            if self._are_recording:
                worker.process.start_gpu_profiling()

        started = []
        try:
            # In this thread, which Ctrl-C interrupts; `kill` then reaches all processes while workers are made.
            for worker in workers:
                try:
                    worker.start_process()
                    started.append(worker)
                except LostWorkerError as loss:
                    self._note(worker, loss)
        except BaseException:
            self.kill()
            raise
        self.each(make, started)

    def _note(self, worker: PoolWorker, loss: LostWorkerError) -> None:
        if self._ended or worker.loss is loss:
            return
        with self._noting:
            reported = {other.loss.node for other in self.workers if other.loss is not None}
            worker.loss = loss
        if loss.node is None or loss.node not in reported:  # a lost node is reported once
            _log.warning(
                "%s failed: %s", self._name(worker), str(loss)
            )  # text: a log record must not hold the error's frames
        self.on_loss(worker)

    def _name(self, worker: PoolWorker) -> str:
        return f"{self._hosting.role} {worker.number}"
