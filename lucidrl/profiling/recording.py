"""Records one process for some time: its spans, written continuously, and torch's operators.

Errors of a recording never stop the process.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import psutil
import torch

from lucidrl.profiling.clock import now_ns
from lucidrl.profiling.hook import started_profiler
from lucidrl.profiling.settings import KEY, traces_folder, wants_memory_snapshot
from lucidrl.profiling.spans import Count, Span, is_under_nsys, recorder
from lucidrl.profiling.trace_files import ProcessName, write_trace

_log = logging.getLogger(__name__)

DRAIN_INTERVAL_S = 0.1
"""Seconds between two writes of spans; a killed process loses the spans since the last write."""
_SAMPLE_INTERVAL_S = 0.5
"""Seconds between two readings of the memory and CPU use of this process."""
_END = b"\n]\n"
_CAPACITY = 200_000
"""Most spans between two writes; older ones are dropped."""
_turn = threading.Lock()
"""Held by the running recording of this process."""


class Recording:
    """Records this process between `start` and `stop`, as files in the traces folder.

    `<name>_<host>_<pid>_<time>.spans.json` holds the spans and is written as they end. `stop` writes `….json`, the
    trace of torch's profiler for the thread that called `start`; there is no such file under Nsight Systems, which
    records the GPU itself. `….memory.pickle` is a snapshot of the GPU's memory, if requested.

    While one recording of the process runs, starting another does nothing. Errors are logged; they never stop the
    process.

    Args:
        name: name of the process in the trace.
        operators: record torch's operators in addition to the spans.
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
        parts = ExitStack()  # closed in reverse order: the most expensive recorder runs shortest
        parts.callback(_turn.release)
        self._parts, self._pid = parts, os.getpid()  # first: Ctrl-C may interrupt at any moment
        atexit.register(self.stop)
        operators = f"{stem}.json" if self._operators and not is_under_nsys() else None
        self._begin(parts, "spans", lambda: SpanFile(folder / f"{stem}.spans.json", process, operators).close)
        if self._operators and wants_memory_snapshot():
            self._begin(parts, "memory", lambda: _memory(folder / f"{stem}.memory.pickle"))
        if self._operators and is_under_nsys():
            self._begin(parts, "GPU work", _nsys_range)
        elif self._operators:
            self._begin(parts, "operators", lambda: _operator_trace(folder / f"{stem}.json", process))

    def stop(self) -> None:
        """Write the recording and stop."""
        # Release the parts first: the profiler holds much memory, and a failed stop would fail again.
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
        profiler.stop()  # always: otherwise the process crashes when it exits
        if threading.get_ident() != thread:  # exporting the trace would crash the process
            raise RuntimeError("only the thread that started the recording can stop it")
        write_trace(profiler, path, process)
        _log.info("the trace of %s is in %s", process.name, path)

    return end


class SpanFile:
    """Writes the finished spans of this process until it is closed; one per process at a time.

    The file is a Chrome trace in array form, valid at any moment; its clock is Unix time in microseconds. If a write
    fails, it logs a warning and drops all later spans. The last event, `ended`, is missing if the process was killed
    or a write failed.

    Args:
        operators: name of the operator trace that belongs to these spans, if the recording writes one.

    Raises:
        OSError: if the file cannot be created.
    """

    def __init__(self, path: Path, process: ProcessName, operators: str | None = None):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._process = path, process
        self._file = path.open("xb", buffering=0)  # a kill of the process loses nothing that was written
        self._can_write, self._size_bytes = True, 0
        name = _metadata("process_name", name=process.name)
        description = _metadata(KEY, **process.described(), operators=operators)
        self._write(b"[\n" + orjson.dumps(name) + b",\n" + orjson.dumps(description))
        self._named_threads: set[int] = set()
        self._usage = psutil.Process()
        self._usage.cpu_percent()  # the first call has no interval to measure
        self._next_sample_s = time.monotonic() + _SAMPLE_INTERVAL_S
        recorder.keep_spans(_CAPACITY)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._write_until_over, name="span-file", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the rest and complete the file; may be called twice."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        self._thread.join()
        self._next_sample_s = 0.0
        self._write_spans()
        recorder.keep_spans(0)
        self._write(b",\n" + orjson.dumps(_metadata("ended", unix_time_ns=now_ns())))
        self._file.close()

    def _write_until_over(self) -> None:
        while not self._is_over.wait(DRAIN_INTERVAL_S):
            self._write_spans()

    def _write_spans(self) -> None:
        self._sample_usage()
        events: list[dict[str, Any]] = []
        for taken in recorder.take_spans():
            if isinstance(taken, Span) and taken.thread not in self._named_threads:
                self._named_threads.add(taken.thread)
                events.append({**_metadata("thread_name", name=taken.thread_name), "tid": taken.thread})
            events.append(_event(taken))
        if events:
            self._write(b"".join(b",\n" + orjson.dumps(event) for event in events))

    def _sample_usage(self) -> None:
        """Count the memory and the CPU use of this process, if they are due."""
        if time.monotonic() < self._next_sample_s:
            return
        self._next_sample_s = time.monotonic() + _SAMPLE_INTERVAL_S
        with suppress(psutil.Error, OSError):
            recorder.count("memory of the process (MB)", round(self._usage.memory_info().rss / 1e6, 1))
            recorder.count("CPU of the process (%)", self._usage.cpu_percent())

    def _write(self, content: bytes) -> None:
        """Overwrite the end of the file with `content` and a new end, in one call: the file stays valid."""
        if not self._can_write:
            return
        try:
            if os.pwrite(self._file.fileno(), content + _END, self._size_bytes) < len(content + _END):
                raise OSError("no space left")
            self._size_bytes += len(content)
        except OSError as error:
            self._can_write = False
            with suppress(OSError):  # remove the part that was written
                os.ftruncate(self._file.fileno(), self._size_bytes)
                os.pwrite(self._file.fileno(), _END, self._size_bytes)
            name = self._process.name
            _log.warning("all further spans of %s are lost: %s cannot be written (%s)", name, self._path, error)


def _metadata(what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": os.getpid(), "args": args}


def _event(span: Span | Count) -> dict[str, Any]:
    if isinstance(span, Count):
        counted = {"ph": "C", "name": span.name, "pid": os.getpid(), "ts": span.time_ns / 1000}
        return {**counted, "args": {"value": span.value}}
    return {
        "ph": "X",
        "cat": "span",
        "name": span.name,
        "pid": os.getpid(),
        "tid": span.thread,
        "ts": span.start_ns / 1000,
        "dur": span.duration_ns / 1000,
    }
