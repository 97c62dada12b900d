"""Envs that step one after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lucidrl.envs import EnvBase, RewardClipping, SerialEnv, TransformedEnv
from lucidrl.envs.specs import Categorical, Composite
from lucidrl.errors import ConfigError, EnvironmentFailure
from tests.unit.envs.faulty import Faulty, UnpicklableError, one_faulty
from tests.unit.envs.toys import Countdown, Walk


class Places(EnvBase):
    """Observations and actions that are single numbers, without a dim."""

    def __init__(self, start: int = 0):
        super().__init__()
        self.observation_spec = Composite(place=Categorical(10))
        self.action_spec = Categorical(3)
        self._start = self._place = start

    def _set_seed(self, seed):
        pass

    def _reset_into(self, out, mask):
        self._place = self._start
        out.observation["place"][...] = self._place

    def _step_into(self, actions, out):
        self._place += int(actions["action"])
        out.observation["place"][...] = self._place
        out.reward[...] = 1
        out.terminated[...] = out.done[...] = self._place > 6
        out.truncated[...] = False


def test_rows_equal_the_envs_alone():
    stacked = SerialEnv(3, Walk)
    assert stacked.batch_size == (3,)
    assert stacked.num_seeds == 3
    assert stacked.set_seed(5) == 8
    record = stacked.rollout(20, lambda _: torch.tensor([[0, 1]] * 3), break_when_any_done=False)
    for index in range(3):
        alone = Walk()
        alone.set_seed(5 + index)
        expected = alone.rollout(20, lambda _: torch.tensor([0, 1]), break_when_any_done=False)
        assert expected["next", "done"].any()
        for key in expected.keys(True, True):
            torch.testing.assert_close(record[index].get(key), expected.get(key), rtol=0, atol=0)


def test_seeds_of_several_that_use_several_each_do_not_overlap():
    nested = SerialEnv(2, [lambda: SerialEnv(3, Walk), lambda: SerialEnv(3, Walk)])
    assert nested.batch_size == (2, 3)
    assert nested.set_seed(10) == 16
    observations = nested.reset()["observation"]
    assert len(observations.reshape(6, -1).unique(dim=0)) == 6


def test_seeds_wrap_around_after_the_last_one():
    env = SerialEnv(3, Walk)
    assert env.set_seed(2**32 - 2) == 1
    assert env.seeds_of_envs(2**32 - 2) == [2**32 - 2, 2**32 - 1, 0]


def test_single_numbers_are_written_and_read():
    env = SerialEnv(2, Places, create_env_kwargs=[{"start": 1}, {"start": 4}])
    root = env.reset()
    assert root["place"].tolist() == [1, 4]
    after, following = env.step_and_maybe_reset(root.set("action", torch.tensor([2, 3])))
    assert after["next", "place"].tolist() == [3, 7]
    assert following["place"].tolist() == [3, 4]
    assert not following["done"].any()


def test_a_mask_resets_only_its_rows():
    env = SerialEnv(3, lambda: Walk((2,)))
    env.set_seed(0)
    before = env.reset()
    mask = torch.tensor([[False, False], [True, False], [True, True]])
    after = env.reset(before.clone().set("_reset", mask))
    changed = (before["observation"] != after["observation"]).any(-1)
    assert torch.equal(changed, mask)


def test_tensordict_envs_can_be_stacked():
    env = SerialEnv(2, Countdown)
    record = env.rollout(50, lambda root: TensorDict({"action": torch.tensor([[3], [1]])}, [2]))
    assert record.shape == (2, 7)
    assert record["next", "left"][:, -1].tolist() == [[0], [14]]


def test_envs_with_different_specs_are_refused():
    with pytest.raises(ConfigError, match=r"env 1 has batch_size .*\[2\].*, but env 0 has .*; make them equal"):
        SerialEnv(2, Walk, create_env_kwargs=[{}, {"batch_size": (2,)}])
    with pytest.raises(ConfigError, match=r"env 2 has observation_spec .*left.*, but env 0 has .*observation"):
        SerialEnv(3, [Walk, Walk, Countdown])
    with pytest.raises(ConfigError, match=r"env 1 has reward_spec Bounded.*, but env 0 has Unbounded"):
        SerialEnv(2, [Walk, lambda: TransformedEnv(Walk(), RewardClipping(0, 1))])


def test_a_failing_env_is_named_with_seed_action_and_cause():
    env = SerialEnv(4, one_faulty(4, 2, "unpicklable"))
    env.set_seed(30)
    root = env.reset().set("action", torch.tensor([[1, 0], [1, 0], [0, 1], [1, 0]]))
    for _ in range(2):
        env.step(root)
    with pytest.raises(EnvironmentFailure) as caught:
        env.step(root)
    assert str(caught.value) == ("env 2 (seed 32, action [0, 1]) failed in its step: UnpicklableError: wheel and axle")
    assert isinstance(caught.value.__cause__, UnpicklableError)


def test_a_failing_reset_is_named():
    with pytest.raises(EnvironmentFailure, match=r"env 1 \(never seeded\) failed in its reset: ValueError: the wheel"):
        SerialEnv(2, one_faulty(2, 1, "raise", in_reset=True)).reset()


def test_one_env_that_fails_to_close_leaves_no_other_open():
    class Sticky(Walk):
        def _close(self):
            raise OSError("the door is stuck")

    envs = [Sticky(), Walk()]
    stacked = SerialEnv(2, [lambda: envs[0], lambda: envs[1]])
    with pytest.raises(OSError, match="stuck"):
        stacked.close()
    assert envs[1].is_closed


def test_frames_that_come_again_are_cut_into_rows_once():
    env = SerialEnv(2, Faulty)
    frame, actions = env.new_frame(), env.new_actions()
    env.reset_into(frame)
    derived = frame.rows()
    env.step_into(actions, frame)
    assert frame.rows() is derived
    assert np.shares_memory(derived[1].reward, frame.reward)
