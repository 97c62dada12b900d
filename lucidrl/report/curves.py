"""Which curves the page draws, in which order, and with how many points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from lucidrl.report.metrics_file import MACHINE, Record, Series, is_number
from lucidrl.report.run_data import RunData

MOST_POINTS = 1000
"""Points of a curve; of longer curves the page keeps the smallest and the largest value of every interval."""
_DIGITS = 6
GROUPS = {
    "Result": (
        "validation/accuracy",
        "validation/reward",
        "validation/loss",
        "train/accuracy",
        "train/reward",
        "train/episode_reward",
        "train/nll",
        "validation/*",
        "train/reward*",
        "train/chosen_*",
        "train/rejected_*",
        "train/groups_with_signal_fraction",
    ),
    "Optimization": (
        "train/loss",
        "train/policy_loss",
        "train/loss_*",
        "train/kl",
        "train/teacher_*",
        "train/approx_kl",
        "train/entropy*",
        "train/grad_norm",
        "train/critic_grad_norm",
        "train/clip_fraction*",
        "train/explained_variance",
        "train/lr",
        "train/*learning_rate",
    ),
    "Samples and lengths": (
        "train/answer_tokens",
        "train/episode_length",
        "train/truncated_fraction",
        "train/turns",
        "train/dropped_samples",
        "train/sampled_tokens",
        "validation/answer_tokens",
        "validation/length",
        "validation/truncated_fraction",
        "validation/turns",
        "validation/dropped_samples",
        "validation/sampled_tokens",
    ),
    "Mismatch and staleness": (
        "train/generation_mismatch/*",
        "train/importance/*",
        "train/ratio/*",
        "train/staleness*",
    ),
    "Speed": ("train/tokens_per_s", "train/frames_per_s", "time/step_s", "observe/*"),
}
"""Groups of charts and the patterns of their metrics, both in the order of the page; all other metrics are folded. The
name of a metric goes before a pattern that it matches."""
REST = "All other metrics"


@dataclass(frozen=True)
class Curves:
    """The curves of one run, in the form that the page reads."""

    axes: list[list[float]]
    """Steps that several curves share."""
    series: dict[str, tuple[int, list[float | None]]]
    """By metric: the number of its axis, and its values; None for NaN and infinities."""
    num_thinned: int
    """Curves with fewer points than were recorded."""


def curves_of(run: RunData) -> Curves:
    """Return the curves of all metrics of a run with a step."""
    axes: list[list[float]] = []
    numbers: dict[tuple[int, ...], int] = {}
    series: dict[str, tuple[int, list[float | None]]] = {}
    num_thinned = 0
    for name, found in all_series(run.records).items():
        if name.startswith(MACHINE):
            continue
        kept = thinned(found)
        num_thinned += len(kept.steps) < len(found.steps)
        key = tuple(kept.steps)
        if key not in numbers:
            numbers[key] = len(axes)
            axes.append([*kept.steps])
        series[name] = numbers[key], [short(value) for value in kept.values]
    return Curves(axes, series, num_thinned)


def all_series(records: Iterable[Record]) -> dict[str, Series]:
    """The numbers of all metrics by step, in one pass over the records."""
    found: dict[str, Series] = {}
    for record in records:
        for name, value in record.items():
            if name not in ("step", "time") and is_number(value):
                series = found.setdefault(name, Series([], []))
                series.steps.append(record["step"])
                series.values.append(float(value))
    return found


def machine_curves(run: RunData) -> dict[str, tuple[list[float | None], list[float | None]]]:
    """Curves of the machine's use by name: seconds since the run began to log, and values.

    The monitor counts from 0 again after a resume; the time of its lines shows how much later that was.
    """
    found: dict[str, Series] = {}
    start, offset, previous = None, 0.0, math.inf
    for record in run.metrics.machine:
        elapsed = next((record[name] for name in ("machine/elapsed_s", "ray/ray_step") if name in record), None)
        if not is_number(elapsed) or not is_number(record.get("time")):
            continue
        if elapsed < previous:
            began = record["time"] - elapsed
            start = began if start is None else start
            offset = max(offset, began - start)
        previous = elapsed
        for name, value in record.items():
            if ".node." in f".{name.partition('/')[2]}" and is_number(value) and not name.endswith("mem_total_gb"):
                series = found.setdefault(name.partition("/")[2], Series([], []))
                series.steps.append(round(elapsed + offset, 1))  # type: ignore[arg-type]
                series.values.append(float(value))
    kept = {name: thinned(series) for name, series in sorted(found.items())}
    return {name: ([*series.steps], [short(value) for value in series.values]) for name, series in kept.items()}


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """At most `most` points: of each of equal intervals the smallest and the largest value, and both ends."""
    count = len(series.steps)
    if count <= most:
        return series
    # NaN has no order; as the largest value it is kept, and shows as a gap.
    values = [math.inf if math.isnan(value) else value for value in series.values]
    size = 2 * (count - 2) / (most - 2)
    rows = {0, count - 1}
    for number in range((most - 2) // 2):
        interval = range(1 + int(number * size), min(count - 1, 1 + int((number + 1) * size)))
        if interval:
            rows |= {min(interval, key=values.__getitem__), max(interval, key=values.__getitem__)}
    kept = sorted(rows)
    return Series([series.steps[row] for row in kept], [series.values[row] for row in kept])


def spread(count: int, most: int) -> set[int]:
    """At most `most` of the numbers below `count`: the first, the last, and evenly spread ones."""
    if count <= most:
        return set(range(count))
    return {round(number * (count - 1) / (most - 1)) for number in range(most)}


def short(value: float) -> float | None:
    """The number with six significant digits, which halve the page; None if it is not finite."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def chart_groups(runs: Sequence[Curves]) -> tuple[list[dict[str, Any]], list[tuple[str, list[float | None]]]]:
    """Sort the metrics of all runs into groups of charts; return the groups, and the metrics that never change.

    A metric that never changes is (name, its value in each run, None if the run has no value).
    """
    names = sorted({name for run in runs for name in run.series})
    constant = [name for name in names if _is_constant(name, runs)]
    left = [name for name in names if name not in constant]
    groups: list[dict[str, Any]] = []
    for title, patterns in GROUPS.items():
        ranks = {name: rank for name in left if (rank := _rank(name, title, patterns)) is not None}
        if ranks:
            groups.append({"title": title, "names": sorted(ranks, key=lambda name: (ranks[name], name))})
            left = [name for name in left if name not in ranks]
    if left:
        groups.append({"title": REST if groups else "Metrics", "names": left, "is_folded": bool(groups)})
    return groups, [(name, [_first(run, name) for run in runs]) for name in constant]


def _rank(name: str, title: str, patterns: Sequence[str]) -> int | None:
    """The place of a metric in a group; None if it belongs to another one."""
    if any(name in others for other, others in GROUPS.items() if other != title):
        return None
    return next((rank for rank, pattern in enumerate(patterns) if fnmatchcase(name, pattern)), None)


def _is_constant(name: str, runs: Sequence[Curves]) -> bool:
    columns = [run.series[name][1] for run in runs if name in run.series]
    return all(len(column) > 1 and len(set(column)) == 1 for column in columns)


def _first(run: Curves, name: str) -> float | None:
    return run.series[name][1][0] if name in run.series else None
