"""Workers in processes of their own: what their driver does, wherever the processes are.

Every wait has a deadline. When a rank fails in any way, all are killed: others may wait for it in a collective, and
what they hold is of no use without it.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lucidrl.distributed.child_main import Raised
from lucidrl.distributed.launchers.failures import IDLE, START, explain_failure, explain_loss
from lucidrl.distributed.launchers.interfaces import Arguments, NodeLost, Ranks, Worker
from lucidrl.distributed.launchers.log_folder import LogFolder
from lucidrl.distributed.launchers.messages import Message
from lucidrl.distributed.launchers.rank_main import Returned
from lucidrl.distributed.launchers.rank_process import Died, Outcome, outcome_of
from lucidrl.errors import DataError, WorkerError

_log = logging.getLogger(__name__)

_GRACE_S = 1.0
"""After a rank raised, the others have this long to answer too: the one that raised first may only be a witness."""
_SHUTDOWN_DEADLINE_S = 10.0
_WRITING_DEADLINE_S = 60.0
"""Of a shutdown in which ranks write what they recorded."""
_LAST_WORDS_S = 10.0
"""After a failure, ranks that record have this long to end what they do and to write; a stuck one does not."""


class ProcessLauncher:
    """Starts processes, makes a worker in each, and calls its methods.

    Args:
        start_ranks: starts the processes, which are ended with the group.
        log_dir: where they write `rank_N.log`; by default a temporary folder, kept only if something goes wrong.
        worker_class: importable by name in a new process.
        arguments: of its constructor, the same on every rank.
        start_timeout_s: deadline of `make_workers`.
    """

    def __init__(
        self,
        start_ranks: Callable[[LogFolder], Ranks],
        log_dir: Path | None,
        worker_class: type[Worker],
        arguments: Arguments,
        start_timeout_s: float,
    ):
        self.is_recording = False
        self._ended: str | None = None
        self._worker_class, self._arguments, self._start_timeout_s = worker_class, arguments, start_timeout_s
        self._logs = LogFolder(log_dir)
        try:
            self._ranks = start_ranks(self._logs)
        except BaseException:
            self._logs.end(everything_went_well=False)
            raise
        self.size = len(self._ranks.labels)
        atexit.register(self.shutdown)

    @property
    def blind_nodes(self) -> Sequence[str]:
        """Nodes with workers that do not see the folder of the logs."""
        return list(dict.fromkeys(str(label.node) for label in self._ranks.labels if not label.sees_logs))

    def make_workers(self) -> None:
        """Make the worker of every rank.

        Raises:
            WorkerError: if a rank does not start, or the group was ended before; an error of ours that a worker raises
                is raised as it is. All ranks have ended then.
        """
        self._refuse_if_ended(START)
        try:
            message = _message(self._worker_class.__name__, (self._worker_class, self._arguments))
            self._ranks.meet(self._run(START, [message] * self.size, self._start_timeout_s))
        except BaseException:
            self._kill("did not start")
            raise

    def run(self, method: str, calls: Sequence[Arguments], timeout_s: float) -> list[Any]:
        """Call the method on every rank; arguments that several ranks share are pickled once.

        Raises:
            WorkerError: if a rank raises, dies or misses the deadline, or the group has ended before; an error of ours
                that a worker raises is raised as it is. All ranks have ended then.
            DataError: if the arguments cannot be pickled; nothing has happened then.
        """
        self._refuse_if_ended(method)
        keys = [(id(call.kwargs), *map(id, call.args)) for call in calls]
        messages = {key: _message(method, (method, call)) for key, call in dict(zip(keys, calls, strict=True)).items()}
        return self._run(method, [messages[key] for key in keys], timeout_s)

    def check(self) -> None:
        """Raise, as `run` does, if a rank has died since the last call; it may be that nobody calls for long."""
        if not self._ended:
            self._attempt(IDLE, 0.0, lambda: dict(self._ranks.dead()), num_expected=0)

    def shutdown(self) -> None:
        """Let the workers shut down; those that take too long are killed. May be called twice."""
        if self._ended:
            return
        try:
            codes = self._ranks.let_end(_WRITING_DEADLINE_S if self._may_write else _SHUTDOWN_DEADLINE_S)
        finally:
            self._kill("was shut down")
        for rank, code in codes.items():
            if code != 0:
                label = self._ranks.labels[rank]
                how = "took too long" if code is None else f"ended with exit code {code}"
                _log.warning("%s %s in its shutdown; its output is in %s", label.name, how, label.log_path)
        self._logs.end(everything_went_well=list(codes.values()) == [0] * self.size)

    def kill(self) -> None:
        """End the workers in the middle of whatever they do; a call of another thread fails then."""
        self._kill("was ended")

    def _refuse_if_ended(self, phase: str) -> None:
        if self._ended:
            raise WorkerError(f"{phase} cannot run: the worker group {self._ended}; start another one")

    def _run(self, phase: str, messages: Sequence[Message], timeout_s: float) -> list[Any]:
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
            failure = explain_failure(phase, timeout_s, outcomes, self._ranks)
        except NodeLost as lost:
            failure = explain_loss(lost, phase, self._ranks.labels)
        except BaseException:  # Ctrl-C for instance; the ranks are in the middle of something
            self._abandon(f"was interrupted in {phase}")
            raise
        try:
            self._abandon(f"failed in {phase}")
        except Exception as error:  # for instance of a Ray that is gone; it must not take the place of the cause
            failure.add_note(f"then not everything could be ended in order: {type(error).__name__}: {error}")
        raise failure

    def _exchange(self, messages: Sequence[Message], timeout_s: float) -> dict[int, Outcome]:
        """What came of the messages, in order of arrival; ranks without an answer in time are missing."""
        until = time.monotonic() + timeout_s
        self._ranks.send(dict(enumerate(messages)))
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < self.size and (remaining_s := until - time.monotonic()) > 0:
            for number, answer in self._ranks.poll(remaining_s):
                outcomes[number] = outcome = outcome_of(answer)
                if isinstance(outcome, Died):
                    return outcomes
                if isinstance(outcome, Raised):
                    until = min(until, time.monotonic() + _GRACE_S)
        return outcomes

    @property
    def _may_write(self) -> bool:
        """Whether something is recorded; what wraps a rank writes its report when that has ended."""
        return self.is_recording or any(label.wrapper for label in self._ranks.labels)

    def _abandon(self, ended: str) -> None:
        """End ranks that are of no use any more; they may write what they recorded first."""
        try:
            if self._may_write:
                codes = self._ranks.let_end(_LAST_WORDS_S)
                if lost := [self._ranks.labels[rank].name for rank, code in codes.items() if code is None]:
                    _log.warning(
                        "%s did not end within %g s; what was recorded there, beside spans, is lost",
                        ", ".join(lost),
                        _LAST_WORDS_S,
                    )
        finally:
            self._kill(ended)

    def _kill(self, ended: str) -> None:
        self._ended = self._ended or ended
        self.is_recording = False
        atexit.unregister(self.shutdown)
        self._ranks.kill()
        self._logs.end(everything_went_well=False)


def _message(what: str, content: Any) -> Message:
    try:
        return Message.of(content)
    except Exception as error:  # pickle raises whatever the object's own methods raise
        raise DataError(
            f"the arguments of {what} cannot be sent to the workers: {type(error).__name__}: {error}; "
            "pass objects that can be pickled, and functions and classes of a module instead of local ones"
        ) from error
