"""Output of a run on a terminal or in a notebook: a progress line while it trains, a summary at the end."""

from __future__ import annotations

import errno
import io
import logging
import os
import shlex
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from lucidrl.data.interfaces import LLMMessageLogType
from lucidrl.recipes.base_config import command_of
from lucidrl.recipes.configs import BaseRunConfig, TextRunConfig
from lucidrl.report.breakdown import Breakdown
from lucidrl.report.folder_parts import read_warnings
from lucidrl.report.timeline import TIMELINE_NAME
from lucidrl.utils.logger import print_message_log_samples
from lucidrl.utils.run_folder import REPORT_NAME, TRACES_NAME

log = logging.getLogger(__name__)

SHOWN = {
    "reward": "reward {:.3f}",
    "accuracy": "accuracy {:.3f}",
    "nll": "nll {:.3f}",
    "episode_reward": "episode reward {:.1f}",
    "tokens_per_s": "{:,.0f} tok/s",
    "frames_per_s": "{:,.0f} frames/s",
}
"""Metrics in the progress line."""
HEADLINES = ("accuracy", "reward", "loss")
"""Validation metrics to print, in this order."""
NUM_SAMPLES = 3
"""Samples to print per validation."""
MOST_PROCESSES = 12
"""Processes whose busy time is printed."""
BAR_WIDTH = 20
"""Width of the progress bar, which is left out on a narrow terminal."""
SECONDS_BETWEEN_UPDATES = 0.2
"""Shortest time between updates of the progress line in a notebook; each update is a message to the browser."""


class RunDisplay:
    """Shows a run on a terminal or in a notebook; elsewhere prints about 20 progress lines.

    Args:
        console: where to print; with a quiet console nothing is printed, and announcements are logged.
        started: `time.perf_counter()` at the start of the run; default: now.
    """

    def __init__(
        self, config: BaseRunConfig, folder: Path, console: Console | None = None, started: float | None = None
    ):
        self.console = console or Console()
        self._line = NotebookLine() if self.console.is_jupyter and not self.console.quiet else None
        if self._line is not None:
            # Plain text: rich would make a separate HTML output of every line.
            self.console = Console(force_jupyter=False, force_terminal=False)
        self._is_from_python = isinstance(config, TextRunConfig) and bool(config.python_inputs)
        self._algorithm, self._max_steps, self._validated_on = config.algorithm, config.max_steps, config.validated_on
        self._trainer = config.trainer
        self._folder = folder
        self._validations: dict[int, dict[str, float]] = {}
        self._step_s = 0.0
        self._num_steps, self._first_step = 0, 0
        self._start = self._loaded = time.perf_counter() if started is None else started
        self._trained: float | None = None
        self._seconds_before: dict[str, float] = {}
        bar = [BarColumn(bar_width=BAR_WIDTH)] if self.console.width >= 80 + BAR_WIDTH else []
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            *bar,
            # A narrow terminal truncates only the metrics.
            TextColumn("{task.fields[metrics]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            expand=True,
            disable=self.console.quiet or not self.console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=self._max_steps, metrics="")

    def __enter__(self) -> RunDisplay:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def announce(self, message: str) -> None:
        """Print a line literally: no markup, and no line breaks in paths or commands."""
        if self.console.quiet:
            log.info("%s", message)
        self.console.print(message, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def on_loaded(self) -> None:
        """Called when loading ends and training begins."""
        self._loaded = time.perf_counter()
        self._seconds_before = _seconds_of_spans()

    def on_trained(self) -> None:
        """Called when training ends and shutdown begins."""
        self._trained = time.perf_counter()

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._validations[step] = dict(metrics)
        shown = "  ".join(f"{name} {metrics[name]:.3f}" for name in HEADLINES if name in metrics)
        self.announce(f"step {step}: {self._validated_on} {shown}")

    def on_samples(self, step: int, message_logs: list[LLMMessageLogType], rewards: list[float]) -> None:
        if self.console.quiet:
            return
        print_message_log_samples(message_logs, rewards, num_samples=NUM_SAMPLES, step=step)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._num_steps:
            self._first_step = step
        self._num_steps += 1
        self._step_s += metrics["time/step_s"]
        text = "  ".join(form.format(metrics[name]) for name, form in SHOWN.items() if name in metrics)
        self._progress.update(self._task, completed=step, metrics=text)
        left_s = self._step_s / self._num_steps * (self._max_steps - step)
        line = f"step {step}/{self._max_steps}  {text}  left {left_s:.0f} s"
        if self._line is not None:
            self._line.show(line, is_last=step == self._max_steps)
        elif not self.console.is_terminal and (step % max(1, self._max_steps // 20) == 0 or step == self._max_steps):
            self.announce(line)

    def summary(self, last_step: int, suggested: Sequence[list[str]] = ()) -> None:
        """Print the outcome, validation results, time by phase, the run folder and next commands, `suggested` first."""
        self.console.rule("[bold]summary")
        if last_step == 0:
            self.announce("stopped before the first step; nothing is saved")
        elif self._num_steps == 0:
            self.announce(f"nothing to do: the run already completed and saved step {last_step} of {self._max_steps}")
        elif last_step < self._max_steps:
            self.announce(f"stopped after step {last_step} of {self._max_steps}; the step is saved")
        self._show_validations()
        for message in _warnings_in(self._folder):
            self.announce(f"warning: {message}")
        if self._num_steps:
            self._show_times()
        self.announce(f"run folder: {self._folder}")
        entries = sorted(f"{path.name}/" if path.is_dir() else path.name for path in self._folder.iterdir())
        self.announce(f"  contains {', '.join(entries)}")
        if (self._folder / REPORT_NAME).is_file():
            self.announce(f"report: {self._folder / REPORT_NAME}")
        if (self._folder / TRACES_NAME / TIMELINE_NAME).exists():
            self.announce(f"  open {TRACES_NAME}/{TIMELINE_NAME} with ui.perfetto.dev")
        self.announce("next:")
        for command in [*suggested, *self._next_commands(last_step)]:
            self.announce(f"  {shlex.join(command)}")
        if self._is_from_python:
            self.announce(f"  {self._trainer}(...).train(resume={str(self._folder)!r})")

    def _show_validations(self) -> None:
        if len(self._validations) < 2:
            return
        first, last = min(self._validations), max(self._validations)
        for name in HEADLINES:
            if name in self._validations[first] and name in self._validations[last]:
                before, after = self._validations[first][name], self._validations[last][name]
                self.announce(f"{self._validated_on} {name}: {before:.3f} at step {first}, {after:.3f} at step {last}")

    def _show_times(self) -> None:
        """Print where the time of this process went, how busy each process was, and what would save time."""
        breakdown = Breakdown.read(self._folder, self._first_step)
        self.console.print(self._time_table(breakdown))
        shares = breakdown.busy_share()
        if len(shares) > 1:
            shown = [f"{name} {share:.0%}" for name, share in shares.items()][:MOST_PROCESSES]
            rest = f" and {len(shares) - MOST_PROCESSES} more" if len(shares) > MOST_PROCESSES else ""
            self.announce(f"busy: {', '.join(shown)}{rest}")
        if found := breakdown.opportunities():
            self.announce("largest savings:")
        for opportunity in found:
            self.announce(f"  {opportunity.text}")

    def _time_table(self, breakdown: Breakdown) -> Table:
        """Return the time table: top-level rows sum to the total, indented rows to `steps`."""
        now = time.perf_counter()
        whole = now - self._start
        phases = breakdown.seconds()
        has_workers = len(breakdown.busy) > 1
        validation_s = _seconds_of_spans().get("validate", 0.0) - self._seconds_before.get("validate", 0.0)
        rows = {
            "loading": self._loaded - self._start,
            "first validation": max(0.0, validation_s - phases.get("validation", 0.0)),  # before the first step
            "steps": sum(breakdown.whole_s),
            "shutdown": now - (self._trained or now),
        }
        table = Table(
            f"time of {self._num_steps} {'step' if self._num_steps == 1 else 'steps'}",
            Column("seconds", justify="right"),
            Column("share", justify="right"),
            *(["process"] if has_workers else []),
            box=None,
            pad_edge=False,
        )
        for name, seconds in {**rows, "other": whole - sum(rows.values()), "total": whole}.items():
            table.add_row(name, f"{seconds:.1f}", f"{seconds / whole:.0%}")
            for phase, part in phases.items() if name == "steps" else ():
                process = [breakdown.most_waited_for(phase)] if has_workers else []
                table.add_row(f"  {phase}", f"{part:.1f}", f"{part / whole:.0%}", *process)
        return table

    def _next_commands(self, last_step: int) -> list[list[str]]:
        folder, algorithm = str(self._folder), self._algorithm
        resume = ["lucidrl", command_of(algorithm), "--resume", folder]
        if last_step >= self._max_steps:
            resume.append(f"{algorithm}.max_steps={2 * last_step}")
        show = [["tensorboard", "--logdir", folder]] if (self._folder / "tensorboard").is_dir() else []
        return show if self._is_from_python else [*show, resume]


class NotebookLine:
    """A line in the output of a notebook cell that is updated in place."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown_s = 0.0

    def show(self, text: str, *, is_last: bool) -> None:
        """Replace the shown text; a call too soon after the last update is skipped, unless `is_last`."""
        now = time.perf_counter()
        if self._handle is not None and now - self._shown_s < SECONDS_BETWEEN_UPDATES and not is_last:
            return
        self._shown_s = now
        if self._handle is None:
            from IPython.display import display

            self._handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)


def _warnings_in(folder: Path) -> list[str]:
    """Return all warnings from before the first step and, of the later ones, the newest with each name."""
    # Warnings before the first step are distinguished by message, because several share a name.
    newest = {one.name if one.step else one.message: one.message for one in read_warnings(folder)}
    return list(newest.values())


def _seconds_of_spans() -> dict[str, float]:
    """Return the total seconds of all spans of this process, by name."""
    from lucidrl.profiling.spans import recorder

    return {name: total.seconds for name, total in recorder.totals().items()}


def survive_closed_output() -> None:
    """From now on, discard output instead of raising when the pipe is closed or the terminal hangs up."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            descriptor = stream.fileno()
            mode = os.fstat(descriptor).st_mode
        except (AttributeError, OSError, ValueError):  # closed, or not a file at all
            continue
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)):
            continue
        stream.flush()
        raw = io.BufferedWriter(_SurvivingFile(descriptor, "w", closefd=False))
        is_terminal = raw.isatty()
        setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=is_terminal))


class _SurvivingFile(io.FileIO):
    """A file that is redirected to /dev/null when its reader has closed it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # also for everything else that writes to this descriptor
            os.close(nowhere)
            return len(data)
