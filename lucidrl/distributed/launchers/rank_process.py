"""A rank's process as its driver holds it."""

from __future__ import annotations

import signal
import socket
from contextlib import suppress
from dataclasses import dataclass

import psutil

from lucidrl.distributed.child_main import Raised
from lucidrl.distributed.child_process import ChildProcess
from lucidrl.distributed.launchers.messages import Message, receive, send
from lucidrl.distributed.launchers.rank_log import RankLog
from lucidrl.distributed.launchers.rank_main import RankSettings, Returned, serve


@dataclass(frozen=True)
class Died:
    """The process ended before it answered."""

    how: str = "ended"
    """A verb with the cause."""


Outcome = Returned | Raised | Died


def outcome_of(answer: Message | Died) -> Outcome:
    """What an answer says."""
    if isinstance(answer, Died):
        return answer
    try:
        return answer.content()
    except Exception as error:
        return Raised(f"its result cannot be read here: {type(error).__name__}: {error}", "", None)


class RankProcess(ChildProcess):
    """Started at once; it listens as soon as it has imported what it needs."""

    def __init__(self, settings: RankSettings):
        self.rank, self.role = settings.rank, settings.role
        self.name = f"{settings.role} {settings.part.first + settings.rank}"
        """What errors call it."""
        self.log = RankLog(settings.log_path)
        self._connection, theirs = socket.socketpair()
        with theirs:  # its only other holder is the process, so that the connection ends with it
            super().__init__(serve, (theirs, settings), name=self.name, wrapper=settings.wrapper)
        self._worker = None if self.is_wrapped else psutil.Process(self.pid)

    def meet(self, pid: int) -> None:
        """Learn which process is the worker's own, since another program may run it; what started that is not needed
        any more."""
        self.remove_wrapper()
        with suppress(psutil.NoSuchProcess):
            self._worker = psutil.Process(pid)

    def exchange(self, message: Message) -> Message | None:
        """Send the message and wait for the answer, without a deadline: `kill` ends the wait. None if it died."""
        try:
            send(self._connection, message)
            return receive(self._connection)
        except (EOFError, OSError):
            return None

    def ask_for_stack(self) -> int:
        """Make the process write where it is into its log; returns the log's size before that."""
        size_bytes = self.log.size_bytes()
        if self._worker is not None:
            with suppress(psutil.NoSuchProcess):
                self._worker.send_signal(signal.SIGUSR1)
        return size_bytes

    def end(self) -> None:
        """Ask the worker to shut down and leave; does not wait."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """End the process now, and every wait for it; may be called twice."""
        super().kill()
        if self._worker is not None:  # what ran it may have ended before
            with suppress(psutil.NoSuchProcess):
                self._worker.kill()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # a process that it started may hold the other end

    def reap(self) -> None:
        """Leave nothing behind after `kill`."""
        super().reap()
        self._connection.close()
