"""Reads a run folder: settings, metrics, state, and lists of its other files. Changes nothing in the folder."""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from lucidrl.algorithms.config import ALGORITHM_NAMES
from lucidrl.checkpoint.config import CONFIG_NAME
from lucidrl.errors import ConfigError
from lucidrl.report.driver_log import Session, read_sessions
from lucidrl.report.finding import found_below, run_settings
from lucidrl.report.folder_parts import (
    RunWarning,
    SamplesFile,
    SavedCheckpoint,
    list_checkpoints,
    list_samples,
    read_warnings,
)
from lucidrl.report.metrics_file import BestValue, Metrics, Record, Series, read_metrics
from lucidrl.utils.logger.redact import redacted
from lucidrl.utils.run_folder import (
    DRIVER_LOG_NAME,
    LOCK_NAME,
    LOGS_NAME,
    METRICS_NAME,
    TRACES_NAME,
    entries_in,
    is_occupied,
    size_bytes,
)

_OTHER_MEASURES = (
    ("validation/reward", "max"),
    ("validation/loss", "min"),
    ("train/reward", "max"),
    ("train/episode_reward", "max"),
    ("train/loss", "min"),
)
"""Metrics that measure a run without `checkpoint.metric`, the first that it recorded."""


class RunState(StrEnum):
    """What became of a run."""

    RUNNING = "running"
    """A process holds its lock."""
    FINISHED = "finished"
    """It completed its last step."""
    STOPPED = "stopped"
    """It was asked to stop before its last step, or its `max_steps` was raised since."""
    CRASHED = "crashed"
    """An error ended it, or its driver was killed."""
    EMPTY = "empty"
    """It recorded nothing."""


@dataclass(frozen=True)
class RunData:
    """A run folder as it is now.

    Each file is read when it is first needed, and only once; call `read_run` again to see what a running run wrote
    since. Missing and damaged files leave their part empty, and `problems` names them.
    """

    folder: Path
    config: Mapping[str, Any]
    """Settings as in `config.yaml`: references to environment variables are not resolved. Secrets are redacted."""
    config_problem: str | None = None

    @property
    def name(self) -> str:
        """The last part of the folder's path."""
        return self.folder.resolve().name

    @property
    def algorithm(self) -> str | None:
        """`grpo`, `distill`, `sft` or `ppo`; None without settings."""
        return next((name for name in ALGORITHM_NAMES if isinstance(self.config.get(name), dict)), None)

    @property
    def model(self) -> str | None:
        """The model that was trained; for a control policy, the name of its environment."""
        for section, key in (("policy", "model_name"), ("env", "name")):
            if value := self.setting(section, key):
                return str(value)
        return None

    @property
    def max_steps(self) -> int | None:
        """Training steps of the run, by its settings."""
        steps = self.setting(self.algorithm or "", "max_steps")
        return steps if type(steps) is int else None

    def setting(self, *keys: str) -> Any:
        """A setting by its path of keys; None if it is not set."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    @cached_property
    def metrics(self) -> Metrics:
        """Records by step, and measurements of the machine."""
        return self._read_metrics[0]

    @property
    def records(self) -> list[Record]:
        """One flat record per step; see `Metrics`."""
        return self.metrics.records

    @property
    def last_step(self) -> int:
        """The last completed training step; 0 if there is none."""
        return self.metrics.last_step or max((saved.step for saved in self.checkpoints), default=0)

    def series(self, name: str) -> Series:
        """The numbers of a metric by step."""
        return self.metrics.series(name)

    @cached_property
    def best(self) -> BestValue | None:
        """The best value of `checkpoint.metric` in validation, else of another measure of the run."""
        metric, mode = self.setting("checkpoint", "metric"), self.setting("checkpoint", "mode")
        own = ((f"validation/{metric}", "min" if mode == "min" else "max"),) if isinstance(metric, str) else ()
        found = (self.metrics.best(*measure) for measure in (*own, *_OTHER_MEASURES))
        return next((best for best in found if best is not None), None)

    @cached_property
    def warnings(self) -> list[RunWarning]:
        """Warnings in the order in which they were recorded."""
        return read_warnings(self.folder)

    @cached_property
    def samples(self) -> list[SamplesFile]:
        """Files of samples by step."""
        return list_samples(self.folder)

    @cached_property
    def checkpoints(self) -> list[SavedCheckpoint]:
        """Checkpoints by step."""
        return list_checkpoints(self.folder)

    @cached_property
    def traces(self) -> list[Path]:
        """Files in the folder of traces, sorted by name."""
        return [Path(entry) for entry in entries_in(self.folder / TRACES_NAME) if entry.is_file(follow_symlinks=False)]

    @cached_property
    def sessions(self) -> list[Session]:
        """Starts of the run, oldest first; none if it has no driver's log."""
        return read_sessions(self.folder / LOGS_NAME / DRIVER_LOG_NAME)

    @property
    def started(self) -> float | None:
        """When the run was first started, in Unix seconds; without a driver's log, when it first recorded anything."""
        return self.sessions[0].start if self.sessions else next(iter(self.metrics.times), None)

    @property
    def ended(self) -> float | None:
        """When the run ended, in Unix seconds; if it was killed, when it last recorded anything; None if it runs."""
        if self.state is RunState.RUNNING:
            return None
        logged = self.sessions[-1].end if self.sessions else None
        return logged or next(reversed(self.metrics.times), None)

    @property
    def duration_s(self) -> float | None:
        """Seconds for which a driver worked on the run, without the time between an end and a resume."""
        times, now = sorted(self.metrics.times), time.time() if self.state is RunState.RUNNING else None
        if not self.sessions:
            return (now or times[-1]) - times[0] if times else None
        following = [session.start for session in self.sessions[1:]]
        total = 0.0
        for session, until in zip(self.sessions, [*following, now or math.inf], strict=True):
            recorded = times[: bisect_left(times, until)]
            end = session.end or (until if until == now else max([session.start, *recorded[-1:]]))
            total += max(0.0, end - session.start)
        return total

    @cached_property
    def size_bytes(self) -> int:
        """Size on disk of all files in the folder; links count 0."""
        return size_bytes(self.folder)

    @cached_property
    def state(self) -> RunState:
        """What became of the run, by its lock, the driver's log, and else its last step and newest checkpoint."""
        if is_occupied(self.folder):
            return RunState.RUNNING
        newest_saved = max((saved.step for saved in self.checkpoints), default=0)
        last = self._last_session
        is_killed = (self.folder / LOCK_NAME).exists() or (last is not None and last.end is None)
        if is_killed or (last is not None and last.error is not None and not last.is_interrupted):
            return RunState.CRASHED
        if not self.records and not newest_saved:
            return RunState.EMPTY
        if self.max_steps is not None and self.last_step >= self.max_steps:
            return RunState.FINISHED
        is_logged = last is not None
        # A run that is asked to stop saves its last step.
        return RunState.STOPPED if is_logged or newest_saved == self.last_step else RunState.CRASHED

    @property
    def error(self) -> str | None:
        """The error that ended the run; None if there was none, or if the driver was killed."""
        last = self._last_session
        return last.error if last is not None and self.state is RunState.CRASHED else None

    @property
    def _last_session(self) -> Session | None:
        """The last session, without resumes that failed before they recorded anything."""
        newest = max(self.metrics.times, default=0.0)
        effective = [session for session in self.sessions[1:] if not session.error or session.start <= newest]
        return next(reversed([*self.sessions[:1], *effective]), None)

    @property
    def problems(self) -> list[str]:
        """Sentences about missing and damaged files."""
        skipped = self.metrics.num_unreadable_lines
        lines = f"{skipped} line{'s' * (skipped > 1)} of {METRICS_NAME} cannot be read" if skipped else None
        return [problem for problem in (self.config_problem, self._read_metrics[1], lines) if problem]

    @cached_property
    def _read_metrics(self) -> tuple[Metrics, str | None]:
        try:
            return read_metrics(self.folder / METRICS_NAME), None
        except OSError as error:
            return Metrics(), f"{METRICS_NAME} cannot be read ({error.strerror})"


def read_run(folder: str | Path) -> RunData:
    """Read a run folder, of any version and in any state.

    Raises:
        ConfigError: the folder does not exist or holds no run.
    """
    folder = Path(folder).expanduser()
    if (run := _run_or_none(folder.resolve() if folder.is_symlink() else folder)) is not None:
        return run
    problem = "has neither the settings nor the metrics of a run" if folder.is_dir() else "does not exist"
    raise ConfigError(f"{folder} is not a run folder: it {problem}; choose one that `lucidrl runs` lists")


def load_metrics(run: str | Path) -> list[Record]:
    """Return the metrics of a run: the last record of each step, as flat mappings, sorted by step.

    A record has `step`, `time` (Unix seconds), and all metrics of the step by name: those of training, of its
    validation if any, and the newest measurement of the machine since the step before. NaN and infinities are floats.

    Example:
        >>> frame = pandas.DataFrame(lucidrl.load_metrics("runs/grpo/exp_001"))

    Raises:
        ConfigError: the folder does not exist or holds no run.
    """
    return read_run(run).records


def find_runs(folder: Path) -> Iterator[RunData]:
    """The runs at and below a folder, sorted by path; follows no links."""
    return found_below(folder, _run_or_none)


def _run_or_none(folder: Path) -> RunData | None:
    """The run in a folder; None without settings of a run and without metrics."""
    settings = run_settings(folder)
    if settings is not None:
        return RunData(folder, redacted(settings))
    if not os.path.isfile(folder / METRICS_NAME):
        return None
    path = folder / CONFIG_NAME
    if not os.path.lexists(path):
        problem = "is missing"
    else:
        problem = (
            "has no settings of a run" if os.access(path, os.R_OK) else "cannot be read; only its owner can read it"
        )
    return RunData(folder, {}, f"{CONFIG_NAME} {problem}")
