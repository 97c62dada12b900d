"""`lucidrl clean`: show the disk space of runs, and free it.

Only files that a run wrote are removed. Folders that are not runs, links, and other files in a run folder stay.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from lucidrl.algorithms.config import ALGORITHM_NAMES
from lucidrl.checkpoint.config import CHECKPOINTS_NAME, CONFIG_NAME, CheckpointConfig
from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.checkpoint.pruning import remove_part
from lucidrl.errors import CheckpointError, ConfigError
from lucidrl.report.finding import found_below, run_settings
from lucidrl.report.text import shown_bytes
from lucidrl.utils.run_folder import (
    BREAKDOWN_NAME,
    ENVIRONMENT_NAME,
    EVAL_NAME,
    LOCK_NAME,
    LOGS_NAME,
    METRICS_NAME,
    REPORT_NAME,
    SAMPLES_NAME,
    TRACES_NAME,
    WARNINGS_NAME,
    folders_in,
    is_occupied,
    occupied,
    size_bytes,
)

OPTIMIZER = "optimizer"
LOG_NAMES = (
    METRICS_NAME,
    ENVIRONMENT_NAME,
    REPORT_NAME,
    "hyperparams.json",
    "tensorboard",
    "wandb",
    "mlflow",
    "trackio",
    "plots",
    WARNINGS_NAME,
    BREAKDOWN_NAME,
    "report.html",
)
"""Metrics and the files of trackers, counted as logs."""
WRITTEN = (CHECKPOINTS_NAME, TRACES_NAME, SAMPLES_NAME, EVAL_NAME, LOGS_NAME, *LOG_NAMES, LOCK_NAME, CONFIG_NAME)
"""Files and folders that a run writes; config.yaml is last, because it marks the folder as a run until removed."""
KEEP_ALL = 2**31


@dataclass(frozen=True)
class Free:
    """What to free."""

    checkpoints: bool = True
    """Checkpoints that are neither the newest nor the best of their run."""
    optimizer: bool = False
    """The optimizer state of finished runs, which then cannot be resumed."""
    runs: bool = False
    """Whole runs."""


@dataclass(frozen=True)
class Run:
    """A run folder."""

    folder: Path
    settings: dict[str, Any] = field(repr=False)

    @property
    def algorithm(self) -> str:
        return next(name for name in ALGORITHM_NAMES if name in self.settings)

    @property
    def is_running(self) -> bool:
        return is_occupied(self.folder)

    def manager(self) -> CheckpointManager:
        """A manager of the run's checkpoints that never prunes."""
        defaults, own = CheckpointConfig(), self.settings.get("checkpoint") or {}
        metric, mode = own.get("metric", defaults.metric), own.get("mode", defaults.mode)
        return CheckpointManager(self.folder / CHECKPOINTS_NAME, keep_last=KEEP_ALL, metric=metric, mode=mode)

    def is_finished(self, newest_step: int) -> bool:
        last = self.settings[self.algorithm].get("max_steps")
        return isinstance(last, int) and newest_step >= last

    def sizes(self) -> dict[str, int]:
        """Bytes by purpose."""
        steps = folders_in(self.folder / CHECKPOINTS_NAME)
        all_bytes = size_bytes(self.folder)
        optimizer = sum(size_bytes(step / OPTIMIZER) for step in steps)
        found = {
            "weights": sum(map(size_bytes, steps)) - optimizer,
            "optimizer": optimizer,
            "traces": size_bytes(self.folder / TRACES_NAME),
            "samples": size_bytes(self.folder / SAMPLES_NAME) + size_bytes(self.folder / EVAL_NAME),
            "logs": sum(size_bytes(self.folder / name) for name in (LOGS_NAME, *LOG_NAMES)),
        }
        return {**found, "other": all_bytes - sum(found.values()), "total": all_bytes}


@dataclass(frozen=True)
class Plan:
    """What to free in one run."""

    run: Run
    items: dict[Path, int]
    """Folders to remove, with their sizes in bytes."""
    note: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(self.items.values())


def clean(paths: Sequence[Path], free: Free, *, confirm: Callable[[str], bool], console: Console | None = None) -> None:
    """Print the disk space of the runs below `paths`; free what `free` selects if `confirm` returns True.

    Raises:
        ConfigError: a path holds no run or is a link.
    """
    console = console or Console()
    runs = list(find_runs(paths))
    if free.runs and (others := [path for path in paths if path not in {run.folder for run in runs}]):
        raise ConfigError(
            f"--runs removes whole runs, but {others[0]} is not a run folder; run `lucidrl clean {others[0]}` to "
            "list the run folders in it, then name those to remove"
        )
    needed = {other: run for run in runs for other in _started_from(run)}
    plans = [_plan(run, free, needed) for run in runs]
    console.print(_table(plans))
    total = sum(plan.total_bytes for plan in plans)
    for plan in plans:
        for path, size in plan.items.items():
            console.print(f"free {shown_bytes(size):>9}  {path}", markup=False, highlight=False, soft_wrap=True)
    if total == 0:
        console.print("nothing to free" if not free.runs else "nothing to remove", highlight=False)
    elif confirm(f"free {shown_bytes(total)}?"):
        freed = sum(_carry_out(plan, free, console) for plan in plans if plan.items)
        console.print(f"freed {shown_bytes(freed)}", highlight=False)


def find_runs(paths: Iterable[Path]) -> Iterator[Run]:
    """The runs at and below paths, each once; follows no links.

    Raises:
        ConfigError: a path is a link, does not exist, or has no run at or below it.
    """
    seen: set[Path] = set()
    for path in paths:
        if path.is_symlink():
            raise ConfigError(f"{path} is a link, and links are not followed; give the folder itself")
        if not path.is_dir():
            raise ConfigError(f"{path} is not a folder; give a run folder, or a folder that holds runs")
        found = list(found_below(path, _run_or_none))
        if not found:
            raise ConfigError(f"{path} holds no run; give a run folder, or a folder that holds runs")
        for run in found:
            if run.folder.resolve() not in seen:
                seen.add(run.folder.resolve())
                yield run


def _run_or_none(folder: Path) -> Run | None:
    settings = run_settings(folder)
    return None if settings is None else Run(folder, settings)


def _started_from(run: Run) -> Iterator[Path]:
    """The checkpoint that the run started from, which it needs to resume."""
    policy = run.settings.get("policy")
    name = policy.get("model_name") if isinstance(policy, dict) else None
    if isinstance(name, str) and CHECKPOINTS_NAME in Path(name).parts:
        yield Path(name).resolve().parent


def _plan(run: Run, free: Free, needed: dict[Path, Run]) -> Plan:
    if run.is_running:
        return Plan(run, {}, "running")
    if free.runs:
        return Plan(run, {run.folder: sum(size_bytes(run.folder / name) for name in WRITTEN)})
    steps = _steps(run.folder)
    if not steps:
        return Plan(run, {}, "no checkpoint")
    items, notes, state = {}, [], f"step {max(steps)}"
    for folder in run.manager().superseded() if free.checkpoints else ():
        if folder.resolve() in needed:
            notes.append(f"{needed[folder.resolve()].folder} starts from {folder.name}")
        else:
            items[folder] = size_bytes(folder)
    if run.is_finished(max(steps)):
        state = f"finished at step {max(steps)}"
        if free.optimizer:
            kept = [run.folder / CHECKPOINTS_NAME / f"step_{step}" for step in steps]
            parts = [folder / OPTIMIZER for folder in kept if folder not in items]
            items |= {part: size for part in parts if (size := size_bytes(part))}
    return Plan(run, items, "; ".join([state, *notes]))


def _carry_out(plan: Plan, free: Free, console: Console) -> int:
    """Free the planned space, unless a process works in the run folder; return the freed bytes."""
    run, before = plan.run, size_bytes(plan.run.folder)
    try:
        with occupied(run.folder):
            if free.runs:
                _remove_run(run.folder)
            else:
                _remove_parts(run, plan.items)
    except (ConfigError, CheckpointError, OSError) as error:
        console.print(f"{run.folder} stays: {error}", markup=False, highlight=False, soft_wrap=True)
    if free.runs and run.folder.is_dir():
        left = sorted(path.name for path in run.folder.iterdir())
        if left:
            console.print(
                f"{run.folder} stays: it still has {', '.join(left)}", markup=False, highlight=False, soft_wrap=True
            )
        else:
            run.folder.rmdir()
    return before - size_bytes(run.folder)


def _remove_parts(run: Run, items: Iterable[Path]) -> None:
    manager = run.manager()
    newest = manager.latest()
    if newest is None or newest.step != max(_steps(run.folder)):
        raise CheckpointError("the newest checkpoint is damaged, so the older ones may be needed")
    for path in items:
        if path.name == OPTIMIZER:
            remove_part(manager, path.parent, OPTIMIZER)
        elif path in manager.superseded():
            shutil.rmtree(path)


def _remove_run(folder: Path) -> None:
    for name in WRITTEN:
        path = folder / name
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path)


def _steps(folder: Path) -> list[int]:
    names = [path.name.removeprefix("step_") for path in folders_in(folder / CHECKPOINTS_NAME)]
    return [int(name) for name in names if name.isdecimal()]


def _table(plans: Sequence[Plan]) -> Table:
    columns = ("weights", "optimizer", "traces", "samples", "logs", "other", "total")
    table = Table(Column("run", overflow="fold"), box=None, pad_edge=False)
    for name in (*columns, "to free"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    sums = dict.fromkeys(columns, 0)
    for plan in plans:
        sizes = plan.run.sizes()
        sums = {name: sums[name] + sizes[name] for name in columns}
        shown = [shown_bytes(sizes[name]) for name in columns]
        table.add_row(str(plan.run.folder), *shown, shown_bytes(plan.total_bytes), plan.note)
    if len(plans) > 1:
        total = sum(plan.total_bytes for plan in plans)
        table.add_row(f"{len(plans)} runs", *(shown_bytes(sums[name]) for name in columns), shown_bytes(total), "")
    return table
