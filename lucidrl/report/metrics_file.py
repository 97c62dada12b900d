"""Reads `metrics.jsonl`: one record per step, and the measurements of the machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import orjson

TRAIN, VALIDATION = "train/", "validation/"
MACHINE = ("machine/", "ray/")
"""Prefixes of the monitor's metrics, on one machine and under Ray."""
_NONFINITE = ".nonfinite"

Record = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """The values of one metric; steps ascend."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class BestValue:
    """The best value of a metric; of equal values the newest."""

    name: str
    value: float
    step: int
    mode: str
    """`max` or `min`: whether a higher or a lower value is better."""


@dataclass(frozen=True)
class Metrics:
    """The content of a `metrics.jsonl`.

    All lines of a step are one record: its training metrics, its validation if any, and the newest measurement of the
    machine since the step before. If a resumed run repeats steps, the records of its earlier attempt from there on are
    left out.
    """

    records: list[Record] = field(default_factory=list)
    """One flat record per step, with `step`, `time` (Unix seconds) and the metrics; steps ascend. NaN and infinities
    are floats."""
    machine: list[Record] = field(default_factory=list)
    """Measurements of the machine, in the order of the file, with `time` and the metrics."""
    times: list[float] = field(default_factory=list, repr=False)
    """Unix seconds of all lines, in the order of the file."""
    num_unreadable_lines: int = 0
    """Lines that are not a record, such as a last line that a kill has cut."""

    @property
    def last_step(self) -> int:
        """The last completed training step; 0 if there is none."""
        return next((record["step"] for record in reversed(self.records) if has_any(record, TRAIN)), 0)

    def names(self) -> list[str]:
        """The names of all metrics with a step, sorted."""
        return sorted({name for record in self.records for name in record} - {"step", "time"})

    def series(self, name: str) -> Series:
        """The numbers of a metric by step; skips steps without it, and values that are not numbers."""
        found = [(record["step"], value) for record in self.records if is_number(value := record.get(name))]
        return Series([step for step, _ in found], [float(value) for _, value in found])

    def best(self, name: str, mode: str) -> BestValue | None:
        """The best value of a metric, highest for the mode `max`, lowest for `min`; None without a finite value."""
        series, sign = self.series(name), -1 if mode == "min" else 1
        ranked = [(sign * value, step) for step, value in zip(series.steps, series.values, strict=True)]
        value, step = max((pair for pair in ranked if math.isfinite(pair[0])), default=(math.nan, 0))
        return None if math.isnan(value) else BestValue(name, sign * value, step, mode)

    def until(self, step: int) -> Metrics:
        """The metrics up to and including a step."""
        kept = [record for record in self.records if record["step"] <= step]
        return Metrics(kept, self.machine, self.times, self.num_unreadable_lines)


def read_metrics(path: Path) -> Metrics:
    """Read a file of metrics; a missing file has none.

    Raises:
        OSError: the file cannot be read.
    """
    by_step: dict[int, Record] = {}
    machine, times = [], []
    waiting: Record = {}  # of the machine, for the next step
    num_unreadable = 0
    for record in _lines(path):
        if record is None:
            num_unreadable += 1
            continue
        if is_number(moment := record.get("time")):
            times.append(float(moment))
        if "step" not in record:
            if has_any(record, *MACHINE):
                machine.append(record)
                waiting = {name: value for name, value in record.items() if name.startswith(MACHINE)}
            continue
        step = record["step"]
        if _is_repeated(record, by_step.get(step, {})):  # resumed from an earlier checkpoint
            by_step = {old: kept for old, kept in by_step.items() if old < step}
        by_step[step] = {"step": step, "time": None} | by_step.get(step, {}) | waiting | record
        waiting = {}
    return Metrics([by_step[step] for step in sorted(by_step)], machine, times, num_unreadable)


def has_any(record: Record, *prefixes: str) -> bool:
    """Whether a record has a metric with one of the prefixes."""
    return any(name.startswith(prefixes) for name in record)


def is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_lines(path: Path) -> Iterator[Record | None]:
    """The JSON objects of a file, line by line, None for any other line; nothing if the file is missing."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                record = orjson.loads(line)
            except ValueError:
                record = None
            yield record if isinstance(record, dict) else None


def _lines(path: Path) -> Iterator[Record | None]:
    for record in read_lines(path):
        step = None if record is None else record.get("step", 0)
        yield _with_nonfinite(record) if record is not None and type(step) is int and step >= 0 else None


def _is_repeated(record: Record, earlier: Record) -> bool:
    """Whether a record has training metrics that an earlier record of its step has too."""
    return any(name.startswith(TRAIN) for name in record.keys() & earlier.keys())


def _with_nonfinite(record: Record) -> Record:
    """The record with NaN and infinities as floats, for which the file has null, and their text under another name."""
    if None not in record.values():
        return record
    for marker in [name for name in record if name.endswith(_NONFINITE)]:
        with suppress(TypeError, ValueError):
            value = float(record[marker])
            if not math.isfinite(value):
                record[marker.removesuffix(_NONFINITE)] = value
                del record[marker]
    return record
