"""One worker in this process: calls are plain method calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lucidrl.distributed.launchers.interfaces import Arguments, Worker
from lucidrl.errors import WorkerError


class InProcess:
    """A single rank; what it raises is raised as it is, and it is not interrupted at a deadline."""

    size = 1
    blind_nodes: Sequence[str] = ()

    def __init__(self, worker_class: type[Worker], arguments: Arguments):
        self.is_recording = False
        self._worker_class, self._arguments = worker_class, arguments
        self._worker: Worker | None = None

    def make_workers(self) -> None:
        self._worker = self._worker_class(*self._arguments.args, **self._arguments.kwargs)

    def run(self, method: str, calls: Sequence[Arguments], timeout_s: float) -> list[Any]:
        if self._worker is None:
            raise WorkerError(f"{method} was called after shutdown; start another worker group")
        (call,) = calls
        return [getattr(self._worker, method)(*call.args, **call.kwargs)]

    def check(self) -> None:
        """It is a part of this process."""

    def shutdown(self) -> None:
        worker, self._worker, self.is_recording = self._worker, None, False
        if worker is not None:
            worker.shutdown()

    def kill(self) -> None:
        self.shutdown()  # what it does cannot be interrupted
