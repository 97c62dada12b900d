"""FrameSkip and NoopReset, which step the env below them."""

import numpy as np
import pytest
import torch

from lucidrl.envs.gym import GymEnv
from lucidrl.envs.serial import SerialEnv
from lucidrl.envs.transforms import (
    Compose,
    DoubleToFloat,
    FrameSkip,
    NoopReset,
    RewardScaling,
    RewardSum,
    StepCounter,
    TimeLimit,
    TransformedEnv,
)
from lucidrl.errors import ConfigError
from tests.unit.envs.transforms.toys import SEED, Weather


def pushing_right(root):
    return torch.tensor([0, 1])


def test_an_action_is_repeated_and_its_rewards_are_added():
    env, plain = TransformedEnv(GymEnv("CartPole-v1"), FrameSkip(3)), GymEnv("CartPole-v1")
    for each in (env, plain):
        each.set_seed(SEED)
    every = plain.rollout(100, pushing_right)
    steps = env.rollout(100, pushing_right)
    length = len(every)
    assert length % 3, "the last step is cut short by the end"
    ends = [*range(2, length, 3), length - 1]
    assert (steps["next", "observation"] == every["next", "observation"][ends]).all()
    assert steps["next", "reward"].flatten().tolist() == [3.0] * (len(ends) - 1) + [float(length % 3)]
    assert (steps["next", "terminated"] == every["next", "terminated"][ends]).all()


def test_transforms_below_see_every_step_and_those_above_every_third():
    below = [DoubleToFloat(), StepCounter(step_count_key="below"), RewardScaling(0, 2), RewardSum("sum_below")]
    above = [RewardScaling(0, 5), StepCounter(step_count_key="above"), RewardSum("sum_above")]
    env = TransformedEnv(Weather(first_length=8), Compose(*below, FrameSkip(3), *above))
    steps = env.rollout(20)["next"]
    assert steps["below"].flatten().tolist() == [3, 6, 8]
    assert steps["above"].flatten().tolist() == [1, 2, 3]
    assert steps["done"].flatten().tolist() == [False, False, True]
    torch.testing.assert_close(steps["sum_above"], steps["sum_below"] * 5)
    torch.testing.assert_close(steps["reward"].cumsum(0), steps["sum_above"])


def test_a_limit_below_ends_the_repetition():
    env = TransformedEnv(Weather(first_length=50), Compose(TimeLimit(4), StepCounter(), FrameSkip(3)))
    steps = env.rollout(20)["next"]
    assert steps["step_count"].flatten().tolist() == [3, 4]
    assert steps["truncated"].flatten().tolist() == [False, True]


@pytest.mark.parametrize("below", [(), (StepCounter(step_count_key="below"), RewardSum())])
def test_episodes_begin_after_some_steps_without_effect(below):
    env = TransformedEnv(GymEnv("CartPole-v1"), Compose(*below, NoopReset(4, random=False), StepCounter()))
    plain = GymEnv("CartPole-v1")
    for each in (env, plain):
        each.set_seed(SEED)
    expected = plain.rollout(4, lambda root: torch.tensor([1, 0]))["next"][-1]
    root = env.reset()
    assert (root["observation"] == expected["observation"]).all()
    assert root["step_count"].item() == 0
    assert not root["done"].item()
    if below:
        assert root["below"].item() == 4


def test_the_number_of_steps_is_random_and_repeats_with_the_seed():
    def numbers(env, seed):
        env.set_seed(seed)
        return [env.reset()["steps"].item() for _ in range(200)]

    env = TransformedEnv(Weather(first_length=99), Compose(StepCounter(step_count_key="steps"), NoopReset(5)))
    first = numbers(env, SEED)
    assert set(first) == {1, 2, 3, 4, 5}
    assert numbers(env, SEED) == first
    assert numbers(env, SEED + 1) != first


def test_an_episode_that_ends_in_noop_steps_is_reset():
    env = TransformedEnv(Weather(first_length=3), Compose(StepCounter(), NoopReset(8, random=False)))
    root = env.reset()
    assert not root["done"].item()
    assert root["step_count"].item() == 8 % 3


def test_an_action_without_effect_can_be_chosen():
    seen = []

    class Watched(Weather):
        def _step_into(self, actions, out):
            seen.append(actions["action"].tolist())
            super()._step_into(actions, out)

    TransformedEnv(Watched(), NoopReset(2, random=False, noop_action=2)).reset()
    assert seen == [[0, 0, 1], [0, 0, 1]]


def test_noops_in_each_env_of_a_batch_happen_where_one_is_reset():
    def make():
        return TransformedEnv(Weather(first_length=6), Compose(StepCounter(), NoopReset(2, random=False)))

    env = SerialEnv(3, make)
    counts = env.rollout(30, break_when_any_done=False)["step_count"][..., 0].numpy()
    np.testing.assert_array_equal(counts, np.tile(np.arange(30) % 4 + 2, (3, 1)))


@pytest.mark.parametrize("transform", [lambda: FrameSkip(2), lambda: NoopReset(2)])
def test_envs_of_a_batch_cannot_be_stepped_apart(transform):
    with pytest.raises(ConfigError, match=r"single envs of a batch of \[3\]; apply it in the factory of each env"):
        TransformedEnv(Weather((3,)), transform())
    TransformedEnv(Weather((1,)), transform()).rollout(5)


@pytest.mark.parametrize("make", [lambda: FrameSkip(0), lambda: NoopReset(0)])
def test_no_step_at_all_is_refused(make):
    with pytest.raises(ConfigError, match=r"=0 must be at least 1"):
        make()
