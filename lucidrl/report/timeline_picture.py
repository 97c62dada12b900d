"""The timeline that the page draws: recorded spans of all processes, or else the phases of the steps."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from operator import attrgetter
from pathlib import Path
from typing import Any

import orjson

from lucidrl.report.metrics_file import is_number
from lucidrl.report.phases import OTHER, phases_of
from lucidrl.report.run_data import RunData

TIMELINE_NAME = "timeline.json.gz"
MOST_SPANS = 10_000
"""Spans of a picture: the longest ones."""
MOST_BYTES = 1 << 28
"""How much of an unpacked timeline is read."""
MOST_PICTURED_STEPS = 500
"""Steps whose phases are drawn if no spans were recorded: the last ones."""
_SPANS = ("span", "user_annotation")
_METADATA = b'],"lucidrl":'
_ORDER = (
    "generation",
    "generate",
    "environment",
    "collect",
    "advantages",
    "logprobs",
    "score",
    "reference",
    "training",
    "train",
)


@dataclass(frozen=True)
class Span:
    """A rectangle of the picture; times are seconds."""

    track: tuple[int, int]
    """Process and thread."""
    start: float
    duration: float
    name: str


def timeline_picture(run: RunData, phases: Sequence[str] = ()) -> dict[str, Any] | None:
    """The picture of a run, as the page reads it; None if no step is timed.

    Args:
        phases: spans with these names have the colors of the first phases.
    """
    for path in run.traces:
        if path.name == TIMELINE_NAME and (picture := _of_traces(path, phases)) is not None:
            return picture
    return _of_steps(run, phases)


def _of_traces(path: Path, phases: Sequence[str]) -> dict[str, Any] | None:
    """The picture of recorded spans; None if the file has none or cannot be read."""
    found, damage = _RecordedSpans(), ""
    try:
        for event in _events(path):
            found.add(event)
    except (OSError, EOFError, ValueError, TypeError, AttributeError, zlib.error) as error:
        damage = f" The file is damaged ({type(error).__name__}): what comes before the damage is drawn."
    spans = found.longest()
    if not spans:
        return None
    if len(spans) < found.num_spans:
        damage += f" The {len(spans):,} longest of {found.num_spans:,} spans are drawn."
    missing = "".join(f" Missing: {sentence}." for sentence in found.missing)
    note = f"Recorded spans of traces/{TIMELINE_NAME}; Perfetto shows operators and counters too.{damage}{missing}"
    return _picture(spans, {span.track: found.label(span.track) for span in spans}, note, phases)


class _RecordedSpans:
    """What the page shows of the events of a timeline."""

    def __init__(self) -> None:
        self.num_spans = 0
        self.missing: list[str] = []
        """What the timeline lacks, a sentence each."""
        self._spans: list[Span] = []
        self._processes: dict[int, str] = {}
        self._threads: dict[tuple[int, int], str] = {}

    def add(self, event: dict[str, Any]) -> None:
        track, name = (event.get("pid", 0), event.get("tid", 0)), str(event.get("name", ""))
        if "missing" in event:
            self.missing += [str(sentence) for sentence in event["missing"]]
        elif name == "process_name" and event["ph"] == "M":
            self._processes[track[0]] = str(event["args"].get("name", ""))
        elif name == "thread_name" and event["ph"] == "M":
            self._threads[track] = str(event["args"].get("name", ""))
        elif event.get("cat") in _SPANS and is_number(event.get("ts")) and is_number(event.get("dur")):
            self.num_spans += 1
            self._spans.append(Span(track, event["ts"] / 1e6, event["dur"] / 1e6, name))
            if len(self._spans) > 4 * MOST_SPANS:
                self._spans = self.longest()

    def longest(self) -> list[Span]:
        return nlargest(MOST_SPANS, self._spans, key=attrgetter("duration"))

    def label(self, track: tuple[int, int]) -> str:
        """Name of a track: its process, and its thread if that has another name."""
        process, thread = self._processes.get(track[0], f"process {track[0]}"), self._threads.get(track, "")
        return f"{process}: {thread}" if thread and thread != process else process


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a timeline, which has one per line, and last its metadata."""
    num_bytes = 0
    with gzip.open(path, "rb") as file:
        for line in file:
            num_bytes += len(line)
            if num_bytes > MOST_BYTES:
                return
            if line.startswith(_METADATA):
                yield orjson.loads(line.strip().removeprefix(_METADATA)[:-1])
            elif b'"ph":"X"' in line or b'"ph":"M"' in line:
                yield orjson.loads(line.strip().rstrip(b","))


def _of_steps(run: RunData, phases: Sequence[str]) -> dict[str, Any] | None:
    """The phases of the last steps, one after the other, each step at the time when it was recorded."""
    timed = [record for record in run.records if phases_of(record) and is_number(record.get("time"))]
    if not timed:
        return None
    steps, parts, previous = (0, 0), (0, 1), 0.0
    spans = []
    for record in timed[-MOST_PICTURED_STEPS:]:
        seconds = phases_of(record)
        total = sum(seconds.values())
        start = max(previous, record["time"] - total)
        spans.append(Span(steps, start, total, f"step {record['step']}"))
        at = start
        for name in sorted(seconds, key=_place):
            spans.append(Span(parts, at, seconds[name], name))
            at += seconds[name]
        previous = at
    kept = len(timed[-MOST_PICTURED_STEPS:])
    part = f"the last {kept:,} of {len(timed):,} steps" if kept < len(timed) else f"{kept:,} steps"
    note = (
        f"Phases of {part}. Durations are measured; the order within a step is not, because traces/ has no timeline: "
        "profile.steps=3:5 records one of steps 3 and 4."
    )
    return _picture(spans, {steps: "steps", parts: "phases"}, note, phases)


def _place(name: str) -> tuple[int, str]:
    return (len(_ORDER) + (name == OTHER), name) if name not in _ORDER else (_ORDER.index(name), name)


def _picture(spans: list[Span], labels: dict[tuple[int, int], str], note: str, phases: Sequence[str]) -> dict[str, Any]:
    origin = min(span.start for span in spans)
    names = sorted({span.name for span in spans})
    number_of = {name: number for number, name in enumerate(names)}
    kinds = [*phases, *sorted({_kind(name) for name in names} - {*phases})]
    colors = {kind: number for number, kind in enumerate(kinds)}
    tracks = []
    for track, label in labels.items():
        own = sorted((span for span in spans if span.track == track), key=lambda span: (span.start, -span.duration))
        if not own:
            continue
        flat: list[float] = []
        open_ends: list[float] = []
        rows = 1
        for span in own:
            while open_ends and open_ends[-1] <= span.start + 1e-9:
                open_ends.pop()
            flat += [round(span.start - origin, 6), round(span.duration, 6), number_of[span.name], len(open_ends)]
            open_ends.append(span.start + span.duration)
            rows = max(rows, len(open_ends))
        tracks.append({"name": label, "rows": rows, "spans": flat})
    return {
        "note": note,
        "end": max(span.start + span.duration for span in spans) - origin,
        "names": names,
        "colors": [colors[_kind(name)] for name in names],
        "tracks": tracks,
    }


def _kind(name: str) -> str:
    """Spans of the same kind have the same color: all steps, for instance."""
    return name.rstrip("0123456789").rstrip()
