"""Estimates from several samples per prompt: accuracy, pass@k, maj@k, bootstrap intervals, paired comparisons.

Shapes: P prompts, R resamples.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lucidrl.collectors.rollouts import FinishedSample, mean

CONFIDENCE = 0.95
NUM_RESAMPLES = 2000
_MOST_DRAWN = 4_000_000
"""Most prompts drawn at a time, which limits the memory."""

Group = Sequence[FinishedSample]
"""The samples of one prompt."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, with the bounds of its confidence interval."""

    value: float
    low: float
    high: float
    num_prompts: int
    """Prompts that the estimate rests on; a prompt with too few scored samples is left out."""

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Comparison:
    """The paired difference B - A of a metric on the same prompts."""

    name: str
    difference: Estimate
    num_differing: int
    """Prompts on which A and B differ."""

    @property
    def num_prompts(self) -> int:
        """Prompts that are compared."""
        return self.difference.num_prompts

    @property
    def is_shown(self) -> bool:
        """Whether the interval excludes 0 and enough prompts differ.

        By chance, n differing prompts all favour the same model with probability 2 / 2^n; enough prompts differ if this
        is below 1 - CONFIDENCE.
        """
        excludes_zero = self.difference.low > 0 or self.difference.high < 0
        return excludes_zero and 2.0 ** (1 - self.num_differing) < 1 - CONFIDENCE

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        known = {"num_prompts": self.num_prompts, "is_shown": self.is_shown, "sentence": self.sentence()}
        return {**asdict(self), **known}

    def sentence(self) -> str:
        """Return the result of the comparison in words."""
        low, high, value = self.difference.low, self.difference.high, self.difference.value
        level = f"{CONFIDENCE:.0%}".replace("%", " %")
        if self.num_differing == 0:
            return f"no difference can be shown: A and B are equal on all {self.num_prompts} prompts"
        if not self.is_shown:
            return f"no difference can be shown: B - A = {value:.3f}, {level} [{low:.3f}, {high:.3f}]"
        better, sign = ("B", 1) if value > 0 else ("A", -1)
        bounds = sorted([sign * low, sign * high])
        return f"{better} is better by {sign * value:.3f}, {level} [{bounds[0]:.3f}, {bounds[1]:.3f}]"


def powers_up_to(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`, and `most` itself."""
    powers = [2**exponent for exponent in range(most.bit_length()) if 2**exponent <= most]
    return powers if powers[-1] == most else [*powers, most]


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the probability that k of the samples, drawn without replacement, contain a solved one.

    The mean over prompts is an unbiased estimate of pass@k, because the samples are independent.
    """
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def majority_score(votes: Sequence[str], scores: Sequence[float]) -> float:
    """Return the mean score of the samples with the most frequent vote; a tie averages over its votes."""
    most = max(Counter(votes).values())
    scores_of: dict[str, list[float]] = defaultdict(list)
    for vote, score in zip(votes, scores, strict=True):
        scores_of[vote].append(score)
    return mean(mean(found) for found in scores_of.values() if len(found) == most)


def is_solved(sample: FinishedSample, solved_at: float) -> bool:
    """Whether the `accuracy` of the environment, or else the reward, is at least `solved_at`."""
    metrics = sample.metrics or {}
    return metrics.get("accuracy", sample.reward) >= solved_at


def values_by_prompt(groups: Sequence[Group], samples_per_prompt: int, solved_at: float) -> dict[str, np.ndarray]:
    """Return, for each metric, its value for every prompt [P]; NaN where too few samples were scored."""
    k_last = samples_per_prompt
    columns: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        scored = [sample for sample in group if not sample.is_dropped]
        solved = [float(is_solved(sample, solved_at)) for sample in scored]
        columns["reward"].append(mean(sample.reward for sample in scored))
        columns["accuracy"].append(mean(solved))
        if k_last == 1:
            continue
        columns[f"avg_at_{k_last}"].append(mean(solved))
        for k in powers_up_to(k_last):
            is_known = k <= len(scored)
            value = pass_at_k(len(scored), int(sum(solved)), k) if is_known else math.nan
            columns[f"pass_at_{k}"].append(value)
        votes = [sample.vote for sample in scored]
        columns[f"maj_at_{k_last}"].append(majority_score(votes, solved) if scored else math.nan)
    return {name: np.array(column) for name, column in columns.items()}


def bootstrap(
    values_P: np.ndarray, confidence: float = CONFIDENCE, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> Estimate:
    """Return the mean over prompts with its percentile bootstrap interval; prompts with NaN are left out."""
    known_P = values_P[~np.isnan(values_P)]
    if not len(known_P):
        return Estimate(math.nan, math.nan, math.nan, 0)
    rng = np.random.default_rng(seed)
    rows = max(1, _MOST_DRAWN // len(known_P))
    means_R = np.concatenate(
        [
            known_P[rng.integers(0, len(known_P), (min(rows, num_resamples - start), len(known_P)))].mean(axis=1)
            for start in range(0, num_resamples, rows)
        ]
    )
    tail = (1 - confidence) / 2
    low, high = np.quantile(means_R, [tail, 1 - tail])
    return Estimate(mean(known_P), float(low), float(high), len(known_P))


def estimates_of(values: Mapping[str, np.ndarray]) -> dict[str, Estimate]:
    """Return the estimate of each metric."""
    return {name: bootstrap(values_P) for name, values_P in values.items()}


def compare(name: str, values_a_P: np.ndarray, values_b_P: np.ndarray) -> Comparison:
    """Compare two models by their values on the same prompts: bootstrap the differences of the prompts."""
    differences_P = values_b_P - values_a_P
    known_P = differences_P[~np.isnan(differences_P)]
    return Comparison(name, bootstrap(differences_P), int(np.count_nonzero(known_P)))


def interval_metrics(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Return estimates as metrics: `pass_at_4`, `pass_at_4_low`, `pass_at_4_high`; of the reward only the bounds."""
    metrics: dict[str, float] = {}
    for name, estimate in estimates.items():
        if name == "accuracy":  # the same as avg_at_k, and a name that environments use
            continue
        if name != "reward":
            metrics[name] = estimate.value
        metrics |= {f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return metrics
