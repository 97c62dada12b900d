"""An env that replays its unfinished episode continues as if the run had not stopped."""

from __future__ import annotations

import json

import gymnasium
import numpy as np
import pytest

from lucidrl.recipes.control import EpisodeTape


class NoisyWalk(gymnasium.Env):
    """Draws in every step, and ends on its own."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=1)
        return self.place.copy(), {}

    def step(self, action):
        self.place += action.sum() + self.np_random.normal(size=1)
        return self.place.copy(), float(-self.place[0]), bool(abs(self.place[0]) > 3), False, {}


class Twister(NoisyWalk):
    """Draws from another kind of generator, whose state has arrays."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.np_random = np.random.Generator(np.random.MT19937(seed))
        return super().reset(options=options)


class Legacy(NoisyWalk):
    """Draws from numpy's old kind of generator."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.np_random = np.random.RandomState(seed)
        return super().reset(options=options)


class Forgetful(NoisyWalk):
    """Draws from a generator that no seed decides."""

    def step(self, action):
        self.place += np.random.default_rng().normal(size=1) * 1e-3
        return self.place.copy(), 0.0, False, False, {}


def make(name):
    return gymnasium.make(name) if isinstance(name, str) else name()


def play(env, actions, num_steps):
    """Observations, rewards and flags, with a reset where an episode ends."""
    seen = []
    for _ in range(num_steps):
        observation, reward, terminated, truncated, _ = env.step(actions.sample())
        seen.append((observation.tolist(), float(reward), terminated, truncated))
        if terminated or truncated:
            seen.append(env.reset()[0].tolist())
    return seen


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", NoisyWalk, Twister])
@pytest.mark.parametrize("num_steps", [0, 3, 37])
def test_a_resumed_env_continues_bit_for_bit(name, num_steps):
    tape = EpisodeTape(make(name))
    env = tape.taped_env()
    env.reset(seed=3)
    actions = env.action_space
    actions.seed(0)
    play(env, actions, num_steps)
    state = json.loads(json.dumps(tape.state_dict()))
    last = np.array(tape._observation)

    resumed = EpisodeTape(make(name))
    resumed.load_state_dict(state)
    other = resumed.taped_env()
    observation, _ = other.reset(seed=99)  # the episode that was saved wins over any seed
    assert np.array_equal(observation, last)
    actions.seed(1)
    expected = play(env, actions, 50)
    actions.seed(1)
    assert play(other, actions, 50) == expected
    assert resumed.state_dict() == tape.state_dict()


def test_a_time_limit_counts_the_frames_before_the_resume():
    tape = EpisodeTape(gymnasium.make("Pendulum-v1", max_episode_steps=10))
    env = tape.taped_env()
    env.reset(seed=0)
    play(env, env.action_space, 7)
    resumed = EpisodeTape(gymnasium.make("Pendulum-v1", max_episode_steps=10))
    resumed.load_state_dict(tape.state_dict())
    other = resumed.taped_env()
    other.reset()
    flags = [other.step(other.action_space.sample())[3] for _ in range(3)]
    assert flags == [False, False, True]


@pytest.mark.parametrize("kind", [Forgetful, Legacy])
def test_an_env_that_is_not_deterministic_is_reported_and_continues(caplog, kind):
    tape = EpisodeTape(kind())
    env = tape.taped_env()
    env.reset(seed=0)
    env.reset()
    env.step(np.zeros(2, np.float32))
    resumed = EpisodeTape(kind())
    resumed.load_state_dict(tape.state_dict())
    resumed.taped_env().reset()
    assert "is not deterministic" in caplog.text


def test_an_episode_that_ends_too_soon_is_said_and_a_new_one_begins(caplog):
    tape = EpisodeTape(gymnasium.make("Pendulum-v1"))
    env = tape.taped_env()
    env.reset(seed=0)
    play(env, env.action_space, 5)
    resumed = EpisodeTape(gymnasium.make("Pendulum-v1", max_episode_steps=3))
    resumed.load_state_dict(tape.state_dict())
    resumed.taped_env().reset()
    assert "ended before the saved step" in caplog.text
    assert resumed.state_dict()["actions"] == []
