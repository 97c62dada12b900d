"""A rank's process as its driver holds it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from lucidrl.distributed.launchers.messages import Message, receive, send
from lucidrl.distributed.launchers.rank_log import RankLog
from lucidrl.distributed.launchers.rank_main import Raised, RankSettings, Returned, serve

_REAP_DEADLINE_S = 5.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Died:
    """The process ended before it answered."""


Outcome = Returned | Raised | Died


class RankProcess:
    """Started at once; it listens as soon as it has imported what it needs."""

    def __init__(self, settings: RankSettings):
        self.rank, self.role = settings.rank, settings.role
        self.name = f"{settings.role} {settings.rank}"
        """What errors call it."""
        self.log = RankLog(settings.log_path)
        self._connection, theirs = socket.socketpair()
        # Not a daemon in the sense of multiprocessing: those may not start processes, as data loaders do.
        self._process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, settings), name=self.name, daemon=False
        )
        with theirs:  # its only other holder is the process, so that the connection ends with it
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.exitcode is not None

    def exchange(self, message: Message) -> Outcome:
        """Send the message and wait for the answer, without a deadline: `kill` ends the wait."""
        try:
            send(self._connection, message)
            answer = receive(self._connection)
        except (EOFError, OSError):
            return Died()
        try:
            return answer.content()
        except Exception as error:
            return Raised(f"its result cannot be read here: {type(error).__name__}: {error}", "", None)

    def ask_for_stack(self) -> int:
        """Make the process write where it is into its log; returns the log's size before that."""
        size_bytes = self.log.size_bytes()
        with suppress(ProcessLookupError):
            if not self.has_ended:
                os.kill(self.pid, signal.SIGUSR1)
        return size_bytes

    def end(self) -> None:
        """Ask the worker to shut down and leave; does not wait."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def join(self, timeout_s: float) -> int | None:
        """Wait for the process to end; its exit code, or None if it is still there."""
        until = time.monotonic() + timeout_s
        # In short waits: multiprocessing waits for the end of a pipe, which a process that it started may hold open.
        while not self.has_ended and (remaining_s := until - time.monotonic()) > 0:
            self._process.join(min(remaining_s, _POLL_S))
        return self._process.exitcode

    def kill(self) -> None:
        """End the process now, and every wait for it; may be called twice."""
        self._process.kill()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # a process that it started may hold the other end

    def reap(self) -> None:
        """Leave no zombie after `kill`."""
        self.join(_REAP_DEADLINE_S)
        self._connection.close()

    def how_it_ended(self) -> str:
        """For a process that is about to end or has ended: a verb with its cause."""
        code = self.join(_REAP_DEADLINE_S)
        if code is None:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        return f"was ended by {name}" + (", perhaps for lack of memory," if -code == signal.SIGKILL else "")
