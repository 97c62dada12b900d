"""The counters of a timeline that the monitor of the run has logged: CPU, memory and GPUs of all nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from lucidrl.report.timeline_tracks import Tracks
from lucidrl.report.trace_reading import Event
from lucidrl.utils.run_folder import METRICS_NAME

_READING = re.compile(rb'"\w+/node\.\d+\.')
_NAME = re.compile(r"\w+/(node\.\d+\.(?:cpu\.util|mem_gb|gpu\.\d+\.\w+))")
_ELAPSED = ("machine/elapsed_s", "ray/ray_step")
"""Metrics with the seconds since the start of the monitor."""


class _Reading(NamedTuple):
    """One snapshot of the monitor."""

    written_s: float
    """Unix time at which the snapshot was written; the monitor writes several at once."""
    elapsed_s: float
    """Seconds from the start of the monitor to the snapshot."""
    values: dict[str, float]


def machine_counters(run: Path, tracks: Tracks, start_ns: int, end_us: float) -> Iterator[Event]:
    """The counters between the start and the end of a timeline, and the last values before it.

    Args:
        start_ns: Unix time of the start.
    """
    starts = list(_monitor_starts(run))
    names: set[str] = set()
    before: dict[str, float] = {}
    pid = tracks.new_pid()
    number, last_elapsed_s = 0, -1.0
    for reading in _readings(run):
        number += reading.elapsed_s <= last_elapsed_s and last_elapsed_s >= 0
        last_elapsed_s = reading.elapsed_s
        ts = round((starts[number] + reading.elapsed_s) * 1e6 - start_ns / 1000, 3)
        if ts < 0:
            before |= reading.values
        elif ts <= end_us:
            yield from (_counter(pid, name, 0.0, value) for name, value in before.items())
            yield from (_counter(pid, name, ts, value) for name, value in reading.values.items())
            names |= before.keys() | reading.values.keys()
            before = {}
    if end_us > 0:
        yield from (_counter(pid, name, 0.0, value) for name, value in before.items())
        names |= before.keys()
    if names:
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": "machines"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": 1_000_000}}


def _monitor_starts(run: Path) -> Iterator[float]:
    """Unix times at which the monitor started, once per start or resume of the run.

    The last snapshot of every write was taken just before the write.
    """
    start_s, last_elapsed_s = float("inf"), -1.0
    for reading in _readings(run):
        if reading.elapsed_s <= last_elapsed_s:
            yield start_s
            start_s = float("inf")
        last_elapsed_s = reading.elapsed_s
        start_s = min(start_s, reading.written_s - reading.elapsed_s)
    yield start_s


def _readings(run: Path) -> Iterator[_Reading]:
    """The snapshots of the monitor, in order; lines that cannot be read are skipped."""
    try:
        file = (run / METRICS_NAME).open("rb")
    except OSError:
        return
    with file:
        for line in file:
            if _READING.search(line) is None:
                continue
            try:
                record: dict[str, Any] = orjson.loads(line)
                elapsed_s = next(float(record[name]) for name in _ELAPSED if name in record)
                found = {name: _NAME.fullmatch(name) for name in record}
                values = {match[1]: float(record[name]) for name, match in found.items() if match is not None}
                yield _Reading(float(record["time"]), elapsed_s, values)
            except (orjson.JSONDecodeError, StopIteration, KeyError, TypeError, ValueError):
                continue


def _counter(pid: int, name: str, ts: float, value: float) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "ts": ts, "args": {"value": value}}
