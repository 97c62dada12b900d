"""Advantages agree with their formulas row by row, and dropped, equal or lonely rows get exactly 0."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lucidrl.algorithms.advantages import ESTIMATORS, MAX_REWARD, STD_EPSILON, compute_advantages, has_signal
from lucidrl.algorithms.config import AdvantageConfig, AdvantageEstimator
from lucidrl.errors import DataError

rows_of_rewards = st.lists(
    st.tuples(st.floats(-10, 10, width=32), st.integers(-2, 3), st.booleans()), min_size=0, max_size=24
)


def columns(rows):
    return (
        torch.tensor([reward for reward, _, _ in rows], dtype=torch.float32),
        torch.tensor([group for _, group, _ in rows], dtype=torch.int64),
        torch.tensor([valid for _, _, valid in rows], dtype=torch.bool),
    )


def expected_advantage(estimator, rows, row):
    """The textbook formula for one row."""
    reward, group, valid = rows[row]
    by_batch = estimator is AdvantageEstimator.PLAIN
    peers = [r for r, g, v in rows if v and (by_batch or g == group)]
    if not valid or min(peers) == max(peers):
        return 0.0
    if estimator is AdvantageEstimator.GROUP_NORMALIZED:
        return (reward - statistics.fmean(peers)) / (statistics.pstdev(peers) + STD_EPSILON)
    if estimator is AdvantageEstimator.LEAVE_ONE_OUT:
        return reward - (math.fsum(peers) - reward) / (len(peers) - 1)
    return reward - statistics.fmean(peers)


@pytest.mark.parametrize("estimator", AdvantageEstimator)
@settings(max_examples=60, deadline=None)
@given(rows=rows_of_rewards)
def test_every_row_follows_the_formula(estimator, rows):
    advantages = compute_advantages(AdvantageConfig(estimator=estimator), *columns(rows))
    expected = torch.tensor([expected_advantage(estimator, rows, row) for row in range(len(rows))])
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-6)


def test_every_estimator_can_be_chosen():
    assert set(ESTIMATORS) == set(AdvantageEstimator)


@pytest.mark.parametrize("estimator", AdvantageEstimator)
def test_equal_rewards_give_exact_zeros(estimator):
    rewards = torch.full((7,), 0.1, dtype=torch.float64)
    advantages = ESTIMATORS[estimator](rewards, torch.zeros(7, dtype=torch.int64), torch.ones(7))
    assert torch.equal(advantages, torch.zeros(7))


@pytest.mark.parametrize("estimator", [AdvantageEstimator.GROUP_NORMALIZED, AdvantageEstimator.LEAVE_ONE_OUT])
def test_a_group_of_one_row_gets_exactly_zero(estimator):
    advantages = ESTIMATORS[estimator](torch.tensor([3.7, -1.0]), torch.tensor([0, 1]), torch.ones(2))
    assert torch.equal(advantages, torch.zeros(2))


@pytest.mark.parametrize("estimator", AdvantageEstimator)
def test_a_dropped_row_is_as_if_it_had_never_been_there(estimator):
    kept = torch.tensor([1.0, 0.0, 0.5, 2.0])
    groups = torch.tensor([0, 0, 1, 1])
    with_dropped = ESTIMATORS[estimator](
        torch.tensor([1.0, math.nan, 0.0, 0.5, math.inf, 2.0]),
        torch.tensor([0, 0, 0, 1, 1, 1]),
        torch.tensor([1, 0, 1, 1, 0, 1]),
    )
    assert torch.equal(with_dropped[[0, 2, 3, 5]], ESTIMATORS[estimator](kept, groups, torch.ones(4)))
    assert torch.equal(with_dropped[[1, 4]], torch.zeros(2))


def test_normalized_groups_have_unit_variance_whatever_their_size():
    rewards, groups = torch.tensor([0.0, 1.0, 5.0, 6.0, 7.0, 100.0]), torch.tensor([0, 0, 1, 1, 1, 1])
    advantages = ESTIMATORS[AdvantageEstimator.GROUP_NORMALIZED](rewards, groups, torch.ones(6))
    for group in (0, 1):
        torch.testing.assert_close(advantages[groups == group].square().mean(), torch.tensor(1.0))


def test_only_groups_whose_valid_rewards_differ_have_signal():
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, math.nan, 5.0])
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    valid = torch.tensor([1, 1, 1, 1, 1, 0, 1])
    assert has_signal(rewards, groups, valid).tolist() == [True, True, False, False, False, False, False]


@pytest.mark.parametrize("estimator", AdvantageEstimator)
def test_the_largest_rewards_give_finite_advantages(estimator):
    rewards = torch.tensor([MAX_REWARD, -MAX_REWARD] * 32)
    config = AdvantageConfig(estimator=estimator)
    advantages = compute_advantages(config, rewards, torch.arange(64) // 8, torch.ones(64))
    assert advantages.isfinite().all()
    assert (advantages * rewards > 0).all()


def test_a_reward_beyond_the_limit_is_refused_with_the_name_of_its_sample():
    rewards, groups = torch.tensor([0.0, 1e308], dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(DataError, match=r"1e\+30, but the rewards of samples b#1 \(1e\+308\) do not"):
        compute_advantages(AdvantageConfig(), rewards, groups, torch.ones(2), names=["a#0", "b#1"])
    assert compute_advantages(AdvantageConfig(), rewards, groups, torch.tensor([1, 0])).tolist() == [0, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e31])
def test_rewards_that_are_not_numbers_or_too_large_are_refused_with_their_rows(bad):
    rewards = torch.tensor([0.0, bad, 1.0, bad])
    with pytest.raises(DataError, match=r"rows 1 \(.*\), 3 \("):
        compute_advantages(AdvantageConfig(), rewards, torch.zeros(4, dtype=torch.int64), torch.ones(4))


def test_rewards_for_tokens_instead_of_rows_are_refused():
    with pytest.raises(DataError, match=r"'rewards': \[2, 3\]"):
        compute_advantages(AdvantageConfig(), torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.ones(2))
