"""A worker process of a collector, as its driver holds it."""

from __future__ import annotations

import math
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from lucidrl.collectors.weights import SharedWeights
from lucidrl.collectors.worker_main import Command, WorkerSettings, serve
from lucidrl.distributed.child_process import ChildProcess
from lucidrl.distributed.launchers.messages import Message, receive, send
from lucidrl.distributed.launchers.rank_process import Died, Outcome, outcome_of


class WorkerProcess:
    """Started at once; see `Worker`.

    A thread of its own takes what the worker sends off both connections, as soon as it comes: the worker never waits
    for the driver, whatever that is busy with.

    Args:
        arguments: of the worker's collector, by cloudpickle: those that all workers share, and its own.
        send_timeout_s: how long a worker may leave a command unread for which there is no room on the way.
        on_reply, on_batch: called, in that thread, with what came over the connection; with `Died` when it ends.
    """

    excused_until = -math.inf
    cause_of_end: BaseException | None = None

    def __init__(
        self,
        settings: WorkerSettings,
        weights: SharedWeights,
        arguments: tuple[bytes, bytes],
        send_timeout_s: float,
        on_reply: Callable[[Outcome], None],
        on_batch: Callable[[Outcome], None],
    ):
        self.index = settings.index
        name = f"collector worker {self.index}"
        self._sending = threading.Lock()
        self._control, control = socket.socketpair()
        self._batches, batches = socket.socketpair()
        with control, batches:  # their only other holder is the process, so that the connections end with it
            self._process = ChildProcess(
                serve,
                (control, batches, settings, weights),
                name=name,
                start_method="forkserver",
                imports_main=False,
                preload=[serve.__module__],
            )
        reading = (Message.of(arguments), send_timeout_s, on_reply, on_batch)
        threading.Thread(target=self._read, args=reading, name=name, daemon=True).start()

    def send(self, command: Command) -> None:
        with self._sending:
            send(self._control, Message.of(command))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.has_ended

    def where(self) -> str:
        return ""

    def end(self) -> None:
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def join(self, timeout_s: float) -> int | None:
        """Wait for the process to end; its exit code, or None if it is still there."""
        return self._process.join(timeout_s)

    def kill(self) -> None:
        """End the process now, and every wait for it; may be called twice."""
        self._process.kill()
        for connection in (self._control, self._batches):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # a process that it started may hold the other end

    def reap(self) -> None:
        """Leave no zombie after `kill`."""
        self._process.reap()

    def how_it_ended(self) -> str:
        """For a process that is about to end or has ended: a verb with its cause."""
        return self._process.how_it_ended()

    def _read(
        self,
        arguments: Message,
        send_timeout_s: float,
        on_reply: Callable[[Outcome], None],
        on_batch: Callable[[Outcome], None],
    ) -> None:
        # To leave closes them; it is this thread that reads, so nobody else may.
        with suppress(EOFError, OSError), self._control, self._batches, selectors.DefaultSelector() as connections:
            connections.register(self._control, selectors.EVENT_READ, on_reply)
            connections.register(self._batches, selectors.EVENT_READ, on_batch)
            send(self._control, arguments)
            _limit_sends(self._control, send_timeout_s)
            while True:
                for key, _ in connections.select():
                    assert isinstance(key.fileobj, socket.socket)
                    key.data(outcome_of(receive(key.fileobj)))
        on_reply(Died())
        on_batch(Died())


def _limit_sends(connection: socket.socket, timeout_s: float) -> None:
    """Unlike `settimeout`, it leaves reading alone, which another thread does."""
    if math.isinf(timeout_s):
        return
    seconds, microseconds = divmod(round(timeout_s * 1e6), 1_000_000)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", seconds, microseconds))
