"""Estimates from several samples per prompt: pass@k, majorities, intervals, comparisons."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations, product

import numpy as np
import pytest

from lucidrl.algorithms.estimates import (
    bootstrap,
    compare,
    estimates_of,
    interval_metrics,
    majority_score,
    pass_at_k,
    powers_up_to,
    values_by_prompt,
)


@dataclass
class Scored:
    """A finished sample."""

    reward: float
    vote: str = ""
    is_dropped: bool = False
    metrics: dict = field(default_factory=dict)
    turns: int = 1
    num_sampled_tokens: int = 1
    is_truncated: bool = False


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_a_solved_one(num_samples):
    for num_solved, k in product(range(num_samples + 1), range(1, num_samples + 1)):
        solved = [True] * num_solved + [False] * (num_samples - num_solved)
        choices = list(combinations(solved, k))
        expected = sum(any(choice) for choice in choices) / len(choices)
        assert pass_at_k(num_samples, num_solved, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_unbiased():
    rng = np.random.default_rng(0)
    solved = rng.binomial(8, 0.3, size=20_000)
    assert np.mean([pass_at_k(8, int(count), 4) for count in solved]) == pytest.approx(1 - 0.7**4, abs=0.005)


def test_values_of_k_are_powers_of_two_and_the_number_of_samples():
    assert [powers_up_to(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_the_majority_has_the_score_of_its_answer_and_a_tie_the_mean():
    assert majority_score(["42", "7", "42"], [1.0, 0.0, 1.0]) == 1.0
    assert majority_score(["42", "7", "7"], [1.0, 0.0, 0.0]) == 0.0
    assert majority_score(["42", "7", "8"], [1.0, 0.0, 0.0]) == pytest.approx(1 / 3)


def test_a_sample_is_solved_by_its_accuracy_or_else_by_its_reward():
    groups = [[Scored(1.2, metrics={"accuracy": 0.0}), Scored(0.5)], [Scored(1.0), Scored(0.2, is_dropped=True)]]
    values = values_by_prompt(groups, 2, solved_at=1.0)
    assert values["accuracy"].tolist() == [0.0, 1.0]
    assert values["reward"].tolist() == [0.85, 1.0]
    assert values["pass_at_1"].tolist() == [0.0, 1.0]
    assert values["pass_at_2"][0] == 0.0
    assert np.isnan(values["pass_at_2"][1])  # the environment dropped a sample
    assert values_by_prompt(groups, 2, solved_at=0.5)["accuracy"].tolist() == [0.5, 1.0]


def test_estimates_count_the_prompts_that_they_rest_on():
    whole, half = [Scored(1.0), Scored(0.0)], [Scored(1.0), Scored(0.0, is_dropped=True)]
    found = estimates_of(values_by_prompt([whole, half, whole], 2, solved_at=1.0))
    assert {name: one.num_prompts for name, one in found.items() if name.startswith("pass")} == {
        "pass_at_1": 3,
        "pass_at_2": 2,
    }
    compared = compare("accuracy", np.array([0.0, np.nan, 1.0]), np.ones(3))
    assert (compared.num_prompts, compared.to_json()["num_prompts"]) == (2, 2)


def test_metrics_have_bounds_and_do_not_replace_those_of_the_environment():
    values = values_by_prompt([[Scored(1.0, "a"), Scored(0.0, "b")]] * 3, 2, solved_at=1.0)
    metrics = interval_metrics(estimates_of(values))
    stems = {"reward", "avg_at_2", "pass_at_1", "pass_at_2", "maj_at_2"}
    bounds = {f"{stem}_{bound}" for stem in stems for bound in ("low", "high")}
    assert metrics.keys() == bounds | stems - {"reward"}
    assert (metrics["avg_at_2"], metrics["pass_at_2"], metrics["maj_at_2"]) == (0.5, 1.0, 0.5)


@pytest.mark.parametrize(("solved", "confidence"), [(0.5, 0.95), (0.2, 0.95), (0.5, 0.8)])
def test_bootstrap_intervals_cover_at_their_level(solved, confidence):
    rng = np.random.default_rng(1)
    num_trials = 600
    covered = 0
    for trial in range(num_trials):
        values = rng.binomial(4, solved, size=120) / 4
        found = bootstrap(values, confidence, num_resamples=500, seed=trial)
        covered += found.low <= solved <= found.high
    assert covered / num_trials == pytest.approx(confidence, abs=0.035)


def test_paired_intervals_cover_at_their_level_and_are_narrower_than_unpaired_ones():
    rng = np.random.default_rng(2)
    false_alarms = 0
    for _ in range(300):
        hardness = rng.uniform(size=100)
        a, b = (rng.binomial(8, hardness) / 8 for _ in range(2))
        false_alarms += compare("accuracy", a, b).is_shown
    assert false_alarms / 300 == pytest.approx(0.05, abs=0.035)
    width = compare("accuracy", a, b).difference
    alone = bootstrap(a)
    assert width.high - width.low < alone.high - alone.low


def test_comparisons_are_in_words():
    a, b = np.zeros(100), np.array([1.0] * 20 + [0.0] * 80)
    assert compare("accuracy", a, b).sentence().startswith("B is better by 0.200, 95 % [0.1")
    assert compare("accuracy", b, a).sentence().startswith("A is better by 0.200, 95 % [0.1")
    mixed = np.array([1.0, -1.0] * 10 + [0.0] * 80)
    assert compare("accuracy", a, mixed).sentence().startswith("no difference can be shown: B - A = 0.000, 95 % [-")
    assert compare("accuracy", a, a).sentence() == ("no difference can be shown: A and B are equal on all 100 prompts")


def test_a_few_prompts_show_no_difference():
    assert not compare("accuracy", np.zeros(5), np.ones(5)).is_shown
    assert compare("accuracy", np.zeros(6), np.ones(6)).is_shown
