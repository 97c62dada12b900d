"""Records one process for a while; errors never stop the process."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import torch

from lucidrl.profiling.hook import started_profiler
from lucidrl.profiling.settings import traces_folder, wants_memory_snapshot
from lucidrl.profiling.span_file import SpanFile
from lucidrl.profiling.spans import is_under_nsys
from lucidrl.profiling.trace_files import ProcessName, write_trace

_log = logging.getLogger(__name__)

_turn = threading.Lock()
"""Held by the running recording of this process."""


class Recording:
    """Records this process between `start` and `stop`, as files in the traces folder.

    `<name>_<host>_<pid>_<time>.spans.json` holds the spans and is written as they end. `stop` writes `….json`, torch's
    trace of the starting thread; under Nsight Systems, that records the GPU instead. `….memory.pickle` is a snapshot of
    the GPU's memory, if requested.

    While one recording of the process runs, starting another does nothing. Errors are logged; they never stop the
    process.

    Args:
        name: name of the process in the trace.
        operators: record torch's operators too, beside the spans.
    """

    def __init__(self, name: str, *, operators: bool = True):
        self.name = name
        self._operators = operators
        self._parts: ExitStack | None = None
        self._pid = 0

    def start(self) -> None:
        """Start recording; the same thread has to stop it."""
        if not _turn.acquire(blocking=False):
            return
        process = ProcessName(self.name)
        stem = f"{self.name}_{socket.gethostname()}_{os.getpid()}_{datetime.now(UTC):%Y%m%dT%H%M%S_%f}"
        folder = traces_folder()
        parts = ExitStack()  # closed in reverse order: the most expensive part records shortest
        parts.callback(_turn.release)
        self._parts, self._pid = parts, os.getpid()  # first: Ctrl-C may interrupt at any moment
        atexit.register(self.stop)
        self._begin(parts, "spans", lambda: _spans(folder / f"{stem}.spans.json", process))
        if self._operators and wants_memory_snapshot():
            self._begin(parts, "memory", lambda: _memory(folder / f"{stem}.memory.pickle"))
        if self._operators and is_under_nsys():
            self._begin(parts, "GPU work", _nsys_range)
        elif self._operators:
            self._begin(parts, "operators", lambda: _operator_trace(folder / f"{stem}.json", process))

    def stop(self) -> None:
        """Write the recording and stop."""
        # Released first: the profiler holds much memory, and if it fails to stop it would fail again.
        parts, self._parts = self._parts, None
        if parts is None or self._pid != os.getpid():  # a fork does not own its parent's recording
            return
        atexit.unregister(self.stop)
        parts.close()

    def _begin(self, parts: ExitStack, part: str, begin: Callable[[], Callable[[], object]]) -> None:
        """Start a part of the recording; `begin` returns the function that ends it. Errors of both are logged."""

        def attempt(step: Callable[[], object]) -> object:
            try:
                return step()
            except Exception as error:  # profiling must not stop the run
                _log.warning("the traces of %s have no %s: %s", self.name, part, str(error) or type(error).__name__)
                return None

        end = attempt(begin)
        if callable(end):
            parts.callback(attempt, end)


def _new_turn() -> None:
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_new_turn)


def _spans(path: Path, process: ProcessName) -> Callable[[], None]:
    return SpanFile(path, process).close


def _nsys_range() -> Callable[[], object]:
    """The range that Nsight Systems captures, with `--capture-range=cudaProfilerApi`."""
    torch.cuda.profiler.start()
    return torch.cuda.profiler.stop


def _memory(path: Path) -> Callable[[], None]:
    if not torch.cuda.is_available():
        raise RuntimeError("a memory snapshot needs a GPU, and there is none")
    torch.cuda.memory._record_memory_history()

    def end() -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    return end


def _operator_trace(path: Path, process: ProcessName) -> Callable[[], None]:
    profiler = started_profiler()
    thread = threading.get_ident()

    def end() -> None:
        profiler.stop()  # always: else the process crashes at its end
        if threading.get_ident() != thread:  # exporting the trace would crash the process
            raise RuntimeError("only the thread that started the recording can stop it")
        write_trace(profiler, path, process)
        _log.info("the trace of %s is in %s", process.name, path)

    return end
