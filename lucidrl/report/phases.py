"""The seconds of each step by phase, and the advice that follows from them."""

from __future__ import annotations

from typing import Any

import orjson

from lucidrl.report.curves import short, spread
from lucidrl.report.metrics_file import Record, is_number
from lucidrl.report.run_data import RunData

BREAKDOWN_NAME = "breakdown.json"
MOST_STEPS = 1000
"""Steps in the stack of phases; of longer runs, evenly spread ones."""
MOST_PHASES = 8
"""Phases with a color; smaller ones are `other`."""
OTHER = "other"
_EXCLUSIVE = "time/exclusive/"
_PARTS = frozenset(
    {"rollout", "reward", "forward", "backward", "optimizer", "logprobs", "reference", "step", "whole_step"}
)
"""Spans that contain or are part of other spans; used only for runs without exclusive times."""


def step_phases(run: RunData) -> dict[str, Any] | None:
    """Steps, names of phases (largest first, `other` last) and their seconds by step; None without timed steps."""
    timed = [(record["step"], phases) for record in run.records if (phases := phases_of(record))]
    if not timed:
        return None
    totals: dict[str, float] = {}
    for _, phases in timed:
        for name, seconds in phases.items():
            totals[name] = totals.get(name, 0.0) + seconds
    ranked = sorted((name for name in totals if name != OTHER), key=lambda name: -totals[name])[: MOST_PHASES - 1]
    kept = [timed[row] for row in sorted(spread(len(timed), MOST_STEPS))]
    columns = [[short(phases.get(name, 0.0)) for _, phases in kept] for name in ranked]
    rest = [short(sum(value for name, value in phases.items() if name not in ranked)) for _, phases in kept]
    return {"steps": [step for step, _ in kept], "names": [*ranked, OTHER], "seconds": [*columns, rest]}


def phases_of(record: Record) -> dict[str, float]:
    """The seconds of a step by phase, which sum to the step; empty if the step is not timed."""
    exclusive = _seconds(record, _EXCLUSIVE)
    if exclusive:
        return {name: max(0.0, seconds) for name, seconds in exclusive.items()}
    total = record.get("time/step_s")
    if not is_number(total):
        return {}
    own = {name: value for name, value in _seconds(record, "time/").items() if name not in _PARTS and "/" not in name}
    return own | {OTHER: max(0.0, total - sum(own.values()))}


def _seconds(record: Record, prefix: str) -> dict[str, float]:
    return {
        name.removeprefix(prefix).removesuffix("_s"): float(value)
        for name, value in record.items()
        if name.startswith(prefix) and name.endswith("_s") and is_number(value)
    }


def opportunities(run: RunData) -> list[str]:
    """The advice of the run's breakdown, largest saving first; empty if the run has none."""
    try:
        found = orjson.loads((run.folder / BREAKDOWN_NAME).read_bytes())["opportunities"]
        return [str(entry["text"] if isinstance(entry, dict) else entry) for entry in found]
    except (OSError, ValueError, LookupError, TypeError):
        return []
