"""`lucidrl runs`: a table of runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lucidrl.errors import ConfigError
from lucidrl.report.metrics_file import VALIDATION, BestValue
from lucidrl.report.run_data import RunData, RunState, find_runs
from lucidrl.report.text import shown_bytes, shown_number, shown_seconds
from lucidrl.utils.logger.console import visible

STYLES = {RunState.RUNNING: "green", RunState.CRASHED: "red", RunState.STOPPED: "yellow", RunState.EMPTY: "dim"}


@dataclass(frozen=True)
class RunRow:
    """What the table says about a run."""

    name: str
    """Path of the run below the listed folder."""
    folder: str
    algorithm: str | None
    model: str | None
    last_step: int
    max_steps: int | None
    state: RunState
    best: BestValue | None
    started: float | None
    """Unix seconds."""
    ended: float | None
    duration_s: float | None
    size_bytes: int
    error: str | None
    problems: list[str]

    @classmethod
    def of(cls, run: RunData, root: Path) -> RunRow:
        """Read a run; the row keeps none of its records."""
        return cls(
            name=run.name if run.folder == root else str(run.folder.relative_to(root)),
            folder=str(run.folder),
            algorithm=run.algorithm,
            model=run.model,
            last_step=run.last_step,
            max_steps=run.max_steps,
            state=run.state,
            best=run.best,
            started=run.started,
            ended=run.ended,
            duration_s=run.duration_s,
            size_bytes=run.size_bytes,
            error=run.error,
            problems=run.problems,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def list_runs(folder: Path, sort: str = "name", *, reverse: bool = False) -> list[RunRow]:
    """The runs at and below a folder.

    Names, algorithms, models and states ascend; numbers descend, the newest and the best value first. Runs without a
    value come last, also if the order is reversed.

    Raises:
        ConfigError: the folder does not exist, no run is in it, or there is no such column.
    """
    if sort not in _SORT_KEYS:
        raise ConfigError(f"--sort {sort} is not a column; choose one of {', '.join(_SORT_KEYS)}")
    folder = folder.expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give a folder that holds runs, such as the run.root of a run")
    root = folder.resolve() if folder.is_symlink() else folder
    rows = [RunRow.of(run, root) for run in find_runs(root)]
    if not rows:
        raise ConfigError(f"{folder} holds no run; give a folder that holds runs, such as the run.root of a run")
    key = _SORT_KEYS[sort]
    rows.sort(key=lambda row: _natural(row.name))
    known, unknown = [row for row in rows if key(row) is not None], [row for row in rows if key(row) is None]
    return [*sorted(known, key=key, reverse=reverse), *unknown]


def runs_table(rows: Sequence[RunRow]) -> Table:
    """A table that fits 80 columns if names and models are short."""
    table = Table(
        Column("name", overflow="fold"),
        Column("algo", no_wrap=True),
        Column("model", overflow="fold"),
        Column("steps", no_wrap=True, justify="right"),
        Column("state", no_wrap=True),
        Column("best", no_wrap=True, justify="right"),
        Column("duration", no_wrap=True, justify="right"),
        Column("size", no_wrap=True, justify="right"),
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for row in rows:
        table.add_row(
            Text(visible(row.name)),
            row.algorithm or "-",
            Text(visible(short_model(row.model))),
            str(row.last_step) if row.max_steps is None else f"{row.last_step}/{row.max_steps}",
            Text(row.state, style=STYLES.get(row.state, "")),
            Text(visible(_best(row.best))),
            shown_seconds(row.duration_s),
            shown_bytes(row.size_bytes),
        )
    return table


def show_runs(console: Console, rows: Sequence[RunRow]) -> None:
    """Print the table of runs, and below it what ended crashed runs and which files are damaged."""
    console.print(runs_table(rows))
    for row in rows:
        for remark in (*([row.error] if row.error else []), *row.problems):
            console.print(Text(visible(f"{row.name}: {remark}")), soft_wrap=True)


def short_model(model: str | None) -> str:
    """The last part of a model's path; for a checkpoint, its run and step."""
    if model is None:
        return "-"
    parts = [part for part in model.split("/") if part]
    if match := re.search(r"([^/]+)/checkpoints/(step_\d+)", model):
        return f"{match[1]}/{match[2]}"
    return parts[-1] if parts else model


def _best(best: BestValue | None) -> str:
    return "-" if best is None else f"{best.name.removeprefix(VALIDATION)} {shown_number(best.value)}"


def _natural(text: str) -> list[tuple[int, int, str]]:
    """A key that sorts exp_2 before exp_10."""
    parts = re.findall(r"\d+|\D+", text)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part.casefold()) for part in parts]


def _best_first(row: RunRow) -> tuple[str, str, float] | None:
    """Metrics in alphabetical order, and the runs of each metric with the best value first."""
    if (best := row.best) is None:
        return None
    return best.name, best.mode, best.value if best.mode == "min" else -best.value


_SORT_KEYS: dict[str, Callable[[RunRow], Any]] = {
    "name": lambda row: _natural(row.name),
    "algorithm": lambda row: row.algorithm,
    "model": lambda row: None if row.model is None else _natural(short_model(row.model)),
    "steps": lambda row: -row.last_step,
    "state": lambda row: row.state,
    "best": _best_first,
    "started": lambda row: None if row.started is None else -row.started,
    "duration": lambda row: None if row.duration_s is None else -row.duration_s,
    "size": lambda row: -row.size_bytes,
}
