"""`lucidrl compare`: how the settings and the metrics of runs differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lucidrl.checkpoint.manifest import MANIFEST_NAME
from lucidrl.errors import ConfigError
from lucidrl.report.metrics_file import VALIDATION, BestValue, Metrics
from lucidrl.report.run_data import RunData, read_run
from lucidrl.report.runs_table import RunRow
from lucidrl.report.text import shown_number, shown_seconds
from lucidrl.utils.logger.console import visible
from lucidrl.utils.logger.values import flatten_dict

UNSET = "unset"
_OWN_KEYS = ("run.root", "run.name")
"""Settings that differ between any two runs."""
_MODES = {
    "validation/reward": "max",
    "validation/accuracy": "max",
    "validation/loss": "min",
    "train/reward": "max",
    "train/episode_reward": "max",
    "train/accuracy": "max",
    "train/nll": "min",
}
"""Metrics of which the highest or the lowest value is the best one."""
_SHARES = ("validation/avg_at_", "validation/pass_at_", "validation/maj_at_")
_TRAINING = (
    "train/reward",
    "train/episode_reward",
    "train/accuracy",
    "train/nll",
    "train/loss",
    "train/kl",
    "train/approx_kl",
    "train/entropy",
    "train/entropy_estimate",
    "train/grad_norm",
    "train/answer_tokens",
    "train/truncated_fraction",
    "train/episode_length",
    "train/generation_mismatch/mean_abs_logprob_difference",
    "train/tokens_per_s",
    "train/frames_per_s",
    "time/step_s",
)
"""Metrics of training that are compared, in this order, after those of validation."""
_NOT_COMPARED = ("_low", "_high", "/turns", "/dropped_samples", "/sampled_tokens")
"""Endings of validation metrics that are not compared."""


@dataclass(frozen=True)
class Compared:
    """A run, or a run up to one of its checkpoints."""

    letter: str
    """How tables name it: A, B, ..."""
    source: str
    """How the user named it."""
    run: RunData
    metrics: Metrics
    step: int | None = None
    """The step of the checkpoint; None for the whole run."""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings by dotted key."""
        flat = flatten_dict(self.run.config)
        return {key: value for key, value in flat.items() if key not in _OWN_KEYS}

    def to_json(self) -> dict[str, Any]:
        return {"source": self.source, "step": self.step, **RunRow.of(self.run, self.run.folder).to_json()}


@dataclass(frozen=True)
class MetricRow:
    """A metric in all compared runs, by letter; runs that lack it are left out."""

    name: str
    mode: str | None
    """`max` or `min`: what the best value is; None if no value is better than another."""
    last: dict[str, float]
    last_step: dict[str, int]
    best: dict[str, BestValue]


@dataclass(frozen=True)
class Comparison:
    """Runs and their differences."""

    runs: list[Compared]
    settings: dict[str, dict[str, Any]]
    """Settings that differ, by dotted key and letter; runs without the setting are left out."""
    metrics: list[MetricRow]

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": {side.letter: side.to_json() for side in self.runs},
            "settings": self.settings,
            "metrics": {row.name: {"mode": row.mode, **self.values(row)} for row in self.metrics},
        }

    def values(self, row: MetricRow) -> dict[str, dict[str, Any]]:
        """The values of a metric by letter, with the differences to the first run."""
        first = self.runs[0].letter
        values: dict[str, dict[str, Any]] = {}
        for letter, last in row.last.items():
            values[letter] = {"last": last, "last_step": row.last_step[letter]}
            if best := row.best.get(letter):
                values[letter] |= {"best": best.value, "best_step": best.step}
            for kind in ("last", "best") if letter != first and first in values else ():
                if kind in values[letter] and kind in values[first]:
                    values[letter][f"{kind}_difference"] = values[letter][kind] - values[first][kind]
        return values


def compare_runs(sources: Sequence[str]) -> Comparison:
    """Compare runs, named as run folders, checkpoints, RUN@best or RUN@newest.

    Of a checkpoint, the metrics up to its step count.

    Raises:
        ConfigError: fewer than two runs are named, or a name is not a run or a checkpoint in a run folder.
        CheckpointError: a run has no such checkpoint.
    """
    if not 2 <= len(sources) <= len(ascii_uppercase):
        raise ConfigError(f"the number of runs to compare is {len(sources)}; name 2 to {len(ascii_uppercase)} runs")
    runs = [_compared(letter, source) for letter, source in zip(ascii_uppercase, sources, strict=False)]
    settings = _different({side.letter: side.settings for side in runs if side.run.config})
    return Comparison(runs, settings, [_metric_row(runs, *measure) for measure in _measures(runs).items()])


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Print the compared runs, the settings that differ, and the metrics with their differences."""

    def say(line: str) -> None:
        console.print(Text(visible(line)), soft_wrap=True)

    for side in comparison.runs:
        run, total = side.run, "" if side.run.max_steps is None else f" of {side.run.max_steps}"
        upto = "" if side.step is None else f", compared up to step {side.step}"
        say(
            f"{side.letter}  {side.source}: {run.algorithm or 'unknown algorithm'}, {run.state} at step "
            f"{run.last_step}{total}, {shown_seconds(run.duration_s)}{upto}"
        )
        for problem in run.problems:
            say(f"   {problem}")
    letters = [side.letter for side in comparison.runs]
    with_settings = [side for side in comparison.runs if side.run.config]
    console.print()
    if comparison.settings:
        console.print(_settings_table(comparison.settings, with_settings))
    else:
        console.print("no settings differ" if len(with_settings) > 1 else "there are no settings to compare")
    console.print()
    shared = [row for row in comparison.metrics if len(row.last) > 1]
    console.print(_metrics_table(comparison, shared, letters) if shared else "the runs have no metric in common")
    if single := [f"{row.name} ({next(iter(row.last))})" for row in comparison.metrics if len(row.last) == 1]:
        say(f"in one run only: {', '.join(single)}")


def _compared(letter: str, source: str) -> Compared:
    folder = Path(source).expanduser()
    is_checkpoint = (folder / MANIFEST_NAME).is_file() if folder.is_dir() else "@" in folder.name
    if not is_checkpoint:
        run = read_run(folder)
        return Compared(letter, source, run, run.metrics)
    from lucidrl.models.sources import find_checkpoint

    checkpoint = find_checkpoint(source)
    if checkpoint is None:
        raise ConfigError(f"{source} is not a checkpoint of a run; name a run folder, RUN@best or a checkpoint in it")
    run = read_run(checkpoint.path.parent.parent)
    return Compared(letter, source, run, run.metrics.until(checkpoint.step), checkpoint.step)


def _different(settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The settings that differ, by key and letter."""
    found = {}
    keys = sorted({key for own in settings.values() for key in own})
    above = {key[:place] for key in keys for place, char in enumerate(key) if char == "."}
    for key in keys:
        values = {letter: own[key] for letter, own in settings.items() if key in own}
        first, *others = [own.get(key, ...) for own in settings.values()]
        # By text too, because NaN is not equal to itself.
        is_different = any(value != first and repr(value) != repr(first) for value in others)
        # A list or mapping that is empty in one run and has items in another; the items are listed.
        if is_different and key not in above:
            found[key] = values
    return found


def _measures(runs: Sequence[Compared]) -> dict[str, str | None]:
    """Metrics to compare, with their modes: `checkpoint.metric`, others of validation, then those of training."""
    names = {name for side in runs for name in side.metrics.names()}
    measures: dict[str, str | None] = {}
    for best in (side.run.best for side in runs):
        if best is not None and best.name.startswith(VALIDATION) and best.name in names:
            measures.setdefault(best.name, best.mode)
    validation = [name for name in sorted(names) if name.startswith(VALIDATION) and not name.endswith(_NOT_COMPARED)]
    for name in (*validation, *(name for name in _TRAINING if name in names)):
        measures.setdefault(name, "max" if name.startswith(_SHARES) else _MODES.get(name))
    return measures


def _metric_row(runs: Sequence[Compared], name: str, mode: str | None) -> MetricRow:
    series = {side.letter: side.metrics.series(name) for side in runs}
    bests = {side.letter: side.metrics.best(name, mode) for side in runs if mode is not None}
    return MetricRow(
        name,
        mode,
        last={letter: found.values[-1] for letter, found in series.items() if found.values},
        last_step={letter: found.steps[-1] for letter, found in series.items() if found.values},
        best={letter: best for letter, best in bests.items() if best is not None},
    )


def _settings_table(settings: dict[str, dict[str, Any]], sides: Sequence[Compared]) -> Table:
    """One row per setting; a section that some run lacks, such as that of another algorithm, is one row."""
    letters = [side.letter for side in sides]
    columns = [Column(letter, overflow="fold") for letter in letters]
    table = Table(Column("setting", overflow="fold"), *columns, box=None, pad_edge=False)
    for section, keys in groupby(settings, key=lambda key: key.partition(".")[0]):
        own = {key: settings[key] for key in keys}
        if len(own) > 1 and any(section not in side.run.config for side in sides):  # of another algorithm
            counts = {letter: sum(letter in values for values in own.values()) for letter in letters}
            own = {f"{section}.*": {letter: f"{count} settings" for letter, count in counts.items() if count}}
        for key, values in own.items():
            shown = (_shown_setting(values[letter]) if letter in values else UNSET for letter in letters)
            table.add_row(Text(visible(key)), *(Text(visible(text)) for text in shown))
    return table


def _shown_setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _metrics_table(comparison: Comparison, rows: Sequence[MetricRow], letters: Sequence[str]) -> Table:
    first, *others = letters
    table = Table(Column("metric", overflow="fold"), "", box=None, pad_edge=False)
    for letter in letters:
        table.add_column(letter, justify="right", no_wrap=True)
    for letter in others:
        table.add_column(f"{letter} - {first}", justify="right", no_wrap=True)
    for row in rows:
        values = comparison.values(row)
        for kind in ("last", "best") if row.best else ("last",):
            found = [values.get(letter, {}) for letter in letters]
            table.add_row(
                Text(visible(row.name if kind == "last" else "")),
                kind,
                *(_shown_value(own, kind) for own in found),
                *(shown_number(own.get(f"{kind}_difference"), with_sign=True) for own in found[1:]),
            )
    return table


def _shown_value(own: dict[str, Any], kind: str) -> str:
    return f"{shown_number(own[kind])} @{own[f'{kind}_step']}" if kind in own else "-"
