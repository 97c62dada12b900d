"""Where the time of a run went: seconds by phase, busy time by process, and what would save most time.

A breakdown is computed from the metrics `time/whole_step_s`, `time/exclusive/*`, `time/busy/*` and
`time/communication/*`, so it exists for running, crashed and resumed runs too. docs/profiling.md describes
`breakdown.json`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson

from lucidrl.report.metrics_file import read_metrics
from lucidrl.report.opportunities import Opportunity, StepMeans, opportunities
from lucidrl.utils.nsys import DRIVER, GENERATION, POLICY, TEACHER
from lucidrl.utils.run_folder import BREAKDOWN_NAME, METRICS_NAME

_log = logging.getLogger(__name__)

SCHEMA = 1
OTHER = "other"

_WHOLE = "time/whole_step_s"
_EXCLUSIVE, _BUSY, _COMMUNICATION = "time/exclusive/", "time/busy/", "time/communication/"
_OVERHEAD = "observe/overhead_pct"
_ENV = "env"
_DIGITS = 6

_ROLES_OF_PHASES: dict[str, Sequence[str]] = {
    "generation": (GENERATION, POLICY),
    "validation": (GENERATION, POLICY),
    "reward": (_ENV,),
    "teacher": (TEACHER,),
    **dict.fromkeys(
        (
            "logprobs",
            "reference",
            "forward",
            "backward",
            "optimizer",
            "communication",
            "training",
            "refit",
            "guard",
            "checkpoint",
        ),
        (POLICY,),
    ),
}
"""Kinds of processes that do the work of a phase, the first that the run has; the driver does all other phases."""

Columns = Mapping[str, Sequence[float]]
"""Values per step, by name."""


@dataclass(frozen=True)
class Segment:
    """A part of the critical path: the driver worked on a phase, or waited for a process that worked on it."""

    phase: str
    process: str
    seconds: float


@dataclass(frozen=True)
class Breakdown:
    """Seconds of the steps of a run; all sequences have one entry per step."""

    steps: Sequence[int]
    whole_s: Sequence[float]
    """Whole steps: training step, logging, validation and checkpoint."""
    phases: Columns
    """Exclusive seconds of the driver by phase. The phases of a step sum to the step."""
    busy: Columns
    """Seconds in which a process computed, by process, such as `driver` or `policy-0`."""
    communication: Columns
    """Seconds in which a rank communicated with other ranks, or waited for them."""
    overhead_pct: Sequence[float]
    """Share of the step that observing took, in percent."""

    @classmethod
    def of_records(cls, records: Iterable[Mapping[str, Any]], first_step: int = 0) -> Breakdown:
        """Return the breakdown of flat records with `step` and metrics, one per step.

        Args:
            first_step: leave out earlier steps.
        """
        kept = [record for record in records if _WHOLE in record and record["step"] >= first_step]
        return cls(
            steps=[record["step"] for record in kept],
            whole_s=[record[_WHOLE] for record in kept],
            phases=_columns(kept, _EXCLUSIVE),
            busy=_columns(kept, _BUSY),
            communication=_columns(kept, _COMMUNICATION),
            overhead_pct=[record.get(_OVERHEAD, 0.0) for record in kept],
        )

    @classmethod
    def read(cls, folder: Path, first_step: int = 0) -> Breakdown:
        """Return the breakdown of a run folder; without steps if there are no metrics yet."""
        return cls.of_records(read_metrics(folder / METRICS_NAME).records, first_step)

    def seconds(self) -> dict[str, float]:
        """Seconds of all steps by phase, the largest first; `other` is last."""
        totals = {phase: sum(values) for phase, values in self.phases.items()}
        return dict(sorted(totals.items(), key=lambda item: (item[0] == OTHER, -item[1])))

    def idle(self) -> dict[str, list[float]]:
        """Seconds in which a process neither computed nor communicated, by process."""
        return {
            name: [
                max(0.0, whole - busy - communication)
                for whole, busy, communication in zip(self.whole_s, values, self._communication_of(name), strict=True)
            ]
            for name, values in self.busy.items()
        }

    def busy_share(self) -> dict[str, float]:
        """Share of the time in which a process computed, by process."""
        return {name: sum(values) / max(sum(self.whole_s), 1e-9) for name, values in self.busy.items()}

    def critical_path(self, index: int) -> list[Segment]:
        """The critical path of one step, whose segments sum to the step: each phase, on the process that the driver
        waited for. This is the busiest process of those that work on the phase."""
        return [
            Segment(phase, self._waited_for(phase, index), values[index])
            for phase, values in self.phases.items()
            if values[index]
        ]

    @cached_property
    def waited_for(self) -> dict[str, list[str]]:
        """By phase, the process on the critical path of each step."""
        return {
            phase: [self._waited_for(phase, index) for index in range(len(self.steps))]
            for phase in self.phases
            if any(self._processes_of(phase))
        }

    def opportunities(self) -> list[Opportunity]:
        """The three changes that would save most time; see `opportunities`."""
        return opportunities(self._means()) if self.steps else []

    def to_json(self) -> dict[str, Any]:
        """The content of `breakdown.json`."""
        idle = self.idle()
        return {
            "schema": SCHEMA,
            "steps": list(self.steps),
            "step_s": _rounded(self.whole_s),
            "phases": {phase: _rounded(values) for phase, values in self.phases.items()},
            "processes": {
                name: {
                    "busy_s": _rounded(values),
                    "communication_s": _rounded(self._communication_of(name)),
                    "idle_s": _rounded(idle[name]),
                }
                for name, values in self.busy.items()
            },
            "waited_for": self.waited_for,
            "overhead_pct": _rounded(self.overhead_pct),
            "opportunities": [
                {"name": found.name, "seconds_per_step": round(found.saved_s, _DIGITS), "text": found.text}
                for found in self.opportunities()
            ],
        }

    def most_waited_for(self, phase: str) -> str:
        """The process that was most often on the critical path of a phase."""
        return Counter(self.waited_for.get(phase, ())).most_common(1)[0][0] if phase in self.waited_for else DRIVER

    def _means(self) -> StepMeans:
        """Means per step, without the first step, which also warms up; unless it is the only one."""
        first = min(1, len(self.steps) - 1)
        return StepMeans(
            whole_s=fmean(self.whole_s[first:]),
            phases={phase: fmean(values[first:]) for phase, values in self.phases.items()},
            busy={name: fmean(values[first:]) for name, values in self.busy.items()},
        )

    def _communication_of(self, process: str) -> Sequence[float]:
        return self.communication.get(process, [0.0] * len(self.steps))

    def _processes_of(self, phase: str) -> list[str]:
        for role in _ROLES_OF_PHASES.get(phase, ()):
            if found := [name for name in self.busy if name.startswith(f"{role}-")]:
                return found
        return []

    def _waited_for(self, phase: str, index: int) -> str:
        return max(self._processes_of(phase), key=lambda name: self.busy[name][index], default=DRIVER)


def write_breakdown(folder: Path) -> None:
    """Write `breakdown.json` of a run folder, from all its metrics; do nothing if no step was completed.

    A failure is logged, because it must neither stop a run nor hide the error that stopped it.
    """
    path = folder / BREAKDOWN_NAME
    partial = path.with_suffix(".partial")
    try:
        breakdown = Breakdown.read(folder)
        if breakdown.steps:
            partial.write_bytes(orjson.dumps(breakdown.to_json()))
            partial.replace(path)
    except Exception as error:
        _log.warning("%s cannot be written: %s: %s", path, type(error).__name__, error)
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _columns(records: Iterable[Mapping[str, Any]], prefix: str) -> dict[str, list[float]]:
    """The metrics `<prefix><name>_s` by name; 0 in steps without the metric."""
    rows = [
        {name[len(prefix) :].removesuffix("_s"): value for name, value in record.items() if name.startswith(prefix)}
        for record in records
    ]
    return {name: [row.get(name, 0.0) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, _DIGITS) for value in values]
