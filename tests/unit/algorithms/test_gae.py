"""Advantages: what the recursion says, and what it says at both ends of lambda."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lucidrl.algorithms.advantages import generalized_advantages


def random_batch(seed: int, *shape: int):
    """Rewards, values, next values, terminated and done, with episodes that end in both ways."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values, next_values = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    terminated, truncated = torch.rand(2, *shape, generator=generator) < 0.2
    return rewards, values, next_values, terminated, terminated | truncated


def plain_recursion(rewards, values, next_values, terminated, done, discount, gae_lambda):
    """One row, as the definition has it."""
    advantages, following = [], 0.0
    for time in reversed(range(len(rewards))):
        worth = 0.0 if terminated[time] else float(next_values[time])
        difference = float(rewards[time]) + discount * worth - float(values[time])
        following = difference + (0.0 if done[time] else discount * gae_lambda * following)
        advantages.append(following)
    return torch.tensor(advantages[::-1], dtype=torch.float64)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**31), st.integers(1, 12), st.floats(0, 1), st.floats(0, 1))
def test_advantages_are_those_of_the_plain_recursion(seed, num_frames, discount, gae_lambda):
    batch = random_batch(seed, 2, 3, num_frames)
    found = generalized_advantages(*batch, discount=discount, gae_lambda=gae_lambda)
    for row in range(2):
        for column in range(3):
            expected = plain_recursion(*(tensor[row, column] for tensor in batch), discount, gae_lambda)
            torch.testing.assert_close(found.advantages[row, column], expected)
    torch.testing.assert_close(found.value_targets, found.advantages + batch[1])


def test_with_lambda_1_targets_are_discounted_returns():
    rewards = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    terminated = torch.tensor([[False, True, False, False]])
    values = torch.randn(1, 4)
    last = torch.tensor([[7.0, 7.0, 7.0, 16.0]])
    next_values = torch.cat([values[:, 1:], last[:, -1:]], dim=1)
    found = generalized_advantages(rewards, values, next_values, terminated, terminated, discount=0.5, gae_lambda=1.0)
    # The second episode continues after the batch, with the value 16.
    torch.testing.assert_close(found.value_targets, torch.tensor([[1 + 1.0, 2.0, 4 + 4 + 4.0, 8 + 8.0]]))


@pytest.mark.parametrize(("is_terminated", "worth"), [(True, 0.0), (False, 10.0)])
def test_a_truncated_episode_is_worth_its_last_observation_and_a_terminated_one_nothing(is_terminated, worth):
    zeros, done = torch.zeros(1, 2), torch.tensor([[True, False]])
    terminated = done & is_terminated
    next_values = torch.tensor([[10.0, 0.0]])
    found = generalized_advantages(zeros, zeros, next_values, terminated, done, discount=1.0, gae_lambda=0.5)
    assert found.advantages[0, 0] == worth


def test_nothing_of_the_next_episode_reaches_over_an_end():
    rewards = torch.tensor([[0.0, 100.0]])
    values, done = torch.zeros(1, 2), torch.tensor([[True, False]])
    truncated = generalized_advantages(
        rewards, values, values, torch.zeros_like(done), done, discount=1.0, gae_lambda=1.0
    )
    assert truncated.advantages.tolist() == [[0.0, 100.0]]


def test_estimates_carry_no_gradient():
    rewards, _, next_values, terminated, done = random_batch(0, 2, 5)
    values = torch.zeros(2, 5, dtype=torch.float64, requires_grad=True)
    found = generalized_advantages(rewards, values, next_values, terminated, done, discount=0.9, gae_lambda=0.9)
    assert not found.advantages.requires_grad
    assert not found.value_targets.requires_grad
