"""What would save most time in a run, in plain words, with the seconds that it would save at most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from lucidrl.utils.nsys import GENERATION, POLICY

MOST = 3
_SMALLEST_SHARE = 0.01
"""Smaller shares of a step are not worth a change."""
_TRAINING = ("forward", "backward", "optimizer", "training")
_HALVED = {
    "generation": "Generate on twice as many {workers}",
    "training": "Train on twice as many ranks (cluster.num_workers)",
    "validation": "Validate half as often (validation.every)",
    "checkpoint": "Save half as often (checkpoint.every)",
}
"""Remedies that halve a phase."""
_AVOIDED = {
    "logprobs": "Make one optimizer step per training step (policy.train_global_batch_size), which needs no separate "
    "log-probabilities,",
    "reference": "Train without a KL penalty (grpo.loss.kl_coefficient=0, grpo.advantages.kl_coefficient=0), or "
    "compute them once (dpo.reference=cached),",
    "teacher": "Score on more ranks (teacher.placement=separate, teacher.num_workers)",
    "communication": "Use fewer ranks, or larger micro-batches (policy.sequence_packing.train_mb_tokens),",
    "refit": "Generate on the ranks (policy.generation.placement=policy)",
    "logging": "Turn off trackers and slow callbacks",
    "collect": "Make the env faster",
}
"""Remedies that avoid a phase."""


@dataclass(frozen=True)
class StepMeans:
    """Mean seconds per step."""

    whole_s: float
    phases: Mapping[str, float]
    busy: Mapping[str, float]
    """By process."""


@dataclass(frozen=True)
class Opportunity:
    """A change that would save time."""

    name: str
    """A phase, or the process that is slower than its peers."""
    saved_s: float
    """Seconds per step that the change would save at most."""
    text: str
    """One or two sentences: what takes how long, and the remedy."""


def opportunities(means: StepMeans) -> list[Opportunity]:
    """Return at most three opportunities, the largest first."""
    found = [each for each in _candidates(means) if each.saved_s >= _SMALLEST_SHARE * means.whole_s]
    return sorted(found, key=lambda each: -each.saved_s)[:MOST]


def _candidates(means: StepMeans) -> Iterator[Opportunity]:
    lags = {role: _lag(means, role) for role in (POLICY, GENERATION)}
    yield from (lag for lag in lags.values() if lag is not None)
    lag_s = {role: 0.0 if lag is None else lag.saved_s for role, lag in lags.items()}
    phases = dict(means.phases)
    # A rank that lags is an opportunity by itself: the rest of the phase would stay.
    phases["training"] = max(0.0, sum(phases.pop(name, 0.0) for name in _TRAINING) - lag_s[POLICY])
    phases["generation"] = max(0.0, phases.pop("generation", 0.0) - lag_s[GENERATION])
    environment_s = phases.pop("environment", 0.0) + phases.pop("reward", 0.0)
    yield _environment(means, environment_s)
    for phase, seconds in phases.items():
        saved_s = seconds / 2 if phase in _HALVED else seconds
        yield Opportunity(phase, saved_s, _text(phase, seconds, means, "", _remedy(phase, means), saved_s))


def _environment(means: StepMeans, seconds: float) -> Opportunity:
    num_workers = sum(name.startswith("env-") for name in means.busy)
    remedy = f"Run it on more workers (env.num_workers={2 * max(num_workers, 1)})"
    waiting = " the ranks wait for it;" if any(name.startswith(f"{POLICY}-") for name in means.busy) else ""
    return Opportunity("environment", seconds, _text("environment", seconds, means, waiting, remedy, seconds))


def _lag(means: StepMeans, role: str) -> Opportunity | None:
    """The process that is slower than its peers, such as a rank on a slow machine; None if there are no peers."""
    busy = {name: seconds for name, seconds in means.busy.items() if name.startswith(f"{role}-")}
    if len(busy) < 2:
        return None
    slowest = max(busy, key=lambda name: busy[name])
    others_s = median(seconds for name, seconds in busy.items() if name != slowest)
    lag_s = busy[slowest] - others_s
    text = (
        f"{slowest}: busy {shown_s(busy[slowest])} per step, its peers {shown_s(others_s)}; they wait for it. Make it "
        f"as fast as its peers (check its machine, and whether it gets longer rows) to save up to {shown_s(lag_s)} "
        "per step"
    )
    return Opportunity(slowest, lag_s, text)


def _remedy(phase: str, means: StepMeans) -> str:
    if phase in _AVOIDED:
        return _AVOIDED[phase]
    if phase == "training" and "collect" in means.phases:  # a control task, which has no ranks
        return "Train for half as many epochs (ppo.num_epochs)"
    is_separate = any(name.startswith(f"{GENERATION}-") for name in means.busy)
    workers = "generators (policy.generation.num_workers)" if is_separate else "ranks (cluster.num_workers)"
    return _HALVED.get(phase, "Record some steps (profile.steps) to see what is slow, and speed it up").format(
        workers=workers
    )


def _text(phase: str, seconds: float, means: StepMeans, waiting: str, remedy: str, saved_s: float) -> str:
    label = "forward, backward and optimizer" if phase == "training" else phase
    taken = f"{label}: {shown_s(seconds)} of {shown_s(means.whole_s)} per step;{waiting}"
    return f"{taken.removesuffix(';')}. {remedy} to save up to {shown_s(saved_s)} per step"


def shown_s(seconds: float) -> str:
    """Seconds with two significant digits."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2g} s"
