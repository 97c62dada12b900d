"""Advantages of tokens: KL in the reward, standardisation over the step, several rewards; and entropy control."""

from __future__ import annotations

import json
import math
import statistics
from types import SimpleNamespace

import pytest
import torch

from lucidrl.algorithms.advantages import STD_EPSILON, compute_advantages, standardized
from lucidrl.algorithms.config import AdvantageConfig, EntropyControlConfig, GRPOConfig
from lucidrl.algorithms.credit import kept_samples, mean_kl, to_go, token_advantages
from lucidrl.algorithms.entropy import EntropyController
from lucidrl.collectors.rollouts import ComponentScores
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import DataError


def make_rollouts(rewards, groups, components=None, truncated=None):
    number = len(rewards)
    return SimpleNamespace(
        rewards=torch.tensor(rewards),
        group_ids=torch.tensor(groups),
        is_valid=torch.ones(number, dtype=torch.bool),
        is_truncated=torch.tensor(truncated or [False] * number),
        components=components or {},
        samples=[SimpleNamespace(name=f"p#{index}") for index in range(number)],
    )


def random_batch(lengths, seed=0):
    """Rows with one prompt token and `lengths` sampled tokens, with log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    size = (len(lengths), max(lengths) + 1)
    positions = torch.arange(size[1])
    mask = (positions >= 1) & (positions <= torch.tensor(lengths)[:, None])
    return BatchedDataDict(
        {
            "input_ids": torch.zeros(size, dtype=torch.int64),
            "token_mask": mask.long(),
            "sample_mask": torch.ones(size[0]),
            "prev_logprobs": -torch.rand(size, generator=generator),
            "reference_policy_logprobs": -torch.rand(size, generator=generator),
        }
    )


def kl_of(batch, row, start=1):
    tokens = range(start, int(batch["token_mask"][row].sum()) + 1)
    columns = [batch[name][row].tolist() for name in ("prev_logprobs", "reference_policy_logprobs")]
    return sum(columns[0][token] - columns[1][token] for token in tokens)


def test_reinforce_pp_standardises_rewards_minus_the_kl_to_go_over_all_tokens():
    rewards, batch = [1.0, 0.0, 0.5], random_batch([3, 1, 2])
    config = GRPOConfig(variant="reinforce_pp", advantages={"kl_coefficient": 0.3}).advantages
    rows = torch.arange(3)
    found = token_advantages(config, make_rollouts(rewards, [0, 0, 1]), batch, rows, torch.ones(3))
    returns = {
        (row, token): rewards[row] - 0.3 * kl_of(batch, row, token)
        for row, token in batch["token_mask"].nonzero().tolist()
    }
    mean, std = statistics.fmean(returns.values()), statistics.pstdev(returns.values())
    for (row, token), value in returns.items():
        assert found[row, token].item() == pytest.approx((value - mean) / (std + STD_EPSILON), abs=1e-5)
    assert found[batch["token_mask"] == 0].abs().max() == 0


def test_rloo_subtracts_the_kl_of_the_completion_before_the_baseline():
    rewards, batch = [1.0, 0.0, 0.5], random_batch([3, 1, 2])
    config = GRPOConfig(variant="rloo").advantages
    found = token_advantages(config, make_rollouts(rewards, [0, 0, 0]), batch, torch.arange(3), torch.ones(3))
    shaped = [reward - 0.05 * kl_of(batch, row) for row, reward in enumerate(rewards)]
    expected = [value - (sum(shaped) - value) / 2 for value in shaped]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_rows_of_a_sample_continue_each_other_and_filler_rows_count_nothing():
    batch = random_batch([2, 3, 1, 1])
    batch["sample_mask"][3] = 0  # fills up the last global batch
    samples = torch.tensor([0, 0, 1, 1])  # the chat template rewrote the history of the first sample
    config = AdvantageConfig(estimator="plain", kl_coefficient=1.0, kl_level="token")
    found = token_advantages(config, make_rollouts([1.0, 0.0], [0, 1]), batch, samples, torch.tensor([1, 1, 1, 0]))
    assert found[0, 1].item() == pytest.approx(0.5 - kl_of(batch, 0) - kl_of(batch, 1), abs=1e-6)
    assert found[1, 2].item() == pytest.approx(0.5 - kl_of(batch, 1, 2), abs=1e-6)
    assert found[2, 1].item() == pytest.approx(-0.5 - kl_of(batch, 2), abs=1e-6)
    assert found[3].abs().max() == 0
    assert mean_kl(batch) == pytest.approx(sum(kl_of(batch, row) for row in range(3)) / 6, abs=1e-6)
    by_sequence = AdvantageConfig(estimator="plain", kl_coefficient=1.0)
    found = token_advantages(by_sequence, make_rollouts([1.0, 0.0], [0, 1]), batch, samples, torch.ones(4))
    shaped = [1 - kl_of(batch, 0) - kl_of(batch, 1), -kl_of(batch, 2)]
    half = (shaped[0] - shaped[1]) / 2
    assert found[:3].tolist() == pytest.approx([half, half, -half], abs=1e-6)


def test_the_sum_to_go_of_one_row_is_the_reversed_running_sum():
    values = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    assert to_go(values, torch.tensor([0, 1])).tolist() == [[7, 6, 4], [56, 48, 32]]
    assert to_go(values, torch.tensor([0, 0])).tolist() == [[63, 62, 60], [56, 48, 32]]


def test_without_kl_and_standardisation_over_tokens_advantages_are_one_per_row():
    rollouts, rows = make_rollouts([1.0, 0.0], [0, 0]), torch.tensor([0, 1, 1])
    found = token_advantages(AdvantageConfig(), rollouts, random_batch([1, 1, 1]), rows, torch.ones(3))
    assert found.tolist() == pytest.approx([1, -1, -1], abs=1e-5)


# Several rewards

SEPARATE = {"rewards": "separate", "standardize": "sample"}
SCORES = {
    "right": ComponentScores(torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0]), 1.0),
    "short": ComponentScores(torch.tensor([0.0, 30.0, 60.0, 5.0, math.nan, 95.0]), 0.5),
}


def test_separate_rewards_are_normalised_by_group_then_weighted_summed_and_standardised():
    total = torch.nansum(torch.stack([part.weight * part.scores for part in SCORES.values()]), dim=0)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    found = compute_advantages(AdvantageConfig(**SEPARATE), total, groups, torch.ones(6), components=SCORES)
    sums = [0.0] * 6
    for part in SCORES.values():
        for rows in (range(3), range(3, 6)):
            scores = {row: part.scores[row].item() for row in rows if not part.scores[row].isnan()}
            mean, std = statistics.fmean(scores.values()), statistics.pstdev(scores.values())
            for row, score in scores.items():
                sums[row] += part.weight * (score - mean) / (std + STD_EPSILON)
    mean, std = statistics.fmean(sums), statistics.pstdev(sums)
    assert found.tolist() == pytest.approx([(value - mean) / (std + STD_EPSILON) for value in sums], abs=1e-5)


def test_a_reward_of_a_small_range_counts_only_if_rewards_are_separate():
    components = {
        "right": ComponentScores(torch.tensor([0.0, 1.0, 0.0, 1.0]), 1.0),
        "length": ComponentScores(torch.tensor([900.0, 100.0, 500.0, 500.0]), 1.0),
    }
    total, groups = sum(part.scores for part in components.values()), torch.zeros(4, dtype=torch.int64)

    def gap(**settings):
        found = compute_advantages(AdvantageConfig(**settings), total, groups, torch.ones(4), components=components)
        return (found[3] - found[2]).item()  # same length, one is right

    assert gap() < 0.01
    assert gap(**SEPARATE) > 1


def test_separate_rewards_need_rewards_with_names():
    with pytest.raises(DataError, match=r"rewards=separate needs rewards with names.*set reward=\[\.\.\.\]"):
        compute_advantages(AdvantageConfig(**SEPARATE), torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.ones(2))


# Standardisation and dropped groups


def test_standardised_values_have_mean_0_and_deviation_1_and_equal_values_become_0():
    generator = torch.Generator().manual_seed(1)
    values, mask = torch.randn(5, 7, generator=generator) * 9 + 4, torch.rand(5, 7, generator=generator) < 0.7
    found = standardized(values, mask)
    assert found[mask].double().mean().item() == pytest.approx(0, abs=1e-6)
    assert found[mask].double().std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert found[~mask].abs().max() == 0
    assert torch.equal(standardized(torch.full((3,), 0.1), torch.ones(3, dtype=torch.bool)), torch.zeros(3))
    assert torch.equal(standardized(values, torch.zeros_like(mask)), torch.zeros(5, 7))


def test_groups_of_equal_rewards_are_dropped_only_where_groups_are_compared():
    rollouts = make_rollouts([1.0, 1.0, 0.0, 1.0], [0, 0, 1, 1], truncated=[False, False, False, True])
    by_group = GRPOConfig(drop_groups_without_signal=True)
    assert kept_samples(by_group, rollouts).tolist() == [False, False, True, True]
    by_batch = GRPOConfig(drop_groups_without_signal=True, advantages={"estimator": "plain"})
    assert kept_samples(by_batch, rollouts).tolist() == [True] * 4
    assert kept_samples(GRPOConfig(variant="dapo"), rollouts).tolist() == [False, False, True, False]
    rollouts.components = {"equal": ComponentScores(torch.tensor([1.0, 1.0, 2.0, 2.0]), 1.0)}
    separate = GRPOConfig(drop_groups_without_signal=True, advantages=SEPARATE)
    assert kept_samples(separate, rollouts).tolist() == [False] * 4
    rollouts.components["other"] = ComponentScores(torch.tensor([math.nan, 3.0, 0.0, 1.0]), 1.0)
    assert kept_samples(separate, rollouts).tolist() == [False, False, True, True]


# Entropy


def test_the_coefficient_moves_towards_the_target_and_is_used_only_below_it():
    controller = EntropyController(EntropyControlConfig(target=0.5, step_size=0.25, max_coefficient=0.6), initial=0.0)
    used = []
    for entropy in (0.4, 0.3, 0.2, 0.5, 0.9, 0.9, math.nan, 0.4, 0.9, 0.9, 0.9):
        controller.observe(entropy)
        used.append(controller.coefficient)
    assert used == pytest.approx([0.25, 0.5, 0.6, 0.6, 0, 0, 0, 0.35, 0, 0, 0])


def test_the_state_of_the_controller_continues_exactly():
    config = EntropyControlConfig(target=0.5, step_size=0.1 / 3)
    first = EntropyController(config, initial=0.01)
    for entropy in (0.4, 0.7, 0.1):
        first.observe(entropy)
    second = EntropyController(config, initial=0.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for entropy in (0.45, 0.6, 0.2):
        first.observe(entropy)
        second.observe(entropy)
        assert first.coefficient == second.coefficient


def test_without_a_target_the_coefficient_stays():
    controller = EntropyController(EntropyControlConfig(), initial=0.02)
    controller.observe(0.0)
    assert (controller.coefficient, controller.state_dict()) == (0.02, {})
