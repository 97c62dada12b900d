"""What `lucidrl eval` prints: progress on a terminal, a table of estimates, comparisons in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from lucidrl.algorithms.estimates import CONFIDENCE, Estimate
from lucidrl.errors import ConfigError
from lucidrl.recipes.eval_plan import EvalOptions, EvalPlan, TextConfig, plan_of_config, plan_of_sources
from lucidrl.recipes.evaluate import EvalReport, EvalResult, run_plan
from lucidrl.recipes.inputs import PythonInputs

MOST_CATEGORIES = 50
"""Most categories of --by that are printed; result.json has all of them."""


class EvalDisplay:
    """Shows the progress of an evaluation on a terminal; elsewhere prints one line per model."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("prompts, left"),
            TimeRemainingColumn(),
            console=console,
            disable=console.quiet or not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("", total=None, visible=False)

    def __enter__(self) -> EvalDisplay:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def on_start(self, name: str, num_finished: int, num_prompts: int) -> None:
        if num_finished:
            self.announce(f"{name}: {num_finished} of {num_prompts} prompts are finished already")
        self._progress.reset(self._task, total=num_prompts, completed=num_finished, description=name, visible=True)

    def on_batch(self, num_finished: int) -> None:
        self._progress.update(self._task, completed=num_finished)

    def announce(self, message: str) -> None:
        """Print a line literally."""
        self.console.print(message, markup=False, emoji=False, highlight=False, soft_wrap=True)


def evaluate_in_program(
    sources: Sequence[str | Path],
    settings: Sequence[str],
    config: TextConfig,
    python: PythonInputs,
    display: bool,
    options: Mapping[str, Any],
) -> EvalReport:
    """Evaluate for a trainer; without sources, evaluate the model of its settings."""
    try:
        chosen = EvalOptions(**options)
    except TypeError as error:
        known = ", ".join(EvalOptions.__dataclass_fields__)
        raise ConfigError(f"evaluate: {error}; its options are {known}") from error
    plan = plan_of_sources(sources, settings, chosen, python) if sources else plan_of_config(config, chosen, python)
    console = Console(quiet=not display)
    with EvalDisplay(console) as shown:
        report = run_plan(plan, shown)
    show_report(console, plan, report)
    return report


def show_report(console: Console, plan: EvalPlan, report: EvalReport) -> None:
    """Print the results of an evaluation."""

    def say(line: str) -> None:
        console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)

    first, policy = report.result, plan.config.policy.generation
    how = (
        "greedy" if first.is_greedy else f"{first.samples_per_prompt} samples each, temperature {policy.temperature:g}"
    )
    which = f"rows of {plan.config.data.title}" if plan.uses_all_rows else "held-out prompts"
    say(f"{first.num_prompts} {which}, {how}, at most {policy.max_new_tokens} tokens")
    if len(report.results) == 1:
        console.print(_estimates_table(first))
    else:
        console.print(_models_table(report.results, named_by_letter=bool(report.comparisons)))
    for result in report.results:
        if result.by:
            console.print(_categories_table(plan.options.by or "", result, len(report.results) > 1))
            if len(result.by) > MOST_CATEGORIES:
                say(f"{len(result.by) - MOST_CATEGORIES} more categories are in result.json")
    for comparison in report.comparisons:
        say(f"{comparison.name}: {comparison.sentence()} (paired, {comparison.num_prompts} prompts)")
    for result in report.results:
        say(_remarks(result) if len(report.results) == 1 else f"{result.name}: {_remarks(result)}")
        for sentence in gaps(result):
            say(sentence if len(report.results) == 1 else f"{result.name}: {sentence}")
    for result in report.results:
        say(f"results: {result.folder}")


def _estimates_table(result: EvalResult) -> Table:
    """One row per estimate, with the metrics of the environment below."""
    interval = f"{100 * CONFIDENCE:.0f} % interval"
    table = Table(result.name, Column("value", justify="right"), interval, box=None, pad_edge=False)
    for name, estimate in _shown(result.estimates).items():
        table.add_row(
            _title(name), f"{estimate.value:.3f}", f"[{estimate.low:.3f}, {estimate.high:.3f}]".replace("[", r"\[")
        )
    others = ("turns", "truncated_fraction", "dropped_samples", "sampled_tokens")
    for name, value in result.metrics.items():
        if name not in result.estimates and name not in others and not name.startswith("answer_tokens"):
            table.add_row(Text(name), f"{value:.3f}", "")
    return table


def _models_table(results: Sequence[EvalResult], *, named_by_letter: bool) -> Table:
    """One row per model."""
    names = _headlines(results[0].estimates)
    columns = [Column(_title(name), no_wrap=True) for name in names]
    tokens, cut = Column("tokens", justify="right"), Column("truncated", justify="right")
    table = Table(Column("model", overflow="fold"), *columns, tokens, cut, box=None, pad_edge=False)
    for number, result in enumerate(results):
        name = f"{'AB'[number]}  {result.name}" if named_by_letter else result.name
        cells = [Text(str(result.estimates[name])) for name in names]
        metrics = result.metrics
        table.add_row(Text(name), *cells, f"{metrics['answer_tokens']:.1f}", f"{metrics['truncated_fraction']:.1%}")
    return table


def _categories_table(column: str, result: EvalResult, is_one_of_several: bool) -> Table:
    names = _headlines(result.estimates)
    title = f"{result.name}, {column}" if is_one_of_several else column
    columns = [Column(_title(name), no_wrap=True) for name in names]
    table = Table(
        Column(Text(title), overflow="fold"), Column("prompts", justify="right"), *columns, box=None, pad_edge=False
    )
    for category in list(result.by)[:MOST_CATEGORIES]:
        cells = [Text(str(result.by[category][name])) for name in names]
        table.add_row(Text(category), str(result.category_sizes[category]), *cells)
    return table


def _shown(estimates: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """The estimates to print: with several samples, avg@k is the accuracy."""
    has_average = any(name.startswith("avg_at") for name in estimates)
    return {name: one for name, one in estimates.items() if name != "accuracy" or not has_average}


def _headlines(estimates: Mapping[str, Estimate]) -> list[str]:
    """The estimates that fit a line: accuracy or avg@k, the last pass@k, maj@k; else the reward."""
    names = list(estimates)
    passes = [name for name in names if name.startswith("pass_at")]
    others = [name for name in names if name.startswith(("avg_at", "maj_at"))]
    return [*others[:1], *passes[-1:], *others[1:]] or ["accuracy", "reward"]


def _title(name: str) -> str:
    return name.replace("_at_", "@")


def gaps(result: EvalResult) -> list[str]:
    """Say which estimates rest on fewer prompts than were evaluated."""
    names_of: dict[int, list[str]] = {}
    for name, estimate in _shown(result.estimates).items():
        if estimate.num_prompts < result.num_prompts:
            names_of.setdefault(estimate.num_prompts, []).append(_title(name))
    return [
        f"{' and '.join(names)} {'rest' if len(names) > 1 else 'rests'} on {number} of {result.num_prompts} prompts, "
        "because samples of the others were dropped"
        for number, names in names_of.items()
    ]


def _remarks(result: EvalResult) -> str:
    """Lengths, and completions that were truncated, not parsed or dropped."""
    metrics = result.metrics
    median, p95, most = (metrics[f"answer_tokens_{which}"] for which in ("median", "p95", "max"))
    spread = f"median {median:g}, 95 % at most {p95:g}, longest {most:g}"
    parts = [
        f"{metrics['answer_tokens']:.1f} tokens per completion ({spread})",
        f"{metrics['truncated_fraction']:.1%} truncated",
    ]
    failures = [value for name, value in metrics.items() if name.endswith("parse_failure")]
    if "answered" in metrics:  # a metric of reasoning_gym
        failures.append(1 - metrics["answered"])
    parts += [f"{value:.1%} failed to parse" for value in failures]
    if metrics["dropped_samples"]:
        parts.append(f"{metrics['dropped_samples']:g} samples dropped")
    return ", ".join(parts)
