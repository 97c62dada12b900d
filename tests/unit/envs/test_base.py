"""What every env does, whichever hooks it fills."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lucidrl.envs.base import EnvBase
from lucidrl.envs.specs import Categorical, Composite, Unbounded
from lucidrl.errors import ConfigError, DataError, EnvironmentFailure
from tests.unit.envs.toys import START, Countdown, Walk

BATCHES = [(), (3,), (2, 2)]
ALL = torch.ones(2, 1, dtype=torch.bool)


@pytest.fixture(params=[Countdown, Walk])
def kind(request):
    return request.param


@pytest.mark.parametrize("batch_size", BATCHES)
def test_reset_returns_observation_and_false_flags(kind, batch_size):
    root = kind(batch_size).reset()
    assert root.batch_size == torch.Size(batch_size)
    for name in ("done", "terminated", "truncated"):
        assert root[name].shape == (*batch_size, 1)
        assert not root[name].any()
        assert root[name].dtype == torch.bool


@pytest.mark.parametrize("batch_size", BATCHES)
def test_step_writes_next_and_changes_nothing_else(kind, batch_size):
    env = kind(batch_size)
    env.set_seed(0)
    root = env.rand_action(env.reset())
    before = root.clone()
    assert env.step(root) is root
    assert (root.exclude("next") == before).all()
    assert root["next", "reward"].shape == (*batch_size, 1)
    assert root["next", "reward"].dtype == torch.float32


def test_two_steps_share_no_memory(kind):
    env = kind((3,))
    first = env.rand_step(env.reset())
    kept = first.clone()
    env.rand_step(env.reset())
    assert (first == kept).all()


def test_the_same_seed_makes_the_same_rollout(kind):
    env = kind((2,))
    rollouts = []
    for seed in (5, 6, 5):
        assert env.set_seed(seed) == seed + 1
        rollouts.append(env.rollout(20, break_when_any_done=False))
    assert (rollouts[0] == rollouts[2]).all()
    assert not (rollouts[0] == rollouts[1]).all()


def test_a_rollout_stops_at_the_first_end_and_shows_it():
    rollout = Countdown().rollout(100)
    assert rollout["next", "terminated"].squeeze(-1).tolist() == [False] * (rollout.shape[0] - 1) + [True]
    assert rollout["left"][0] == START
    assert rollout["next", "left"][-1] <= 0


def test_a_rollout_resets_envs_that_are_done():
    rollout = Countdown((3,)).rollout(60, break_when_any_done=False)
    assert rollout.shape == (3, 60)
    ended = rollout["next", "done"][:, :-1, 0]
    assert ended.any(dim=1).all()
    following = rollout["left"][:, 1:, 0]
    assert (following[ended] == START).all()
    assert torch.equal(following[~ended], rollout["next", "left"][:, :-1, 0][~ended])


def test_a_rollout_continues_after_another():
    env = Walk()
    env.set_seed(0)
    whole = env.rollout(6, break_when_any_done=False)
    env.set_seed(0)
    first = env.rollout(3, break_when_any_done=False)
    rest = env.rollout(3, tensordict=first[-1]["next"], auto_reset=False, break_when_any_done=False)
    assert torch.equal(whole["observation"], torch.cat([first["observation"], rest["observation"]]))


def test_a_rollout_continues_after_a_step_of_a_tensordict_env():
    env = Countdown()
    after = env.step(env.reset().set("action", torch.tensor([3])))
    rollout = env.rollout(2, lambda _: torch.tensor([1]), auto_reset=False, tensordict=after["next"])
    assert rollout["left"].flatten().tolist() == [START - 3, START - 4]


def test_step_and_maybe_reset_keeps_the_final_frame_and_returns_a_new_root(kind):
    env = kind((4,))
    env.set_seed(1)
    root = env.reset()
    for _ in range(60):
        stepped, following = env.step_and_maybe_reset(env.rand_action(root))
        done = stepped["next", "done"][:, 0]
        for key in env.observation_leaves():
            assert torch.equal(following[key][~done], stepped["next", key][~done])
        assert not following["done"].any()
        if done.any():
            key = next(iter(env.observation_leaves()))
            assert not torch.equal(following[key][done], stepped["next", key][done])
            return
        root = following
    pytest.fail("no env was done")


def test_a_partial_reset_leaves_the_other_envs_where_they_are(kind):
    env = kind((3,))
    env.set_seed(0)
    at = env.rand_step(env.reset())["next"]
    mask = torch.tensor([True, False, True])
    at["_reset"] = mask
    key = next(iter(env.observation_leaves()))
    before = at[key].clone()
    after = env.reset(at)
    assert torch.equal(after[key][1], before[1])
    assert not torch.equal(after[key][0], before[0])
    stepped = env.step(env.rand_action(after))
    assert stepped["next", "reward"].isfinite().all()


def test_a_tensordict_env_reads_its_input():
    env = Countdown((2,))
    root = env.reset()
    root["left"][...] = 5
    stepped, _ = env.step_and_maybe_reset(root.set("action", torch.ones_like(root["left"])))
    assert stepped["next", "left"].flatten().tolist() == [4, 4]
    env.reset(root.set("_reset", torch.tensor([True, False])))
    frame = env.new_frame()
    env.step_into({"action": np.ones((2, 1), np.int64)}, frame)
    assert frame.observation["left"].flatten().tolist() == [START - 1, 4]


def test_a_partial_reset_leaves_other_envs_done():
    env = Walk((2,))
    at = env.reset()
    at["done"][...] = at["truncated"][...] = True
    after = env.reset(at.set("_reset", torch.tensor([False, True])))
    assert after["done"].flatten().tolist() == [True, False]
    assert after["truncated"].flatten().tolist() == [True, False]


def test_a_reset_mask_of_another_shape_is_refused():
    env = Walk((3,))
    root = env.reset()
    root["_reset"] = torch.ones(3, 1, 1, dtype=torch.bool)
    with pytest.raises(DataError, match=r"_reset is torch.bool \[3, 1, 1\]; give a bool mask of shape \[3\]"):
        env.reset(root)


def test_a_step_without_an_action_names_what_is_there():
    env = Walk()
    with pytest.raises(DataError, match="has no entry 'action'; it has done, observation, terminated, truncated"):
        env.step(env.reset())


def test_an_action_of_another_shape_is_refused():
    env = Walk((2,))
    root = env.reset().set("action", torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(DataError, match=r"action has shape \[2, 3\]; the env needs \[2, 2\]"):
        env.step(root)


def test_an_action_of_another_dtype_is_cast_if_exact():
    env = Walk()
    root = env.reset()
    env.step(root.set("action", torch.tensor([0.0, 1.0])))
    with pytest.raises(DataError, match=r"action does not fit OneHot.*: .* cannot be written as int64"):
        env.step(root.set("action", torch.tensor([0.3, 1.7])))


def test_actions_that_are_single_numbers_come_as_arrays():
    class Place(Walk):
        def __init__(self):
            super().__init__()
            self.action_spec = Categorical(2)

        def _step_into(self, actions, out):
            assert isinstance(actions["action"], np.ndarray)
            super()._step_into({"action": np.eye(2)[actions["action"]]}, out)

    Place().rollout(2)
    Place().rollout(2, lambda _: torch.tensor(1))


def test_an_env_without_hooks_is_refused():
    class Nothing(EnvBase):
        pass

    with pytest.raises(TypeError, match="Nothing implements neither _step_into nor _step"):
        Nothing()


class Wrong(Countdown):
    """Breaks what it returns from a step."""

    def __init__(self, **changes):
        super().__init__((2,))
        self.changes = changes

    def _step(self, tensordict):
        result = super()._step(tensordict)
        for key, value in self.changes.items():
            result = result.exclude(key) if value is None else result.set(key, value)
        return result


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"left": torch.zeros(2, 3, dtype=torch.int64)}, r"left has shape \[2, 3\], but its spec says \[2, 1\]"),
        ({"left": torch.zeros(2, 1)}, "left has dtype float32, but its spec says int64"),
        ({"left": None}, "Wrong has no entry 'left'; it has reward, terminated"),
        ({"reward": torch.tensor([[0.0], [torch.nan]])}, r"the reward is \[0.0, nan\]; it must be finite"),
        ({"terminated": None}, "Wrong returned neither 'done' nor 'terminated' from a step"),
        ({"done": ALL, "truncated": ~ALL}, "Wrong is 'done', but neither 'terminated' nor 'truncated'"),
    ],
)
def test_results_of_a_tensordict_env_must_fit_its_specs(changes, sentence):
    env = Wrong(**changes)
    with pytest.raises((EnvironmentFailure, DataError), match=sentence):
        env.rand_step(env.reset())
    with pytest.raises((EnvironmentFailure, DataError), match=sentence):
        env.rollout(3)


def test_missing_flags_of_a_tensordict_env_follow_from_the_others():
    truncated = Wrong(terminated=None, truncated=torch.ones(2, 1, dtype=torch.bool), done=torch.ones(2, 1) > 0)
    step = truncated.rand_step(truncated.reset())["next"]
    assert step["done"].all()
    assert step["truncated"].all()
    assert not step["terminated"].any()
    unsaid = Wrong(done=ALL, terminated=~ALL)
    step = unsaid.rand_step(unsaid.reset())["next"]
    assert step["done"].all()
    assert step["truncated"].all()


def test_a_closed_env_may_be_closed_again():
    closed = []

    class Closing(Walk):
        def _close(self):
            closed.append(self)

    with Closing() as env:
        pass
    env.close()
    assert closed == [env]


def test_seeds_beyond_32_bits_are_refused():
    with pytest.raises(ConfigError, match=r"seed=-1 is not between 0 and 4294967295"):
        Walk().set_seed(-1)


def test_nested_observations_keep_their_path():
    class Nested(Walk):
        def __init__(self):
            super().__init__()
            self.observation_spec = Composite(robot=Composite(arm=Unbounded((2,))), time=Unbounded((1,)))

        def _tell(self, out, mask):
            out.observation["robot", "arm"][...] = self._places
            out.observation["time"][...] = 1.0

    env = Nested()
    rollout = env.rollout(3)
    assert rollout["robot", "arm"].shape == (rollout.shape[0], 2)
    assert rollout["next", "robot", "arm"].shape == rollout["robot", "arm"].shape


def test_arrays_and_tensordicts_agree():
    by_arrays, by_tensordicts = Walk((2,)), Walk((2,))
    by_arrays.set_seed(3)
    by_tensordicts.set_seed(3)
    frame = by_arrays.new_frame()
    by_arrays.reset_into(frame)
    root = by_tensordicts.reset()
    np.testing.assert_array_equal(frame.observation["observation"], root["observation"])
    action = torch.tensor([[1, 0], [0, 1]])
    by_arrays.step_into({"action": action.numpy()}, frame)
    stepped = by_tensordicts.step(TensorDict({"action": action}, [2]))
    for key, array in frame.arrays().items():
        np.testing.assert_array_equal(array, stepped["next", key])
