"""The spans of this process as a Chrome trace, written continuously."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from lucidrl.profiling.spans import Span, recorder
from lucidrl.profiling.trace_files import KEY, ProcessName

_log = logging.getLogger(__name__)

DRAIN_INTERVAL_S = 0.1
"""A killed process loses the spans of about this time."""
_END = b"\n]\n"
_CAPACITY = 200_000
"""Most spans between two writes; older ones are dropped."""


class SpanFile:
    """Writes the finished spans of this process until it is closed; one per process at a time.

    The file is a Chrome trace in array form, valid at any moment; its clock is Unix time in microseconds. If a write
    fails, it logs a warning and drops all later spans.

    Raises:
        OSError: if the file cannot be made.
    """

    def __init__(self, path: Path, process: ProcessName):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._process = path, process
        self._file = path.open("xb", buffering=0)  # a kill of the process loses nothing that was written
        self._can_write, self._size_bytes = True, 0
        name = {"ph": "M", "name": "process_name", "pid": os.getpid(), "args": {"name": process.name}}
        metadata = {"ph": "M", "name": KEY, "pid": os.getpid(), "args": process.described()}
        self._write(b"[\n" + orjson.dumps(name) + b",\n" + orjson.dumps(metadata))
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
        self._write_spans()
        recorder.keep_spans(0)
        self._file.close()

    def _write_until_over(self) -> None:
        while not self._is_over.wait(DRAIN_INTERVAL_S):
            self._write_spans()

    def _write_spans(self) -> None:
        if spans := recorder.take_spans():
            self._write(b"".join(b",\n" + orjson.dumps(_event(span)) for span in spans))

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


def _event(span: Span) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "span",
        "name": span.name,
        "pid": os.getpid(),
        "tid": span.thread,
        "ts": span.start_ns / 1000,
        "dur": span.duration_ns / 1000,
    }
