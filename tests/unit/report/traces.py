"""Trace files written by hand, as processes of a run leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

START_NS = 1_800_000_000_000_000_000
"""Unix time at which the recordings begin."""


def description(process: str, pid: int, *, host: str = "node-a", late_s: float = 0.0, **more: Any) -> dict[str, Any]:
    unix_ns = START_NS + round(late_s * 1e9)
    return {"process": process, "host": host, "pid": pid, "anchor": {"unix_time_ns": unix_ns, "ts_us": 0.0}, **more}


def span(name: str, start_ms: float, end_ms: float, pid: int, tid: int | None = None, cat: str = "span") -> dict:
    times = {"ts": start_ms * 1000, "dur": (end_ms - start_ms) * 1000}
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid or pid, **times}


def write_spans(folder: Path, process: str, pid: int, *spans: dict, is_killed: bool = False, **more: Any) -> Path:
    """A file of spans, whose times are milliseconds after the start of the recording."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{process}_{more.get('host', 'node-a')}_{pid}_1.spans.json"
    described = {"ph": "M", "name": "lucidrl", "pid": pid, "args": description(process, pid, **more)}
    end = [] if is_killed else [{"ph": "M", "name": "ended", "pid": pid, "args": {}}]
    path.write_text(json.dumps([described, *spans, *end]))
    return path


def write_operators(folder: Path, process: str, pid: int, *events: dict, **more: Any) -> Path:
    """A trace as torch's profiler writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{process}_{more.get('host', 'node-a')}_{pid}_1.json"
    header = {"schemaVersion": 1, "lucidrl": description(process, pid, **more)}
    path.write_text(json.dumps({**header, "traceEvents": events, "traceName": path.name}, indent=2))
    return path


def write_clock(folder: Path, process: str, pid: int, offset_s: float, node: str | None = "node-b") -> None:
    line = {"process": process, "pid": pid, "node": node, "offset_ns": round(offset_s * 1e9), "error_ns": 400_000}
    with (folder / "clocks.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
