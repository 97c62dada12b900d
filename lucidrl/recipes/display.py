"""What a person sees of a run: a progress line while it trains, a summary at its end."""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from lucidrl.data.interfaces import LLMMessageLogType
from lucidrl.recipes.profile import TRACES_NAME
from lucidrl.utils.logger import print_message_log_samples

SHOWN = {
    "reward": "reward {:.3f}",
    "accuracy": "accuracy {:.3f}",
    "nll": "nll {:.3f}",
    "episode_reward": "episode reward {:.1f}",
    "tokens_per_s": "{:,.0f} tok/s",
    "frames_per_s": "{:,.0f} frames/s",
}
"""Metrics of a step that the progress line shows."""
HEADLINES = ("accuracy", "reward", "loss")
"""Validation metrics worth a line, the best known first."""
NUM_SAMPLES = 3
"""Conversations shown where samples are asked for."""
UNLISTED_PHASES = frozenset({"rollout", "reward", "forward", "backward", "optimizer", "logprobs", "reference"})
"""Spans around others or inside of them: those in between are listed, and add up to the step."""


class RunDisplay:
    """Shows a run on a terminal; elsewhere it writes a line now and then.

    Args:
        validated_on: what validation results are of.
        next_commands: what the summary suggests, before how to see more of the run and how to go on.
    """

    def __init__(
        self,
        algorithm: str,
        max_steps: int,
        folder: Path,
        console: Console | None = None,
        *,
        validated_on: str = "held-out",
        next_commands: Sequence[list[str]] = (),
    ):
        self.console = console or Console()
        self._algorithm = algorithm
        self._max_steps = max_steps
        self._folder = folder
        self._validated_on = validated_on
        self._suggested = list(next_commands)
        self._validations: dict[int, dict[str, float]] = {}
        self._seconds_of_phase: dict[str, float] = defaultdict(float)
        self._num_steps = 0
        self._start = time.perf_counter()
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[metrics]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=max_steps, metrics="")

    def __enter__(self) -> RunDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def announce(self, message: str) -> None:
        """Write a line as it is: no markup in names, and no line breaks in what may be copied."""
        self.console.print(message, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._validations[step] = dict(metrics)
        shown = "  ".join(f"{name} {metrics[name]:.3f}" for name in HEADLINES if name in metrics)
        self.announce(f"step {step}: {self._validated_on} {shown}")

    def on_samples(self, step: int, message_logs: list[LLMMessageLogType], rewards: list[float]) -> None:
        print_message_log_samples(message_logs, rewards, num_samples=NUM_SAMPLES, step=step)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._num_steps += 1
        for name, value in metrics.items():
            phase = name.removeprefix("time/").removesuffix("_s")
            if name.startswith("time/") and phase not in UNLISTED_PHASES:
                self._seconds_of_phase[phase] += value
        text = "  ".join(form.format(metrics[name]) for name, form in SHOWN.items() if name in metrics)
        self._progress.update(self._task, completed=step, metrics=text)
        if not self.console.is_terminal and (step % max(1, self._max_steps // 20) == 0 or step == self._max_steps):
            left_s = self._seconds_of_phase["step"] / self._num_steps * (self._max_steps - step)
            self.announce(f"step {step}/{self._max_steps}  {text}  left {left_s:.0f} s")

    def summary(self, last_step: int) -> None:
        """How it ended, held-out results, time by phase, where everything is, what to do next."""
        self.console.rule("[bold]summary")
        if self._num_steps == 0:
            self.announce(f"nothing to do: step {last_step} of {self._max_steps} was done and saved before")
        elif last_step < self._max_steps:
            self.announce(f"stopped after step {last_step} of {self._max_steps}, which is saved")
        self._show_validations()
        if self._num_steps:
            self.console.print(self._phases())
        self.announce(f"run folder: {self._folder}")
        entries = sorted(f"{path.name}/" if path.is_dir() else path.name for path in self._folder.iterdir())
        self.announce(f"  with {', '.join(entries)}")
        if any((self._folder / TRACES_NAME).glob("*.json")):
            self.announce(f"  {TRACES_NAME}/ has the recorded steps; ui.perfetto.dev shows its .json files")
        self.announce("next:")
        for command in self._next_commands(last_step):
            self.announce(f"  {shlex.join(command)}")

    def _show_validations(self) -> None:
        if len(self._validations) < 2:
            return
        first, last = min(self._validations), max(self._validations)
        for name in HEADLINES:
            if name in self._validations[first] and name in self._validations[last]:
                before, after = self._validations[first][name], self._validations[last][name]
                self.announce(f"{self._validated_on} {name}: {before:.3f} at step {first}, {after:.3f} at step {last}")

    def _phases(self) -> Table:
        steps = "step" if self._num_steps == 1 else "steps"
        table = Table(
            f"time of {self._num_steps} {steps}",
            Column("seconds", justify="right"),
            Column("share", justify="right"),
            box=None,
            pad_edge=False,
        )
        seconds_of = dict(self._seconds_of_phase)
        total = seconds_of.pop("step")
        rows = sorted(seconds_of.items(), key=lambda item: -item[1])
        for phase, seconds in [*rows, ("other", total - sum(seconds_of.values())), ("all steps", total)]:
            table.add_row(phase, f"{seconds:.1f}", f"{seconds / total:.0%}")
        table.add_row("whole run", f"{time.perf_counter() - self._start:.1f}", "")
        return table

    def _next_commands(self, last_step: int) -> list[list[str]]:
        folder, algorithm = str(self._folder), self._algorithm
        resume = ["lucidrl", algorithm, "--resume", folder]
        if last_step >= self._max_steps:
            resume.append(f"{algorithm}.max_steps={2 * last_step}")
        show = [["tensorboard", "--logdir", folder]] if (self._folder / "tensorboard").is_dir() else []
        return [*self._suggested, *show, resume]
