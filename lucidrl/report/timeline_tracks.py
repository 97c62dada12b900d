"""The tracks of a timeline: which process and thread an event belongs to, and their names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from lucidrl.profiling.clock import ClockOffset
from lucidrl.report.trace_reading import Event, TraceHeader
from lucidrl.utils.nsys import COLLECTOR, DRIVER, ENV, GENERATION, POLICY, TEACHER

_FIRST_OWN_PID = 1 << 23
"""Ids of tracks that are no processes, or whose process id another track has; above all process ids of Linux."""
_ORDER = (DRIVER, POLICY, TEACHER, GENERATION, ENV, COLLECTOR)


class Tracks:
    """All tracks of a timeline."""

    def __init__(self) -> None:
        self._processes: dict[tuple[str, int, str], ProcessTracks] = {}
        self._next_pid = _FIRST_OWN_PID

    @property
    def processes(self) -> list[str]:
        """Names of the processes with events, in the order of the timeline."""
        return [track.name for track in sorted(self._processes.values(), key=lambda track: track.place)]

    def of_process(self, header: TraceHeader, offset: ClockOffset | None) -> ProcessTracks:
        """The tracks of a process, also if it recorded several times."""
        key = header.host, header.pid, header.process
        if key not in self._processes:
            taken = {track.pid for track in self._processes.values()}
            pid = header.pid if header.pid not in taken else self.new_pid()
            self._processes[key] = ProcessTracks(self, pid, header, offset)
        return self._processes[key]

    def new_pid(self) -> int:
        self._next_pid += 1
        return self._next_pid

    def names(self) -> Iterator[Event]:
        """Events that name and order all tracks."""
        for track in self._processes.values():
            yield from track.names()


class ProcessTracks:
    """The tracks of a process: its threads, and the GPUs that it used."""

    def __init__(self, tracks: Tracks, pid: int, header: TraceHeader, offset: ClockOffset | None):
        self.name, self.pid = header.process, pid
        self._tracks, self._header, self._offset = tracks, header, offset
        self._device_pids: dict[int, int] = {}
        self._labels: dict[int, str] = {}
        """Labels of the devices, by the id that torch's profiler gives them."""
        self._threads: set[tuple[int, int]] = set()
        """Process or device, and thread or stream, as the trace numbers them."""
        self._thread_names: dict[tuple[int, int], str] = {}

    @property
    def place(self) -> tuple[Any, ...]:
        """Sort key of the process."""
        kind, _, number = self.name.rpartition("-")
        order = _ORDER.index(kind or self.name) if (kind or self.name) in _ORDER else len(_ORDER)
        return order, int(number) if re.fullmatch(r"\d{1,9}", number) else 0, self.name, self.pid

    def merged(self, event: Event, shift_us: float) -> Event | None:
        """The event on the tracks and the clock of the timeline; None if it has no place there.

        Names of tracks are kept for `names`. Events of torch's profiler about itself are dropped.
        """
        pid, tid, phase = event.get("pid"), event.get("tid", 0), event.get("ph")
        if type(pid) is not int or not isinstance(phase, str):
            return None
        tid = tid if type(tid) is int else 0
        if phase == "M":
            self._keep_name(event, pid, tid)
            return None
        ts, duration = _time(event.get("ts")), _time(event.get("dur", 0))
        if ts is None or duration is None or not isinstance(event.get("name"), str):
            return None
        start = ts + shift_us
        begin = max(start, 0.0)  # what began before the recording is cut there
        event["pid"], event["tid"], event["ts"] = self._pid_of(pid), tid, round(begin, 3)
        if phase == "X":
            event["dur"] = round(max(start + duration - begin, 0.0), 3)
        if phase == "C":  # a counter belongs to its process
            del event["tid"]
        else:
            self._threads.add((pid, tid))
        return event

    def names(self) -> Iterator[Event]:
        order, number, *_ = self.place
        sort_index = order * 10_000 + number * 10
        yield _name(self.pid, "process_name", name=self.name)
        yield _name(self.pid, "process_labels", labels=self._label())
        yield _name(self.pid, "process_sort_index", sort_index=sort_index)
        for device, pid in self._device_pids.items():
            yield _name(pid, "process_name", name=f"{self.name} {self._labels.get(device, f'device {device}')}")
            yield _name(pid, "process_sort_index", sort_index=sort_index + 1)
        for pid, tid in sorted(self._threads):
            is_main = pid == tid == self._header.pid
            name = "main thread" if is_main else self._thread_names.get((pid, tid), f"thread {tid}")
            yield {**_name(self._pid_of(pid), "thread_name", name=name), "tid": tid}

    def _label(self) -> str:
        where = f"process {self._header.pid} on {self._header.host}"
        if self._offset is None:
            return where
        offset_ms, error_ms = (value / 1e6 for value in self._offset)
        return f"{where}, clock {offset_ms:+.3f} ± {error_ms:.3f} ms"

    def _pid_of(self, pid: int) -> int:
        """The id of the process or device in the timeline."""
        if pid == self._header.pid:
            return self.pid
        if pid not in self._device_pids:
            self._device_pids[pid] = self._tracks.new_pid()
        return self._device_pids[pid]

    def _keep_name(self, event: Event, pid: int, tid: int) -> None:
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        if event.get("name") == "process_labels":
            self._labels[pid] = str(args.get("labels"))
        elif event.get("name") == "thread_name":
            self._thread_names[pid, tid] = str(args.get("name"))


def _name(pid: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": 0, "args": args}


def _time(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None
