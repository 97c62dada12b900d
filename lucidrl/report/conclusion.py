"""The result of a run in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from lucidrl.report.metrics_file import Series
from lucidrl.report.run_data import RunData, RunState

MEASURES = (
    ("validation/accuracy", "held-out accuracy", "max"),
    ("validation/reward", "held-out reward", "max"),
    ("validation/loss", "held-out loss", "min"),
    ("train/episode_reward", "episode reward", "max"),
    ("train/reward", "training reward", "max"),
    ("train/nll", "training loss (nll)", "min"),
    ("train/loss", "training loss", "min"),
)
"""(metric, its words, which direction is better); the first that has two values is the result of a run."""
_ENDS = {
    RunState.RUNNING: "is running: {steps} so far",
    RunState.FINISHED: "finished {steps}",
    RunState.STOPPED: "was stopped after {steps}",
    RunState.CRASHED: "crashed after {steps}",
    RunState.EMPTY: "recorded nothing",
}
_SURE = 2.0  # standard errors of a difference that is not chance
_MOST_WINDOW = 20


def conclusion(run: RunData) -> str:
    """What became of the run, and what it learned."""
    total = "" if run.max_steps is None else f" of {run.max_steps:,}"
    end = _ENDS[run.state].format(steps=f"{run.last_step:,}{total} steps")
    learned = result(run)
    return f"The run {end}{_reason(run)}. {learned[0].upper()}{learned[1:]}."


def _reason(run: RunData) -> str:
    if run.state is not RunState.CRASHED:
        return ""
    return f" with {run.error}" if run.error else ", because its driver was killed"


def result(run: RunData) -> str:
    """The change of the run's main metric, and whether it is more than chance."""
    for name, words, better in MEASURES:
        series = finite(run.series(name))
        if len(series.steps) < 2:
            continue
        words = words.replace("held-out", "greedy") if run.algorithm == "ppo" else words
        if name.startswith("validation/"):
            return _validated(run, words, better, series)
        return _trained(words, better, series)
    return "no metric has two values yet, so there is no result"


def finite(series: Series) -> Series:
    pairs = [pair for pair in zip(series.steps, series.values, strict=True) if math.isfinite(pair[1])]
    return Series([step for step, _ in pairs], [value for _, value in pairs])


def _validated(run: RunData, words: str, better: str, series: Series) -> str:
    first, last = series.values[0], series.values[-1]
    text = f"{words} went from {_number(first)} at step {series.steps[0]} to {_number(last)} at step {series.steps[-1]}"
    best = (min if better == "min" else max)(series.values)
    if best != last and best != first:
        text += f", best {_number(best)} at step {series.steps[series.values.index(best)]}"
    count = run.setting("validation", "num_prompts")
    if "accuracy" in words and type(count) is int and count > 0:
        error = math.sqrt((first * (1 - first) + last * (1 - last)) / count) if min(first, last) >= 0 else 0.0
        if abs(last - first) <= _SURE * error:
            return f"{text}: a change within the chance of {count} prompts"
    return f"{text}: {_change(first, last, better)}"


def _trained(words: str, better: str, series: Series) -> str:
    """Compare the first and the last steps, because single steps are noisy."""
    window = min(_MOST_WINDOW, max(1, len(series.values) // 4))
    early, late = series.values[:window], series.values[-window:]
    before, after = fmean(early), fmean(late)
    means = f"means of the first and last {window} steps" if window > 1 else "first and last step"
    text = f"{words} went from {_number(before)} to {_number(after)} ({means})"
    if window > 1 and abs(after - before) <= _SURE * math.hypot(_error(early), _error(late)):
        return f"{text}: a change within the noise of the steps"
    return f"{text}: {_change(before, after, better)}"


def _error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values))


def _number(value: float) -> str:
    return f"{value:.3f}" if 0.01 <= abs(value) < 100 else f"{value:.4g}"


def _change(before: float, after: float, better: str) -> str:
    if before == after:
        return "no change"
    return "better" if (after > before) == (better == "max") else "worse"


def comparison(runs: Sequence[RunData]) -> str | None:
    """Which of several runs ends best by the first metric that all of them have; None without such a metric."""
    for name, words, better in MEASURES:
        series = [finite(run.series(name)) for run in runs]
        if not all(found.steps for found in series):
            continue
        ends = [found.values[-1] for found in series]
        order = sorted(range(len(runs)), key=lambda index: ends[index], reverse=better == "max")
        listed = ", ".join(f"{runs[index].name} {_number(ends[index])}" for index in order)
        if len(set(ends)) == 1:
            return f"All runs end with the same {words}: {_number(ends[0])}."
        return f"Last {words}, best first: {listed}."
    return None
