"""Every claim is held against a bare loop over gymnasium, or against a small env that repeats what it was given."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from lucidrl.envs.checks import check_env_specs
from lucidrl.envs.gym import GymEnv
from lucidrl.envs.specs import Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, Unbounded
from lucidrl.errors import ConfigError, DataError, EnvironmentFailure

NUM_STEPS = 60


class EchoEnv(gymnasium.Env):
    """Observes the action that it was given last; it starts with a random one, and ends after ten steps."""

    def __init__(self, space):
        self.observation_space = self.action_space = space
        self.given = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.action_space.seed(int(self.np_random.integers(2**31)))
        self.given = []
        return self.action_space.sample(), {}

    def step(self, action):
        self.given.append(action)
        return action, float(len(self.given)), len(self.given) >= 10, False, {}


class ScriptedEnv(gymnasium.Env):
    """Returns scripted values."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, observation=None, reward=1.0, reset_info=None, step_info=None):
        self.observation = np.zeros(3, np.float32) if observation is None else observation
        self.reward, self.reset_info, self.step_info = reward, reset_info or {}, step_info or {}

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), self.reset_info

    def step(self, action):
        return self.observation, self.reward, False, False, self.step_info


class CountingEnv(gymnasium.Env):
    """Observes its seed, the resets since that, and steps; ends at the fifth step, or is cut at the seventh."""

    observation_space = spaces.Box(0, 10**6, (3,), np.int64)
    action_space = spaces.Discrete(2)

    def __init__(self, broken_at=None):
        self.broken_at = broken_at
        self.seed_given = self.resets = self.steps = 0

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.seed_given, self.resets = seed, 0
        self.resets, self.steps = self.resets + 1, 0
        return self.observation(), {}

    def step(self, action):
        self.steps += 1
        if self.broken_at == (self.seed_given, self.steps):
            raise ZeroDivisionError("the pole fell off")
        # Action 1 passes the first end by.
        return self.observation(), 1.0, self.steps == 5 and action == 0, self.steps == 7, {}

    def observation(self):
        return np.array([self.seed_given, self.resets, self.steps])


gymnasium.register("lucidrl-test/Counting-v0", CountingEnv)


def actions_of(space, count):
    space.seed(7)
    return [space.sample() for _ in range(count)]


def bare_loop(env_id, seed, actions):
    """Observation, reward and both flags of every step, and the roots, as gymnasium gives them."""
    env = gymnasium.make(env_id)
    observation, _ = env.reset(seed=seed)
    roots, steps = [observation], []
    for action in actions:
        steps.append(env.step(action)[:4])
        observation = env.reset()[0] if steps[-1][2] or steps[-1][3] else steps[-1][0]
        roots.append(observation)
    return roots, steps


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "MountainCar-v0", "Taxi-v4"])
def test_a_seeded_env_is_bit_identical_to_a_bare_loop(env_id, categorical):
    env = GymEnv(env_id, categorical_action_encoding=categorical)
    actions = actions_of(gymnasium.make(env_id).action_space, 300)
    roots, steps = bare_loop(env_id, 3, actions)
    env.set_seed(3)
    root = env.reset()
    for action, expected_root, expected in zip(actions, roots, steps, strict=False):
        assert torch.equal(root["observation"], encoded(env.observation_spec["observation"], expected_root))
        step, root = env.step_and_maybe_reset(root.set("action", env.action_spec.encode(action)))
        observation, reward, terminated, truncated = expected
        assert torch.equal(step["next", "observation"], encoded(env.observation_spec["observation"], observation))
        assert step["next", "reward"].tolist() == [np.float32(reward)]
        assert step["next", "terminated"].tolist() == [terminated]
        assert step["next", "truncated"].tolist() == [truncated]
        assert step["next", "done"].tolist() == [terminated or truncated]
        assert not root["done"].any()


def encoded(spec, value):
    return spec.encode(value) if isinstance(value, int | np.integer) else torch.from_numpy(value)


def test_envs_of_a_batch_do_what_they_do_alone():
    together = GymEnv("CartPole-v1", num_envs=3)
    assert together.set_seed(11) == 14
    actions = [[int(x) for x in np.random.default_rng(i).integers(2, size=NUM_STEPS)] for i in range(3)]
    record = together.rollout(NUM_STEPS, Scripted(together, actions), break_when_any_done=False)
    assert record.batch_size == (3, NUM_STEPS)
    for index in range(3):
        roots, steps = bare_loop("CartPole-v1", 11 + index, actions[index])
        assert np.array_equal(record["observation"][index].numpy(), np.stack(roots[:-1]))
        assert np.array_equal(record["next", "observation"][index].numpy(), np.stack([step[0] for step in steps]))
        assert record["next", "terminated"][index, :, 0].tolist() == [step[2] for step in steps]
    assert record["next", "done"].sum() > 3


class Scripted:
    """Replays actions, step by step."""

    def __init__(self, env, actions):
        self.spec, self.steps = env.action_spec, iter(zip(*actions, strict=True))

    def __call__(self, tensordict):
        return self.spec.encode(list(next(self.steps)))


def test_ends_of_both_kinds_are_kept_apart():
    env = GymEnv(CountingEnv(), categorical_action_encoding=True)
    for action, flag in ((0, "terminated"), (1, "truncated")):
        last = env.rollout(20, lambda td, action=action: torch.tensor(action))[-1]["next"]
        assert last["done"].all()
        assert [name for name in ("terminated", "truncated") if last[name].any()] == [flag]


def test_only_the_first_reset_after_set_seed_is_seeded():
    env = GymEnv("lucidrl-test/Counting-v0", num_envs=2)
    assert env.set_seed(5) == 7
    assert env.reset()["observation"].tolist() == [[5, 1, 0], [6, 1, 0]]
    assert env.reset()["observation"].tolist() == [[5, 2, 0], [6, 2, 0]]
    env.set_seed(5)
    assert env.reset()["observation"].tolist() == [[5, 1, 0], [6, 1, 0]]


def test_seeds_wrap_around_after_the_last_one():
    env = GymEnv("lucidrl-test/Counting-v0", num_envs=2)
    assert env.set_seed(2**32 - 1) == 1
    assert env.reset()["observation"][:, 0].tolist() == [2**32 - 1, 0]


def test_a_partial_reset_leaves_the_other_envs_where_they_are():
    env = GymEnv("lucidrl-test/Counting-v0", num_envs=3)
    env.set_seed(0)
    moved = env.rand_step(env.reset())["next"]
    root = env.reset(moved.set("_reset", torch.tensor([False, True, False])))
    assert root["observation"].tolist() == [[0, 1, 1], [1, 2, 0], [2, 1, 1]]
    assert env.rand_step(root)["next", "observation"][:, 2].tolist() == [2, 1, 2]


SPACES = [
    spaces.Box(-1, 1, (2, 3), np.float64),
    spaces.Box(-1, 1, (), np.float32),
    spaces.Box(0, 255, (4, 4, 3), np.uint8),
    spaces.Box(np.array([-1, -np.inf], np.float32), np.array([np.inf, 2], np.float32)),
    spaces.Discrete(4, start=-2),
    spaces.MultiDiscrete([2, 3, 4]),
    spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]]),
    spaces.MultiBinary(5),
    spaces.MultiBinary([2, 3]),
    spaces.Dict(place=spaces.Box(-1, 1, (3,)), hand=spaces.Dict(grip=spaces.MultiBinary(2), finger=spaces.Discrete(3))),
    spaces.Tuple([spaces.Discrete(2), spaces.Tuple([spaces.Box(0, 1, (2,)), spaces.MultiDiscrete([2, 2])])]),
    spaces.Tuple([spaces.Dict(a=spaces.Discrete(5, start=1)), spaces.Box(-1, 1, (1,))]),
]


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_actions_and_observations_of_every_space_go_round_unchanged(space, categorical):
    echo = EchoEnv(space)
    env = GymEnv(echo, categorical_action_encoding=categorical)
    env.set_seed(0)
    root = env.reset()
    for _ in range(5):
        step = env.rand_step(root)
        assert space.contains(echo.given[-1])
        came = step["next"] if isinstance(space, spaces.Dict) else step["next", "observation"]
        for key in env.action_keys:
            rest = key[1:] if isinstance(key, tuple) else ()
            assert torch.equal(came[rest] if rest else came, step[key])
    check_env_specs(env)


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_an_action_given_to_the_env_is_not_changed_by_later_ones(space):
    echo = EchoEnv(space)
    env = GymEnv(echo)
    actions, frame = env.new_actions(), env.new_frame()
    env.reset_into(frame)
    env.sample_actions(actions)
    env.step_into(actions, frame)
    before = repr(echo.given[0])
    for array in actions.values():
        array.fill(0)
    assert repr(echo.given[0]) == before


@pytest.mark.parametrize(
    ("space", "categorical", "expected"),
    [
        (spaces.Discrete(3), False, OneHot(3)),
        (spaces.Discrete(3), True, Categorical(3)),
        (spaces.MultiDiscrete([2, 3]), False, MultiOneHot([2, 3])),
        (spaces.MultiDiscrete([[2, 3]]), False, MultiOneHot([2, 3])),
        (spaces.MultiDiscrete([[2, 3]]), True, MultiCategorical([[2, 3]])),
        (spaces.Box(-np.inf, np.inf, (2,)), False, Unbounded((2,))),
        (spaces.Box(0, 9, (2,), np.int32), False, Bounded(0, 9, (2,), torch.int32)),
    ],
    ids=repr,
)
def test_a_space_has_the_matching_spec(space, categorical, expected):
    env = GymEnv(EchoEnv(space), categorical_action_encoding=categorical)
    assert env.action_spec == expected
    assert env.observation_spec == Composite(observation=expected)


def test_parts_of_dict_and_tuple_spaces_are_separate_entries():
    env = GymEnv(EchoEnv(SPACES[9]))
    assert list(env.observation_spec.leaves()) == ["place", ("hand", "grip"), ("hand", "finger")]
    assert env.action_keys == [("action", "place"), ("action", "hand", "grip"), ("action", "hand", "finger")]
    env = GymEnv(EchoEnv(SPACES[10]))
    assert env.action_keys == [("action", "0"), ("action", "1", "0"), ("action", "1", "1")]
    assert next(iter(env.observation_spec.leaves())) == ("observation", "0")


@pytest.mark.parametrize("categorical", [False, True])
def test_a_batch_has_room_for_every_env(categorical):
    env = GymEnv("Taxi-v4", num_envs=2, categorical_action_encoding=categorical)
    shape = (2,) if categorical else (2, 6)
    assert (env.batch_size, env.action_spec.shape, env.reward_spec.shape) == ((2,), shape, (2, 1))
    check_env_specs(env)


def test_pixels_are_the_rendered_image():
    bare = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    bare.reset(seed=1)
    first = bare.render()
    bare.step(1)
    env = GymEnv("CartPole-v1", from_pixels=True)
    env.set_seed(1)
    root = env.reset()
    assert set(root.keys()) == {"pixels", "done", "terminated", "truncated"}
    assert (root["pixels"].dtype, root["pixels"].shape) == (torch.uint8, (400, 600, 3))
    assert np.array_equal(root["pixels"].numpy(), first)
    step = env.step(root.set("action", torch.tensor([0, 1])))
    assert np.array_equal(step["next", "pixels"].numpy(), bare.render())
    assert not np.array_equal(step["next", "pixels"].numpy(), first)


def test_pixels_and_state_can_be_observed_together():
    env = GymEnv(gymnasium.make("CartPole-v1", render_mode="rgb_array"), from_pixels=True, pixels_only=False)
    assert list(env.observation_spec) == ["observation", "pixels"]
    check_env_specs(env)


def test_repeated_actions_add_their_rewards_and_stop_at_the_end():
    env = GymEnv(CountingEnv(), frame_skip=3, categorical_action_encoding=True)
    record = env.rollout(10, lambda td: torch.tensor(0))
    assert record["next", "reward"][:, 0].tolist() == [3.0, 2.0]
    assert record["next", "observation"][:, 2].tolist() == [3, 5]
    assert record["next", "terminated"][:, 0].tolist() == [False, True]


@pytest.mark.parametrize(
    "info_keys", [["lives", "place"], {"lives": Unbounded((), torch.int64), "place": Unbounded((2,))}]
)
def test_info_keys_are_observed(info_keys):
    start = {"lives": 3, "place": np.zeros(2, np.float32), "other": "text"}
    scripted = ScriptedEnv(reset_info=start, step_info={"lives": 2, "place": np.ones(2, np.float32)})
    env = GymEnv(scripted, info_keys=info_keys)
    assert list(env.observation_spec) == ["observation", "lives", "place"]
    root = env.reset()
    assert (root["lives"].item(), root["place"].tolist()) == (3, [0, 0])
    step = env.rand_step(root)
    assert (step["next", "lives"].item(), step["next", "place"].tolist()) == (2, [1, 1])


def test_info_of_steps_alone_is_zero_after_a_reset():
    env = GymEnv(ScriptedEnv(step_info={"lives": 2}), info_keys={"lives": Unbounded((), torch.int64)})
    root = env.reset()
    assert root["lives"].item() == 0
    assert env.rand_step(root)["next", "lives"].item() == 2
    assert env.reset()["lives"].item() == 0


def one_step(env):
    env.set_seed(0)
    return env.rand_step(env.reset())


@pytest.mark.parametrize(
    ("scripted", "complaint"),
    [
        ({"observation": np.zeros(4, np.float32)}, r"observation has shape \[4\], but its spec says \[3\]"),
        ({"observation": np.zeros(3)}, "observation has dtype float64, but its spec says float32"),
        ({"observation": {"a": 1}}, r"observation has shape \[\]"),
        ({"reward": float("nan")}, "reward is nan"),
        ({"reward": float("inf")}, "reward is inf"),
        ({"reward": None}, "reward is None"),
    ],
)
def test_values_outside_their_spec_are_refused(scripted, complaint):
    with pytest.raises(EnvironmentFailure, match=complaint):
        one_step(GymEnv(ScriptedEnv(**scripted)))


def test_a_list_is_taken_for_an_array():
    assert one_step(GymEnv(ScriptedEnv(observation=[0.5, 0, 0])))["next", "observation"].tolist() == [0.5, 0, 0]


@pytest.mark.parametrize(
    ("space", "given", "complaint"),
    [
        (spaces.Discrete(3, start=1), 4, "'observation' is 4, which is not in its space"),
        (spaces.Discrete(3, start=1), 0, "is not in its space"),
        (spaces.Discrete(3), 1.5, "'observation' is 1.5, but its space is Discrete"),
        (spaces.MultiDiscrete([2, 3]), np.array([1, 3]), "is not in its space"),
        (spaces.MultiDiscrete([2, 3]), np.array([-1, 0]), "is not in its space"),
        (spaces.MultiDiscrete([2, 3]), np.array([1]), "has shape"),
        (spaces.Tuple([spaces.Discrete(2)]), (1, 1), r"returned the keys \['0', '1'\], but its space has \['0'\]"),
        (spaces.Dict(a=spaces.Discrete(2)), {"b": 1}, r"returned the keys \['b'\], but its space has \['a'\]"),
        (spaces.Dict(a=spaces.Discrete(2)), {"a": 1, "b": 1}, r"returned the keys \['a', 'b'\]"),
        (spaces.Dict(a=spaces.Discrete(2)), 3, "returned a int"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("categorical", [False, True])
def test_observations_outside_of_their_space_are_refused(space, given, complaint, categorical):
    class Wrong(EchoEnv):
        def step(self, action):
            return given, 1.0, False, False, {}

    with pytest.raises(EnvironmentFailure, match=complaint):
        one_step(GymEnv(Wrong(space), categorical_action_encoding=categorical))


@pytest.mark.parametrize(
    ("space", "categorical", "action"),
    [
        (spaces.Discrete(2), False, [0, 0]),
        (spaces.Discrete(2), True, 2),
        (spaces.Discrete(2), True, -1),
        (spaces.MultiDiscrete([2, 2]), False, [1, 1, 0, 0]),
        (spaces.MultiDiscrete([2, 2]), True, [0, 2]),
    ],
    ids=repr,
)
def test_actions_that_choose_nothing_are_refused(space, categorical, action):
    env = GymEnv(EchoEnv(space), categorical_action_encoding=categorical)
    with pytest.raises(DataError, match="'action' is"):
        env.step(env.reset().set("action", torch.tensor(action)))


def test_a_failure_in_a_batch_names_env_seed_phase_and_action():
    env = GymEnv("lucidrl-test/Counting-v0", num_envs=3, broken_at=(21, 1))
    env.set_seed(20)
    root = env.reset().set("action", torch.tensor([[1, 0], [0, 1], [1, 0]]))
    with pytest.raises(EnvironmentFailure, match=r"env 1 \(seed 21, action \[0, 1\]\) failed in its step") as failure:
        env.step(root)
    assert "ZeroDivisionError: the pole fell off" in str(failure.value)
    assert isinstance(failure.value.__cause__, ZeroDivisionError)


def test_the_failure_of_a_single_env_is_its_own_exception():
    env = GymEnv(CountingEnv(broken_at=(0, 1)))
    with pytest.raises(ZeroDivisionError, match="the pole fell off"):
        one_step(env)


def test_a_step_without_an_info_key_is_refused():
    env = GymEnv(ScriptedEnv(reset_info={"lives": 3}, step_info={"level": 1}), info_keys=["lives"])
    with pytest.raises(EnvironmentFailure, match=r"the info of a step has no 'lives'; it has \['level'\]"):
        one_step(env)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: GymEnv("CartPol-v1"), "Did you mean: `CartPole`"),
        (lambda: GymEnv("CartPole-v1", gravitas=3), "gravitas"),
        (lambda: GymEnv("no_such_module:CartPole-v1"), "no_such_module"),
        (lambda: GymEnv(None), "env is None; give a gymnasium id"),
        (lambda: GymEnv("CartPole-v1", num_envs=0), "num_envs=0"),
        (lambda: GymEnv("CartPole-v1", frame_skip=0), "frame_skip=0"),
        (lambda: GymEnv(ScriptedEnv(), num_envs=2), "join instances with SerialEnv"),
        (lambda: GymEnv(ScriptedEnv(), gravity=2), r"\['gravity'\] are arguments of gymnasium.make"),
        (lambda: GymEnv(ScriptedEnv(), from_pixels=True), "render_mode='rgb_array'; the env has None"),
        (lambda: GymEnv(ScriptedEnv(), info_keys=["lives"]), r"'lives', but the info of a reset has \[\]"),
        (
            lambda: GymEnv(ScriptedEnv(), info_keys={"observation": Unbounded()}),
            "the entry name 'observation' is reserved or occurs twice",
        ),
        (lambda: GymEnv(ScriptedEnv(reset_info={"name": "x"}), info_keys=["name"]), "torch has no equivalent of dtype"),
        (lambda: GymEnv(EchoEnv(spaces.Dict(reward=spaces.Discrete(2)))), "the entry name 'reward' is reserved"),
        (lambda: GymEnv(EchoEnv(spaces.Text(5))), "'action' has the unsupported space Text"),
        (lambda: GymEnv(EchoEnv(spaces.Dict({1: spaces.Discrete(2)}))), "has the key 1"),
    ],
)
def test_unsupported_gymnasium_envs_are_refused(make, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make()


def test_closing_closes_every_env_once():
    class Closing(ScriptedEnv):
        closed = 0

        def close(self):
            self.closed += 1

    scripted = Closing()
    with GymEnv(scripted) as env:
        env.rollout(2)
    env.close()
    assert scripted.closed == 1


def test_entries_have_the_devices_of_the_env():
    env = GymEnv("CartPole-v1", device="cpu")
    assert isinstance(env.reset(), TensorDict)
    assert env.action_spec.device == env.device == env.reset().device
