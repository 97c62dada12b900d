"""Runs of variants: KL in the reward, separate rewards and entropy control reach the loss, and resume exactly."""

from __future__ import annotations

import pytest

from lucidrl.algorithms.variants import Variant
from lucidrl.errors import DataError
from tests.faults.records import digests
from tests.tiers import slow_except

NO_BONUS = "grpo.loss.entropy_coefficient=0"
CONTROLLED = (NO_BONUS, "grpo.entropy_control.target=9", "grpo.entropy_control.step_size=0.01")
"""The entropy is always below this target, so the coefficient rises in every step."""
HARD = "env.kwargs.max_operand=99"
"""The model fails at some of these problems, so the rewards of a group differ, and advantages are not 0."""


@pytest.mark.parametrize("variant", slow_except(Variant, Variant.REINFORCE_PP))
def test_a_variant_trains_with_several_updates_per_step(run, variant):
    settings = (f"grpo.variant={variant}", NO_BONUS, HARD, "policy.train_global_batch_size=8")
    rest = ("validation.num_prompts=0", "grpo.max_steps=3", "grpo.drop_groups_without_signal=false")
    folder, last_step = run("grpo", "run", *settings, *rest)
    assert last_step == 3
    assert max(folder.train_metric("grad_norm")) > 0
    has_reward_kl = variant in (Variant.RLOO, Variant.REINFORCE_PP)
    divergence = folder.train_metric("reward_kl")
    assert len(divergence) == (3 if has_reward_kl else 0)
    if has_reward_kl:  # the policy is its reference until the first update
        assert divergence[0] == pytest.approx(0, abs=1e-6)
        assert abs(divergence[-1]) > 1e-7


@pytest.mark.slow
def test_rows_that_only_the_loss_ignores_still_have_their_kl_in_the_reward(run):
    settings = (NO_BONUS, "policy.generation.max_new_tokens=2", "validation.num_prompts=0", "grpo.max_steps=2")
    masked, _ = run("grpo", "masked", "grpo.variant=rloo", *settings, "grpo.mask_truncated=true")
    assert 0 < masked.train_metric("truncated_fraction")[0] < 1
    assert len(masked.train_metric("reward_kl")) == 2


def test_a_resumed_run_continues_the_entropy_controller(run):
    whole, _ = run("grpo", "whole", *CONTROLLED)
    assert whole.train_metric("entropy_coefficient") == pytest.approx([0, 0.01, 0.02, 0.03])
    assert min(whole.train_metric("entropy")) > 0
    run("grpo", "broken", *CONTROLLED, interrupt_at=2)
    broken, last_step = run("grpo", "broken", *CONTROLLED, resume=True)
    assert last_step == 4
    assert broken.lines() == whole.lines()
    assert digests(broken.path) == digests(whole.path)


@pytest.mark.slow
def test_an_entropy_above_the_target_gets_no_bonus(run):
    settings = ("grpo.loss.entropy_coefficient=0.05", "grpo.entropy_control.target=1e-9", "validation.num_prompts=0")
    folder, _ = run("grpo", "run", *settings)
    assert folder.train_metric("entropy_coefficient") == [0.05, 0, 0, 0]


ENVS = """
from lucidrl.envs.text.interfaces import EnvReply, RewardComponent

def reply(score, length):
    parts = {"score": RewardComponent(score), "length": RewardComponent(length, -1.0)}
    return EnvReply(score - length, components=parts)

class TwoRewards:
    async def step(self, batch):
        numbers = [int(request.sample_id[-1]) for request in batch]
        return [reply(float(number % 2), 1000.0 * (number // 2)) for number in numbers]

class OneReward:
    async def step(self, batch):
        return [EnvReply(float(request.sample_id[-1])) for request in batch]
"""
SEPARATE = ("grpo.advantages.rewards=separate", "grpo.advantages.standardize=sample", NO_BONUS)


@pytest.fixture
def own_env(tmp_path, monkeypatch):
    (tmp_path / "component_envs.py").write_text(ENVS)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{n}+1="}}\n' for n in range(30)))
    monkeypatch.syspath_prepend(tmp_path)
    common = (f"data.file={tmp_path / 'prompts.jsonl'}", "validation.num_prompts=0", "grpo.max_steps=1")
    return lambda name: (f"env.name=component_envs:{name}", *common)


def test_the_rewards_of_an_environment_can_be_normalised_separately(run, own_env, monkeypatch):
    from lucidrl.models.policy.policy import Policy

    seen, train = [], Policy.train
    monkeypatch.setattr(
        Policy,
        "train",
        lambda policy, data, *args, **kwargs: (seen.append(data["advantages"]), train(policy, data, *args, **kwargs))[
            1
        ],
    )
    run("grpo", "separate", *own_env("TwoRewards"), *SEPARATE)
    # Scores 0, 1, 0, 1 and lengths 0, 0, 1000, 1000 have advantages of ±1 each, with weights 1 and -1.
    half = 2**0.5
    assert seen[0][:4].tolist() == pytest.approx([0, half, -half, 0], abs=1e-4)
    run("grpo", "sum", *own_env("TwoRewards"), NO_BONUS)
    assert seen[1][:4].tolist() == pytest.approx([1, 1, -1, -1], abs=0.01)


def test_separate_rewards_of_an_environment_without_names_end_the_run(run, own_env):
    with pytest.raises(DataError, match="rewards=separate needs rewards with names"):
        run("grpo", "run", *own_env("OneReward"), *SEPARATE)
