"""Files with traces of torch's profiler, labelled with process and time."""

from __future__ import annotations

import gzip
import os
import re
import socket
import string
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from torch.profiler import profile

from lucidrl.errors import ConfigError
from lucidrl.profiling.clock import measured_offset, now_ns
from lucidrl.profiling.settings import KEY

PLACEHOLDERS = ("worker_idx", "pid", "host")
"""Placeholders in the path of a trace."""

_EVENTS = b'"traceEvents": ['
_BASE_TIME = re.compile(rb'"baseTimeNanoseconds": (\d+)')


@dataclass(frozen=True)
class ProcessName:
    """The process of a trace."""

    name: str
    """Such as "collector worker 0"."""
    started_ns: int = field(default_factory=now_ns)
    """Unix time at which the recording began, in nanoseconds, on the clock of the spans."""
    system_offset_ns: int = field(default_factory=lambda: measured_offset(time.time_ns).offset_ns)
    """How far the system clock, which torch's profiler uses, is ahead of the clock of the spans: not 0 if it changed
    after the start of the process."""

    def described(self, base_time_ns: int | None = None) -> dict[str, Any]:
        """Metadata for a trace of torch's profiler, which counts microseconds of the system clock from `base_time_ns`,
        or for a file of spans.

        The key `anchor` holds the start of the recording twice: as Unix time of the clock of the spans, and as a time
        stamp of the trace.
        """
        ts_ns = self.started_ns if base_time_ns is None else self.started_ns + self.system_offset_ns - base_time_ns
        return {
            "process": self.name,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "anchor": {"unix_time_ns": self.started_ns, "ts_us": ts_ns / 1000},
        }


def check_template(template: str) -> set[str]:
    """The placeholders in the path of a trace; ConfigError for an unknown placeholder."""
    try:
        fields = [(field, spec, conversion) for _, field, spec, conversion in string.Formatter().parse(template)]
    except ValueError as error:
        raise ConfigError(f"save_path={template!r} cannot be read: {error}; {_remedy()}") from error
    found = {field for field, _, _ in fields if field is not None}
    if unknown := sorted(found - set(PLACEHOLDERS)):
        raise ConfigError(f"save_path={template!r} has the unknown placeholder {{{unknown[0]}}}; {_remedy()}")
    if any(spec or conversion for _, spec, conversion in fields):
        raise ConfigError(f"save_path={template!r} formats a placeholder, which is not supported; {_remedy()}")
    return found


def filled(template: str, worker_idx: int) -> Path:
    """The path of this process's trace."""
    values: Mapping[str, Any] = {"worker_idx": worker_idx, "pid": os.getpid(), "host": socket.gethostname()}
    return Path(template.format(**values)).absolute()


def check_folder(folder: Path, setting: str) -> None:
    """Create a folder and check that files can be written there; ConfigError, which names `setting`, if not."""
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"traces cannot be written to {folder} ({error.strerror}); set {setting} to another folder"
        ) from error


def write_trace(profiler: profile, path: Path, process: ProcessName) -> None:
    """Write the trace of a profiler completely or not at all; compressed if the path ends in .gz.

    Call it once per profiler: torch cannot export a trace twice.

    Raises:
        OSError: if it cannot be written.
    """
    new = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    unfinished = new.with_name(f"{new.name}.tmp")  # temporary name of torch's writer
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(new))
        trace = _signed(new.read_bytes() if new.exists() else b"", process)
        new.write_bytes(gzip.compress(trace, compresslevel=1) if path.suffix == ".gz" else trace)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
        unfinished.unlink(missing_ok=True)


def _signed(trace: bytes, process: ProcessName) -> bytes:
    """Insert our metadata and the process name into the text of a trace, which is too large to parse."""
    begin = trace.find(_EVENTS)
    # The header before the events grows with the number of GPUs and process groups.
    base_time = _BASE_TIME.search(trace, 0, max(begin, 0))
    # torch's writer does not report a full disk.
    if base_time is None or begin < 0 or not trace.rstrip().endswith(b"}"):
        raise OSError("the trace is not complete; perhaps the disk is full")
    description = orjson.dumps(process.described(int(base_time[1])))
    name = orjson.dumps(process.name)
    named = re.compile(rb'("name": "process_name",\s+"ts": [\d.]+,\s+"pid": %d,\s[^}]*"name": )"[^"]*"' % os.getpid())
    head, rest = trace[:begin], trace[begin:]
    rest = named.sub(lambda found: found[1] + name, rest, count=1)
    return head + b'"%s": %s,\n    ' % (KEY.encode(), description) + rest


def _remedy() -> str:
    return f"use {', '.join(f'{{{name}}}' for name in PLACEHOLDERS)}, and double other braces"
