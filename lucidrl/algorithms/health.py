"""Warnings about a run that does not learn.

A rule reads the metrics of several steps, newest last. It returns a warning that names the setting to change, or None.
`HealthMonitor` keeps the metrics, applies the rules, and repeats a warning only after many steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

Metrics = Mapping[str, float]

CONSTANT_STEPS = 5
"""Steps with the same reward for all samples before a warning."""
SILENT_STEPS = 10
"""Steps without a group of different rewards before a warning."""
MOST_TRUNCATED = 0.25
"""Warn above this fraction of truncated completions."""
MOST_DROPPED = 0.25
"""Warn above this fraction of dropped samples."""
COLLAPSED_ENTROPY = 0.1
"""Warn when the entropy falls below this fraction of the first steps' entropy."""
SOLVED = 0.9
"""Low entropy needs no warning if the mean reward lies above this fraction of the range of rewards."""
FEW, WINDOW = 5, 20
"""FEW: steps in a mean over the first or last steps; WINDOW: newest steps that the monitor keeps."""
FIRST_SILENCE_STEPS = 50
"""Steps before a warning is repeated; doubled with every repetition."""


@dataclass(frozen=True)
class RunWarning:
    """A warning about a run, and the name of the rule that returned it."""

    name: str
    message: str


@dataclass(frozen=True)
class HealthSettings:
    """Settings of the run that the rules read and that their warnings name."""

    max_new_tokens: int
    samples_per_prompt: int
    rows_per_step: int
    temperature: float
    entropy_coefficient: float = 0.0
    has_group_baseline: bool = True
    """Whether advantages compare samples of the same prompt, rather than all samples of the batch."""
    has_teacher: bool = False
    """Whether the policy learns from a teacher too: then equal rewards, or a falling entropy, are no fault."""


def constant_reward(history: Sequence[Metrics], settings: HealthSettings) -> str | None:
    last = history[-CONSTANT_STEPS:]
    rewards = {metrics.get(name, math.nan) for metrics in last for name in ("reward_min", "reward_max")}
    if len(last) < CONSTANT_STEPS or len(rewards) > 1 or math.isnan(min(rewards)):
        return None
    return (
        f"all samples of the last {CONSTANT_STEPS} steps got the reward {min(rewards):g}: there is nothing to learn; "
        "read samples/ to see what is scored, and check the reward (env.name, reward); if the reward is right, reward "
        "partial success, choose easier prompts, or train on reference answers first with `lucidrl sft`"
    )


def no_signal(history: Sequence[Metrics], settings: HealthSettings) -> str | None:
    last = history[-SILENT_STEPS:]
    is_silent = all(metrics.get("groups_with_signal_fraction", 1.0) == 0 for metrics in last)
    if len(last) < SILENT_STEPS or not is_silent or not settings.has_group_baseline:
        return None
    count = settings.samples_per_prompt
    if count == 1:
        return (
            f"no group had different rewards in the last {SILENT_STEPS} steps, because collector.samples_per_prompt=1 "
            "compares each sample with itself; set collector.samples_per_prompt=8, or grpo.advantages.estimator=plain"
        )
    return (
        f"no group had different rewards in the last {SILENT_STEPS} steps, so the policy gradient is 0; raise "
        f"collector.samples_per_prompt={count} or policy.generation.temperature={settings.temperature:g}, or choose "
        "prompts that the policy solves sometimes"
    )


def truncated(history: Sequence[Metrics], settings: HealthSettings) -> str | None:
    fraction = _mean(history[-FEW:], "truncated_fraction")
    if not fraction > MOST_TRUNCATED:
        return None
    return (
        f"{fraction:.0%} of completions were truncated at policy.generation.max_new_tokens={settings.max_new_tokens} "
        "or at the end of the context; raise policy.generation.max_new_tokens, or ask for shorter answers"
    )


def dropped(history: Sequence[Metrics], settings: HealthSettings) -> str | None:
    fraction = _mean(history[-FEW:], "dropped_samples") / settings.rows_per_step
    if not fraction > MOST_DROPPED:
        return None
    return (
        f"{fraction:.0%} of samples were dropped, because the environment could not score them (env.on_error=drop); "
        "see logs/, fix the environment or raise env.timeout_s"
    )


def entropy_collapse(history: Sequence[Metrics], settings: HealthSettings) -> str | None:
    last = history[-FEW:]
    entropy, at_first = _mean(last, "entropy_estimate"), _mean(history[:FEW], "entropy_estimate")
    if len(history) < 2 * FEW or not entropy < COLLAPSED_ENTROPY * at_first:
        return None
    lowest = min(metrics.get("reward_min", math.nan) for metrics in history)
    highest = max(metrics.get("reward_max", math.nan) for metrics in history)
    if _mean(last, "reward") >= lowest + SOLVED * (highest - lowest):
        return None
    return (
        f"the entropy of the policy fell from {at_first:.3g} to {entropy:.3g} nats per token before the task is "
        "solved, so samples of a prompt hardly differ; raise grpo.loss.entropy_coefficient="
        f"{settings.entropy_coefficient:g}, grpo.loss.clip_high or policy.generation.temperature="
        f"{settings.temperature:g}, or lower the learning rate"
    )


Rule = Callable[[Sequence[Metrics], HealthSettings], str | None]
RULES: dict[str, Rule] = {
    "constant_reward": constant_reward,
    "no_signal": no_signal,
    "truncated": truncated,
    "dropped": dropped,
    "entropy_collapse": entropy_collapse,
}
"""Rules by name."""
OF_REWARDS = ("constant_reward", "no_signal", "entropy_collapse")
"""Rules for policies that learn from rewards alone."""
IMPLIED = {"no_signal": "constant_reward"}
"""A rule is silent while the rule that implies it warns: constant rewards imply groups without signal."""


class HealthMonitor:
    """Applies the rules to the steps of a run."""

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self._first: list[Metrics] = []
        self._last: deque[Metrics] = deque(maxlen=WINDOW)
        self._silent_until: dict[str, int] = {}
        self._silence: dict[str, int] = {}

    def observe(self, step: int, metrics: Metrics) -> list[RunWarning]:
        """Return the warnings that are due after a step."""
        if len(self._first) < FEW:
            self._first.append(metrics)
        else:
            self._last.append(metrics)
        history = [*self._first, *self._last]
        rules = {name: rule for name, rule in RULES.items() if not (self._settings.has_teacher and name in OF_REWARDS)}
        found = {name: message for name, rule in rules.items() if (message := rule(history, self._settings))}
        due = [name for name in found if IMPLIED.get(name) not in found and step >= self._silent_until.get(name, 0)]
        for name in due:
            self._silence[name] = 2 * self._silence.get(name, FIRST_SILENCE_STEPS // 2)
            self._silent_until[name] = step + self._silence[name]
        return [RunWarning(name, found[name]) for name in due]


def _mean(history: Sequence[Metrics], name: str) -> float:
    """Mean of a metric; NaN, for which every comparison is false, if the metric has no values."""
    values = [metrics[name] for metrics in history if not math.isnan(metrics.get(name, math.nan))]
    return fmean(values) if values else math.nan
