"""What a person sees of a run: a progress line while it trains, a summary at its end."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

SHOWN = {"reward": "reward {:.3f}", "nll": "nll {:.3f}", "accuracy": "accuracy {:.3f}", "tokens_per_s": "{:,.0f} tok/s"}
HEADLINES = ("accuracy", "reward", "loss")
"""Validation metrics worth a line, the best known first."""
INNER_PHASES = frozenset({"forward", "backward", "optimizer", "logprobs"})
"""Spans inside of another phase; the summary adds up the outer ones."""


class RunDisplay:
    """Shows a run on a terminal; elsewhere it writes a line now and then."""

    def __init__(self, max_steps: int, console: Console | None = None):
        self.console = console or Console()
        self._max_steps = max_steps
        self._validations: dict[int, dict[str, float]] = {}
        self._seconds_of_phase: dict[str, float] = defaultdict(float)
        self._start = time.perf_counter()
        self._last_step = 0
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
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
        self._progress.console.print(escape(message))

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._validations[step] = dict(metrics)
        self.announce(f"step {step}: held-out {_headline(metrics)}")

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._last_step = step
        for name, value in metrics.items():
            phase = name.removeprefix("time/").removesuffix("_s")
            if name.startswith("time/") and phase not in INNER_PHASES:
                self._seconds_of_phase[phase] += value
        text = "  ".join(form.format(metrics[name]) for name, form in SHOWN.items() if name in metrics)
        self._progress.update(self._task, completed=step, metrics=text)
        if not self.console.is_terminal and (step % max(1, self._max_steps // 20) == 0 or step == self._max_steps):
            elapsed = time.perf_counter() - self._start
            left = elapsed / step * (self._max_steps - step)
            self.console.print(f"step {step}/{self._max_steps}  {text}  left {left:.0f} s", highlight=False)

    def summary(self, folder: Path, algorithm: str) -> None:
        """Held-out results before and after, time by phase, where everything is, what to do next."""
        console = self.console
        console.rule("[bold]summary")
        if len(self._validations) > 1:
            first, last = min(self._validations), max(self._validations)
            for name in HEADLINES:
                if name in self._validations[first] and name in self._validations[last]:
                    before, after = self._validations[first][name], self._validations[last][name]
                    console.print(
                        f"held-out {name}: [bold]{before:.3f}[/] before, [bold]{after:.3f}[/] after step {last}"
                    )
        table = Table("phase", "seconds", "share", box=None, pad_edge=False)
        total = self._seconds_of_phase.pop("step", 0.0)
        for phase, seconds in sorted(self._seconds_of_phase.items(), key=lambda item: -item[1]):
            table.add_row(phase, f"{seconds:.1f}", f"{seconds / total:.0%}" if total else "")
        console.print(table)
        console.print(f"training took {total:.0f} s of {time.perf_counter() - self._start:.0f} s")
        where = escape(str(folder))
        console.print(f"run folder: [bold]{where}[/]  (metrics.jsonl, samples/, checkpoints/, tensorboard/)")
        console.print("next:")
        if algorithm == "grpo":
            console.print(f'  lucidrl generate "{where}" "12+30="', highlight=False)
        console.print(f'  tensorboard --logdir "{where}"', highlight=False)
        console.print(
            f'  lucidrl {algorithm} --resume "{where}" {algorithm}.max_steps={2 * self._max_steps}', highlight=False
        )


def _headline(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {metrics[name]:.3f}" for name in HEADLINES if name in metrics)
