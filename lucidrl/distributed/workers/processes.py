"""`ProcessGroup` (not torch's): worker processes that the driver calls together, on this machine or on Ray nodes.

Every wait has a timeout. When one worker fails, all workers are killed: the others may wait for it in a collective.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.interfaces import Arguments, Hosting, NodeLost, Worker
from lucidrl.distributed.workers.local import LocalWorkers, start_local
from lucidrl.distributed.workers.logs import LogFolder
from lucidrl.distributed.workers.messages import Message, call_messages
from lucidrl.distributed.workers.outcomes import (
    IDLE,
    START,
    Exited,
    Outcome,
    Raised,
    Returned,
    explain_failure,
    explain_loss,
    outcome_of,
)
from lucidrl.distributed.workers.process import redirect_output
from lucidrl.distributed.workers.ray_workers import RayWorkers, start_on_ray
from lucidrl.errors import DataError, WorkerError
from lucidrl.profiling.clock import write_clock
from lucidrl.profiling.settings import set_traces_folder, traces_folder
from lucidrl.profiling.worker_times import worker_clock
from lucidrl.utils.nsys import is_recorded

_log = logging.getLogger(__name__)

_GRACE_S = 1.0
"""Wait for other outcomes after a worker raised: the error may be the consequence of another worker's failure."""
_SHUTDOWN_TIMEOUT_S = 10.0
_WRITING_TIMEOUT_S = 60.0
"""Timeout of a shutdown in which workers write traces."""
_RECORDING_TIMEOUT_S = 1800.0
"""Shortest timeout of starting a profiler and of writing traces."""
_CLOCK_TIMEOUT_S = 60.0
"""Shortest timeout of reading the clock of a worker."""
_LAST_WRITE_S = 10.0
"""After a failure, workers that record may finish their call and write traces for this long."""


Workers = LocalWorkers | RayWorkers


class ProcessGroup:
    """Processes that work in lock-step, with one worker each; the constructor starts them.

    Args:
        worker_class: importable by name in a new process.
        arguments: constructor arguments, the same on every rank.
        cluster: number of workers, where they run, their threads and timeouts.
        hosting: how the processes are set up.
    """

    def __init__(self, worker_class: type[Worker], arguments: Arguments, cluster: ClusterConfig, hosting: Hosting):
        self.is_recording = False
        """Whether workers record, and so may have traces to write when they exit."""
        self.size = cluster.num_workers
        self.pids: list[int] = []
        """Process ids of the workers, each on its machine; empty before `make_workers`."""
        self._ended: str | None = None
        self._worker_class, self._arguments, self._hosting = worker_class, arguments, hosting
        self._start_timeout_s, self._call_timeout_s = cluster.start_timeout_s, cluster.call_timeout_s
        self._logs = LogFolder(hosting.log_dir, hosting.log_name)
        start = start_on_ray if cluster.uses_ray else start_local
        try:
            self._workers: Workers = start(cluster, hosting, self._logs)
        except BaseException:
            self._logs.end(everything_went_well=False)
            raise
        atexit.register(self.shutdown)

    @property
    def blind_nodes(self) -> Sequence[str]:
        """Nodes that do not see the driver's log folder."""
        return list(dict.fromkeys(str(label.node) for label in self._workers.labels if not label.sees_logs))

    def make_workers(self) -> None:
        """Make the worker of every rank.

        Raises:
            WorkerError: if a rank does not start, or the group has ended. A `LucidError` of a worker keeps its type.
                All ranks are killed.
        """
        self._refuse_if_ended(START)
        try:
            messages = _messages(self._worker_class.__name__, self._worker_class, self._arguments)
            self.pids = self._run(START, [messages] * self.size, self._start_timeout_s)
        except BaseException:
            self._kill("did not start")
            raise

    def run(
        self, method: str, calls: Sequence[Arguments], timeout_s: float | None = None, phase: str | None = None
    ) -> list[Any]:
        """Call the method on every rank; arguments that are the same objects on several ranks are pickled once.

        Args:
            timeout_s: `cluster.call_timeout_s` by default.
            phase: how errors name the call; by default the method.

        Raises:
            WorkerError: if a rank raises, exits or times out, or the group has ended. A `LucidError` of a worker keeps
                its type. All ranks are killed.
            DataError: if the arguments cannot be pickled; the group stays usable.
        """
        phase = phase or method
        self._refuse_if_ended(phase)
        keys = [(id(call.kwargs), *map(id, call.args)) for call in calls]
        messages = {key: _messages(phase, method, call) for key, call in dict(zip(keys, calls, strict=True)).items()}
        return self._run(phase, [messages[key] for key in keys], timeout_s or self._call_timeout_s)

    def move_logs(self, folder: Path) -> None:
        """Let the only worker of the group, on this machine, write its log to `folder` from now on."""
        assert isinstance(self._workers, LocalWorkers)
        self._logs.end(everything_went_well=True)
        self._logs = LogFolder(folder, self._hosting.log_name)
        path = self._logs.of_worker(self._hosting.number(0))
        self._run("move_logs", [call_messages(redirect_output, (path,), {})], self._call_timeout_s)
        self._workers.follow_log(0, path)

    def check(self) -> None:
        """Liveness check: raise, as `run` does, if a rank has exited since the last call."""
        if not self._ended:
            self._attempt(IDLE, 0.0, lambda: dict(self._workers.dead()), num_expected=0)

    def start_gpu_profiling(self) -> None:
        """Call `start_gpu_profiling` of the workers, if the profile request selects any of them.

        First measure the clocks of the workers, so that their traces can be shown on the clock of this process. If the
        group ends before `stop_gpu_profiling`, the workers have some seconds to write their traces.
        """
        names = [self._hosting.profiled_name(rank) for rank in range(self.size)]
        if any(map(is_recorded, names)):
            self._refuse_if_ended("start_gpu_profiling")
            self.is_recording = True
            self._prepare_recording("start_gpu_profiling", names)
            self._run_recording("start_gpu_profiling")

    def stop_gpu_profiling(self) -> None:
        """Stop recording and write the traces; does nothing if no worker records."""
        if self.is_recording:
            self._run_recording("stop_gpu_profiling")
            self.is_recording = False

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Let the workers shut down; kill those that time out. May be called twice.

        If another thread waits for a call, the workers finish that call first.

        Args:
            timeout_s: 10 s by default; longer if workers have traces to write.
        """
        if self._ended:
            return
        self._ended = "was shut down"
        timeout_s = _SHUTDOWN_TIMEOUT_S if timeout_s is None else timeout_s
        try:
            codes = self._workers.shutdown(max(timeout_s, _WRITING_TIMEOUT_S) if self._may_write else timeout_s)
        finally:
            self._kill("was shut down")
        for rank, code in codes.items():
            if code != 0:
                label = self._workers.labels[rank]
                how = "timed out" if code is None else f"exited with code {code}"
                where = f"; its output is in {label.log_path}" if label.log_path is not None else ""
                _log.warning("%s %s in its shutdown%s", label.name, how, where)
        self._logs.end(everything_went_well=list(codes.values()) == [0] * self.size)

    def kill(self) -> None:
        """Kill the workers; a pending call of another thread raises WorkerError."""
        self._kill("was killed")

    def _prepare_recording(self, phase: str, names: Sequence[str]) -> None:
        """Set the traces folder of the workers, which may have started before it was known; measure their clocks."""
        folder, timeout_s = traces_folder(), max(self._call_timeout_s, _CLOCK_TIMEOUT_S)
        self._run(phase, [call_messages(set_traces_folder, (folder,), {})] * self.size, timeout_s)
        clocks = self._attempt(phase, timeout_s, lambda: self._workers.clocks(timeout_s), self.size)
        for name, pid, label, clock in zip(names, self.pids, self._workers.labels, clocks, strict=True):
            if is_recorded(name):
                write_clock(folder, name, pid, label.node, clock)

    def _run_recording(self, method: str) -> None:
        self.run(method, [Arguments()] * self.size, max(self._call_timeout_s, _RECORDING_TIMEOUT_S))

    def _refuse_if_ended(self, phase: str) -> None:
        if self._ended:
            raise WorkerError(f"{phase} cannot run: the worker group {self._ended}; start another one")

    def _run(self, phase: str, messages: Sequence[Sequence[Message]], timeout_s: float) -> list[Any]:
        return self._attempt(phase, timeout_s, lambda: self._exchange(messages, timeout_s), num_expected=self.size)

    def _attempt(
        self, phase: str, timeout_s: float, attempt: Callable[[], dict[int, Outcome]], num_expected: int
    ) -> list[Any]:
        """The values that ranks returned; unless exactly the expected number returned, kill all and raise."""
        try:
            with worker_clock.waiting():
                outcomes = attempt()
            self._note_times(outcomes)
            values = [outcome.value for _, outcome in sorted(outcomes.items()) if isinstance(outcome, Returned)]
            if len(values) == len(outcomes) == num_expected:
                return values
            failure = explain_failure(phase, timeout_s, outcomes, self._workers)
        except NodeLost as lost:
            failure = explain_loss(lost, phase, self._workers.labels)
        except BaseException:  # Ctrl-C for instance; the ranks are in the middle of a call
            self._abandon(f"was interrupted in {phase}")
            raise
        if self._ended:  # by another thread, which also kills the workers
            raise failure
        try:
            self._abandon(f"failed in {phase}")
        except Exception as error:  # for instance if Ray has exited; it must not hide the cause
            failure.add_note(f"then killing the workers failed: {type(error).__name__}: {error}")
        raise failure

    def _note_times(self, outcomes: Mapping[int, Outcome]) -> None:
        for rank, outcome in outcomes.items():
            if isinstance(outcome, Returned) and outcome.times is not None:
                worker_clock.add(self._hosting.profiled_name(rank), outcome.times)

    def _exchange(self, messages: Sequence[Sequence[Message]], timeout_s: float) -> dict[int, Outcome]:
        """Send the messages; returns the outcomes in order of arrival, without ranks that time out."""
        until = time.monotonic() + timeout_s
        self._workers.send(dict(enumerate(messages)))
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < self.size and (remaining_s := until - time.monotonic()) > 0:
            for number, reply in self._workers.poll(remaining_s):
                outcomes[number] = outcome = outcome_of(reply)
                if isinstance(outcome, Exited):
                    return outcomes
                if isinstance(outcome, Raised):
                    until = min(until, time.monotonic() + _GRACE_S)
        return outcomes

    @property
    def _may_write(self) -> bool:
        """Whether workers, or the profilers that wrap them, may have traces to write at exit."""
        return self.is_recording or any(label.wrapper for label in self._workers.labels)

    def _abandon(self, ended: str) -> None:
        """Kill the ranks after a failure; those that record may write their traces first."""
        try:
            if self._may_write:
                codes = self._workers.shutdown(_LAST_WRITE_S)
                if lost := [self._workers.labels[rank].name for rank, code in codes.items() if code is None]:
                    _log.warning(
                        "%s did not exit within %g s; of its traces, only *.spans.json was written",
                        ", ".join(lost),
                        _LAST_WRITE_S,
                    )
        finally:
            self._kill(ended)

    def _kill(self, ended: str) -> None:
        self._ended = self._ended or ended
        self.is_recording = False
        atexit.unregister(self.shutdown)
        self._workers.kill()
        self._logs.end(everything_went_well=False)


def _messages(what: str, method: Any, call: Arguments) -> list[Message]:
    try:
        return call_messages(method, call.args, call.kwargs)
    except Exception as error:  # pickle raises any error of the object's methods
        raise DataError(
            f"the arguments of {what} cannot be sent to the workers: {type(error).__name__}: {error}; "
            "pass objects that can be pickled, and functions and classes of a module instead of local ones"
        ) from error
