"""Worker processes that are called together: what their driver does, wherever they run.

Every wait has a timeout. When a worker fails in any way, all are killed: others may wait for it in a collective, and
what they hold is of no use without it.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Sequence
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
from lucidrl.utils.nsys import is_recorded

_log = logging.getLogger(__name__)

_GRACE_S = 1.0
"""After a worker raised, the others have this long to answer too: the first error may be a consequence of another."""
_SHUTDOWN_DEADLINE_S = 10.0
_WRITING_DEADLINE_S = 60.0
"""Of a shutdown in which workers write what they recorded."""
_RECORDING_TIMEOUT_S = 1800.0
"""Of the start of a profiler and of the writing of traces: timeouts that suit the work do not suit these."""
_LAST_WRITE_S = 10.0
"""After a failure, workers that record have this long to finish their call and to write; a stuck one cannot."""


Workers = LocalWorkers | RayWorkers


class ProcessGroup:
    """Processes of this machine or of Ray nodes that work in lock-step, each with a worker; they start at once.

    Args:
        worker_class: importable by name in a new process.
        arguments: of its constructor, the same on every rank.
        cluster: how many there are, where they run, their threads and timeouts.
        hosting: how the processes are set up.
    """

    def __init__(self, worker_class: type[Worker], arguments: Arguments, cluster: ClusterConfig, hosting: Hosting):
        self.is_recording = False
        """Whether workers record a profile, and so may have something to write when they end."""
        self.size = cluster.num_workers
        self.pids: list[int] = []
        """Process ids of the workers, once they are made; each on its machine."""
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
        """Nodes with workers that do not see the folder of the logs."""
        return list(dict.fromkeys(str(label.node) for label in self._workers.labels if not label.sees_logs))

    def make_workers(self) -> None:
        """Make the worker of every rank.

        Raises:
            WorkerError: if a rank does not start, or the group was ended before; an error of ours that a worker raises
                is raised as it is. All ranks have ended then.
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
        """Call the method on every rank; arguments that several ranks share are pickled once.

        Args:
            timeout_s: `cluster.call_timeout_s` by default.
            phase: what errors call it; by default the method.

        Raises:
            WorkerError: if a rank raises, dies or misses the deadline, or the group has ended before; an error of ours
                that a worker raises is raised as it is. All ranks have ended then.
            DataError: if the arguments cannot be pickled; nothing has happened then.
        """
        phase = phase or method
        self._refuse_if_ended(phase)
        keys = [(id(call.kwargs), *map(id, call.args)) for call in calls]
        messages = {key: _messages(phase, method, call) for key, call in dict(zip(keys, calls, strict=True)).items()}
        return self._run(phase, [messages[key] for key in keys], timeout_s or self._call_timeout_s)

    def move_logs(self, folder: Path) -> None:
        """Let a single worker of this machine write its log to another folder from now on."""
        assert isinstance(self._workers, LocalWorkers)
        self._logs.end(everything_went_well=True)
        self._logs = LogFolder(folder, self._hosting.log_name)
        path = self._logs.of_worker(self._hosting.number(0))
        self._run("move_logs", [call_messages(redirect_output, (path,), {})], self._call_timeout_s)
        self._workers.follow_log(0, path)

    def check(self) -> None:
        """Raise, as `run` does, if a rank has died since the last call; it may be that nobody calls for long."""
        if not self._ended:
            self._attempt(IDLE, 0.0, lambda: dict(self._workers.dead()), num_expected=0)

    def start_gpu_profiling(self) -> None:
        """Let the workers record that are asked to, by their methods of this name.

        If the group ends meanwhile, however it does, they have a moment to write what they recorded.
        """
        if any(is_recorded(self._hosting.profiled_name(rank)) for rank in range(self.size)):
            self.is_recording = True
            self._run_recording("start_gpu_profiling")

    def stop_gpu_profiling(self) -> None:
        """Let them write what they recorded; harmless if they do not record, or have ended."""
        if self.is_recording:
            self._run_recording("stop_gpu_profiling")
            self.is_recording = False

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Let the workers shut down; those that take too long are killed. May be called twice.

        It may be called while another thread is in a call, which the worker finishes first if the timeout allows.

        Args:
            timeout_s: longest wait, 10 s by default; longer if workers have a profile to write.
        """
        if self._ended:
            return
        self._ended = "was shut down"
        timeout_s = _SHUTDOWN_DEADLINE_S if timeout_s is None else timeout_s
        try:
            codes = self._workers.let_end(max(timeout_s, _WRITING_DEADLINE_S) if self._may_write else timeout_s)
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
        """End the workers in the middle of whatever they do; a call of another thread fails then."""
        self._kill("was ended")

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
        """What ranks returned, if it is as many as expected and no rank did anything else; else all are ended."""
        try:
            outcomes = attempt()
            values = [outcome.value for _, outcome in sorted(outcomes.items()) if isinstance(outcome, Returned)]
            if len(values) == len(outcomes) == num_expected:
                return values
            failure = explain_failure(phase, timeout_s, outcomes, self._workers)
        except NodeLost as lost:
            failure = explain_loss(lost, phase, self._workers.labels)
        except BaseException:  # Ctrl-C for instance; the ranks are in the middle of something
            self._abandon(f"was interrupted in {phase}")
            raise
        if self._ended:  # by another thread, which also ends the workers
            raise failure
        try:
            self._abandon(f"failed in {phase}")
        except Exception as error:  # for instance of a Ray that is gone; it must not take the place of the cause
            failure.add_note(f"then not everything could be ended in order: {type(error).__name__}: {error}")
        raise failure

    def _exchange(self, messages: Sequence[Sequence[Message]], timeout_s: float) -> dict[int, Outcome]:
        """What came of the messages, in order of arrival; ranks without an answer in time are missing."""
        until = time.monotonic() + timeout_s
        self._workers.send(dict(enumerate(messages)))
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < self.size and (remaining_s := until - time.monotonic()) > 0:
            for number, answer in self._workers.poll(remaining_s):
                outcomes[number] = outcome = outcome_of(answer)
                if isinstance(outcome, Exited):
                    return outcomes
                if isinstance(outcome, Raised):
                    until = min(until, time.monotonic() + _GRACE_S)
        return outcomes

    @property
    def _may_write(self) -> bool:
        """Whether something is recorded; what wraps a rank writes its report when that has ended."""
        return self.is_recording or any(label.wrapper for label in self._workers.labels)

    def _abandon(self, ended: str) -> None:
        """End ranks that are of no use any more; they may write what they recorded first."""
        try:
            if self._may_write:
                codes = self._workers.let_end(_LAST_WRITE_S)
                if lost := [self._workers.labels[rank].name for rank, code in codes.items() if code is None]:
                    _log.warning(
                        "%s did not end within %g s; what was recorded there, beside spans, is lost",
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
    except Exception as error:  # pickle raises whatever the object's own methods raise
        raise DataError(
            f"the arguments of {what} cannot be sent to the workers: {type(error).__name__}: {error}; "
            "pass objects that can be pickled, and functions and classes of a module instead of local ones"
        ) from error
