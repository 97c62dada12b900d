"""Merges the traces of all processes of a run into one timeline, on the clock of the driver.

Reads and writes event by event: memory does not grow with the traces. Damaged and missing files are named in the
result and in the metadata of the timeline; everything else is merged.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from lucidrl.errors import ConfigError
from lucidrl.profiling.clock import CLOCKS_NAME, ClockOffset
from lucidrl.profiling.settings import KEY
from lucidrl.report.timeline_counters import machine_counters
from lucidrl.report.timeline_flows import STAGES, FlowSpan, flow_events
from lucidrl.report.timeline_gaps import missing_operators, missing_processes, missing_steps
from lucidrl.report.timeline_tracks import Tracks
from lucidrl.report.trace_reading import DamagedTrace, Event, TraceHeader, events_of, header_of
from lucidrl.utils.logger.folders import whole_file
from lucidrl.utils.run_folder import TRACES_NAME

TIMELINE_NAME = "timeline.json.gz"
_SPANS_SUFFIX = ".spans.json"
_BATCH_BYTES = 1 << 18
_MOST_FLOW_SPANS = 100_000
_FLOW_PHASES = ("s", "t", "f", "b", "n", "e")
"""Phases of events that belong together by their `id`, which is unique in its file only."""


@dataclass(frozen=True)
class Timeline:
    """A written timeline."""

    path: Path
    processes: Sequence[str]
    num_events: int
    missing: Sequence[str]
    """What the timeline lacks, a sentence each."""

    def described(self) -> list[str]:
        """Sentences for a user: what was written, and what is missing."""
        what = f"{self.num_events:,} events of {', '.join(self.processes) or 'no process'}"
        return [
            f"timeline: {self.path} ({what}); open it with ui.perfetto.dev",
            *(f"missing in the timeline: {sentence}" for sentence in self.missing),
        ]


@dataclass(frozen=True)
class _Clock:
    """The measured clock of a worker."""

    process: str
    pid: int
    node: str | None
    offset: ClockOffset


@dataclass(frozen=True)
class _Source:
    """A trace file with a readable header."""

    path: Path
    header: TraceHeader
    offset: ClockOffset | None
    """None if the clock was not measured: it is the driver's, or no driver let the process record."""

    @property
    def has_spans(self) -> bool:
        return self.path.name.endswith(_SPANS_SUFFIX)

    @property
    def stem(self) -> str:
        """The part of the name that the files of one recording share."""
        return self.path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".spans")

    @property
    def start_ns(self) -> int:
        """Start of the recording on the clock of the driver."""
        return self.header.anchor_unix_ns - (self.offset.offset_ns if self.offset is not None else 0)


def write_timeline(run: Path) -> Timeline:
    """Write `traces/timeline.json.gz` of a run folder, completely or not at all.

    Raises:
        ConfigError: the folder has no traces, or the timeline cannot be written.
    """
    folder = run / TRACES_NAME
    if not folder.is_dir():
        raise ConfigError(f"{run} has no folder {TRACES_NAME}; record steps of a run with profile.steps=3:5")
    path = folder / TIMELINE_NAME
    try:
        with whole_file(path) as file:
            return _Merge(run, folder).write(file)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror or error}); free space on the disk, then run "
            f"`lucidrl timeline {run}`"
        ) from error


class _Merge:
    """One merge of all traces of a folder."""

    def __init__(self, run: Path, folder: Path):
        self._run, self._folder = run, folder
        self._missing: list[str] = []
        self._clocks = self._read_clocks()
        self._sources = self._read_headers()
        self._start_ns = min((source.start_ns for source in self._sources), default=0)
        self._end_us = 0.0
        self._tracks = Tracks()
        self._flow_spans: list[FlowSpan] = []

    def write(self, file: BinaryIO) -> Timeline:
        # The fastest level: a user waits for the timeline at the end of a run.
        with gzip.GzipFile("", "wb", compresslevel=1, fileobj=file, mtime=0) as packed:
            output = _Events(packed)
            output.begin()
            recordings: dict[str, list[_Source]] = {}
            for source in self._sources:
                recordings.setdefault(source.stem, []).append(source)
            for number, parts in enumerate(recordings.values(), 1):
                output.add_all(self._recording(number, parts))
            output.add_all(machine_counters(self._run, self._tracks, self._start_ns, self._end_us))
            output.add_all(flow_events(self._flow_spans))
            output.add_all(self._tracks.names())
            self._missing += missing_operators(self._folder, [each.header for each in self._sources])
            expected = [(clock.process, clock.pid, clock.node) for clock in self._clocks]
            found = {(each.header.process, each.header.pid) for each in self._sources}
            self._missing += missing_processes(expected, found)
            self._missing += missing_steps(self._run, has_traces=bool(self._sources))
            output.end(self._description())
        return Timeline(self._folder / TIMELINE_NAME, self._tracks.processes, output.num_events, self._missing)

    def _read_clocks(self) -> list[_Clock]:
        try:
            lines = (self._folder / CLOCKS_NAME).read_bytes().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for number, line in enumerate(lines, 1):
            try:
                values = orjson.loads(line)
                offset = ClockOffset(int(values["offset_ns"]), int(values["error_ns"]))
                if values["node"] is None and abs(offset.offset_ns) <= offset.error_ns:
                    offset = offset._replace(offset_ns=0)  # processes of one machine have the same clock
                found.append(_Clock(str(values["process"]), int(values["pid"]), values["node"], offset))
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
                self._missing.append(f"{CLOCKS_NAME} is damaged in line {number}: the clock of one process is unknown")
        return found

    def _read_headers(self) -> list[_Source]:
        offsets = {(clock.process, clock.pid): clock.offset for clock in self._clocks}
        found = []
        paths = [path for path in self._folder.iterdir() if path.name.endswith((".json", ".json.gz"))]
        for path in sorted(path for path in paths if path.name != TIMELINE_NAME and not path.name.startswith(".")):
            try:
                header = header_of(path)
            except DamagedTrace as damage:
                self._missing.append(f"{path.name} is not in the timeline: {damage}")
                continue
            found.append(_Source(path, header, offsets.get((header.process, header.pid))))
        return found

    def _recording(self, number: int, parts: Sequence[_Source]) -> Iterator[Event]:
        """The events of one recording of a process; its operator trace comes first, because it has most spans too."""
        shown = _ShownSpans()
        for source in sorted(parts, key=lambda source: source.has_spans):
            header, num_events, has_end = source.header, 0, False
            process = self._tracks.of_process(header, source.offset)
            shift_us = (source.start_ns - self._start_ns) / 1000 - header.anchor_ts_us
            events = events_of(source.path)
            try:
                for event in events:
                    num_events += 1
                    has_end = event.get("ph") == "M" and event.get("name") == "ended"
                    merged = process.merged(event, shift_us)
                    if merged is None or (source.has_spans and shown.has(merged)):
                        continue
                    shown.note(merged, of_operators=not source.has_spans)
                    if "id" in merged and merged.get("ph") in _FLOW_PHASES:
                        merged["id"] = _unique_id(number, merged["id"])
                    self._note(merged)
                    yield merged
            except DamagedTrace as damage:
                self._missing.append(f"{source.path.name} is damaged after {num_events} events: {damage}")
            else:
                if source.has_spans and not has_end:
                    self._missing.append(
                        f"the spans of {header.process} (process {header.pid}) may end too early: the process was "
                        "killed, its disk was full, or it still records"
                    )

    def _note(self, event: Event) -> None:
        """Remember what counters and arrows need."""
        end_us = event["ts"] + event.get("dur", 0)
        self._end_us = max(self._end_us, end_us)
        is_span = event["ph"] == "X" and event.get("cat") in ("span", "user_annotation")
        if is_span and event["name"] in STAGES and len(self._flow_spans) < _MOST_FLOW_SPANS:
            self._flow_spans.append(FlowSpan(event["name"], event["ts"], end_us, event["pid"], event["tid"]))

    def _description(self) -> dict[str, Any]:
        """Metadata of the timeline: its clock, its inputs and what is missing."""
        inputs = []
        for source in self._sources:
            offset = source.offset
            clock = {"offset_ns": offset.offset_ns, "error_ns": offset.error_ns} if offset is not None else None
            header = source.header
            inputs.append({"file": source.path.name, "process": header.process, "host": header.host, "clock": clock})
        return {"start_unix_ns": self._start_ns, "inputs": inputs, "missing": self._missing}


@dataclass
class _ShownSpans:
    """The spans that an operator trace shows: the file of spans has them too."""

    names: dict[int, set[str]] = field(default_factory=dict)
    """By thread."""
    times: dict[int, tuple[float, float]] = field(default_factory=dict)
    """First start and last end, by thread."""

    def note(self, event: Event, of_operators: bool) -> None:
        if not of_operators or event.get("cat") != "user_annotation" or event["ph"] != "X":
            return
        thread, start, end = event["tid"], event["ts"], event["ts"] + event["dur"]
        first, last = self.times.get(thread, (start, end))
        self.times[thread] = min(first, start), max(last, end)
        self.names.setdefault(thread, set()).add(event["name"])

    def has(self, span: Event) -> bool:
        if span["ph"] != "X" or span["name"] not in self.names.get(span["tid"], ()):
            return False
        first, last = self.times[span["tid"]]
        return first <= span["ts"] + span["dur"] / 2 <= last


class _Events:
    """Writes events as the JSON of a Chrome trace."""

    def __init__(self, file: gzip.GzipFile):
        self.num_events = 0
        self._file = file
        self._pending: list[bytes] = []
        self._size_bytes = 0

    def begin(self) -> None:
        self._file.write(b'{"displayTimeUnit":"ms","traceEvents":[')

    def add_all(self, events: Iterable[Event]) -> None:
        for event in events:
            packed = _packed(event)
            self._pending.append(packed)
            self._size_bytes += len(packed)
            if self._size_bytes > _BATCH_BYTES:
                self._write_pending()

    def end(self, description: dict[str, Any]) -> None:
        self._write_pending()
        self._file.write(b'\n],"%s":%s}\n' % (KEY.encode(), _packed(description)))

    def _write_pending(self) -> None:
        if self._pending:
            self._file.write((b",\n" if self.num_events else b"\n") + b",\n".join(self._pending))
            self.num_events += len(self._pending)
            self._pending, self._size_bytes = [], 0


def _packed(value: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:  # numbers above 64 bits, and characters that UTF-8 lacks
        return json.dumps(value).encode()


def _unique_id(number: int, of_file: Any) -> int | str:
    return number << 32 | of_file & 0xFFFFFFFF if isinstance(of_file, int) else f"{number}.{of_file}"
