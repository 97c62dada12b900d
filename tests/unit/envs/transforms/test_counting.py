"""StepCounter, RewardSum, InitTracker and TimeLimit against plain loops over the same steps."""

import numpy as np
import pytest
import torch

from lucidrl.envs.transforms import Compose, InitTracker, RewardSum, StepCounter, TimeLimit, TransformedEnv
from lucidrl.errors import ConfigError
from tests.unit.envs.transforms.toys import NUM_STEPS, Weather, rollouts

BATCHES = [(), (3,), (2, 2)]


def over_episodes(done, values):
    """Running sums of values [..., T], restarted after every end of an episode."""
    sums, total = np.zeros_like(values), np.zeros_like(values[..., 0])
    for time in range(values.shape[-1]):
        total = total + values[..., time]
        sums[..., time] = total
        total = np.where(done[..., time], 0, total)
    return sums


@pytest.mark.parametrize("batch_size", BATCHES)
def test_steps_and_rewards_are_counted_by_episode(batch_size):
    steps, plain = rollouts(Compose(StepCounter(), RewardSum()), batch_size)
    done, reward = plain["next", "done"][..., 0].numpy(), plain["next", "reward"][..., 0].numpy()
    assert (steps["next", "done"] == plain["next", "done"]).all()
    np.testing.assert_array_equal(steps["next", "step_count"][..., 0], over_episodes(done, np.ones_like(done, int)))
    np.testing.assert_array_equal(steps["next", "episode_reward"][..., 0], over_episodes(done, reward))


@pytest.mark.parametrize("batch_size", BATCHES)
def test_the_root_counts_from_zero_after_a_reset_and_continues_otherwise(batch_size):
    steps, _ = rollouts(Compose(StepCounter(), RewardSum()), batch_size)
    for key in ("step_count", "episode_reward"):
        assert (steps[key][..., 0, :] == 0).all()
        going_on = torch.where(steps["next", "done"], 0, steps["next", key])[..., :-1, :]
        assert (steps[key][..., 1:, :] == going_on).all()
    assert steps["step_count"].dtype == torch.int64
    assert steps["episode_reward"].dtype == torch.float32


@pytest.mark.parametrize("batch_size", BATCHES)
def test_the_beginning_of_an_episode_is_marked_at_its_root_alone(batch_size):
    steps, plain = rollouts(InitTracker(), batch_size)
    assert steps["is_init"][..., 0, :].all()
    assert (steps["is_init"][..., 1:, :] == plain["next", "done"][..., :-1, :]).all()
    assert not steps["next", "is_init"].any()


@pytest.mark.parametrize("transform", [lambda: StepCounter(max_steps=4), lambda: TimeLimit(4)])
def test_episodes_are_truncated_at_the_limit_each_by_its_own_count(transform):
    env = TransformedEnv(Weather((3,)), transform())  # their own ends are after 3, 4 and 5 steps
    steps = env.rollout(NUM_STEPS, break_when_any_done=False)
    counted = np.arange(NUM_STEPS) % 4 == 3
    terminated, truncated, done = (steps["next", key][..., 0].numpy() for key in ("terminated", "truncated", "done"))
    assert not truncated[0].any()
    np.testing.assert_array_equal(terminated[0], np.arange(NUM_STEPS) % 3 == 2)
    np.testing.assert_array_equal(terminated[1], counted)
    np.testing.assert_array_equal(truncated[1], counted)
    assert not terminated[2].any()
    np.testing.assert_array_equal(truncated[2], counted)
    np.testing.assert_array_equal(done, terminated | truncated)
    begun = np.where(done, 0, steps["next", "hour"])[:, :-1]
    np.testing.assert_array_equal(steps["hour"][:, 1:], begun, "the env starts a new episode after each end")


def test_the_lower_of_two_limits_counts():
    for limits in ((2, 9), (9, 2)):
        env = TransformedEnv(Weather((3,)), Compose(TimeLimit(limits[0]), StepCounter(max_steps=limits[1])))
        truncated = env.rollout(8, break_when_any_done=False)["next", "truncated"][..., 0]
        assert truncated.tolist() == [[False, True] * 4] * 3


def test_a_time_limit_adds_no_entry():
    assert TransformedEnv(Weather(), TimeLimit(4)).observation_spec == Weather().observation_spec


def test_a_reset_of_some_envs_leaves_the_counts_of_others():
    env = TransformedEnv(Weather((3,), first_length=50), Compose(StepCounter(), RewardSum()))
    root = env.rollout(6, break_when_any_done=False)["next"][:, -1].exclude("reward")
    again = env.reset(root.set("_reset", torch.tensor([True, False, True])))
    assert again["step_count"].flatten().tolist() == [0, 6, 0]
    after = env.rand_step(again)["next"]
    assert after["step_count"].flatten().tolist() == [1, 7, 1]
    expected = torch.tensor([0.0, root["episode_reward"][1, 0], 0.0]) + after["reward"][:, 0]
    torch.testing.assert_close(after["episode_reward"][:, 0], expected)


@pytest.mark.parametrize("transform", [StepCounter, TimeLimit])
def test_a_limit_without_steps_is_refused(transform):
    with pytest.raises(ConfigError, match="max_steps=0 must be at least 1"):
        transform(max_steps=0)


def test_entries_can_be_named():
    env = TransformedEnv(Weather(), Compose(StepCounter(step_count_key=("age", "steps")), RewardSum("gain")))
    env.append_transform(InitTracker(("age", "new")))
    root = env.reset()
    assert (root["age", "steps"].item(), root["gain"].item(), root["age", "new"].item()) == (0, 0.0, True)
