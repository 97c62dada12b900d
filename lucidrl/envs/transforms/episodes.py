"""Transforms of episodes: count steps, sum rewards, limit the length, repeat actions and vary the initial state."""

from __future__ import annotations

import numpy as np
import torch

from lucidrl.envs.arrays import Arrays, Frame, Key
from lucidrl.envs.base import EnvBase
from lucidrl.envs.failures import at_least_one
from lucidrl.envs.specs import Bounded, Categorical, Composite, Spec, Unbounded
from lucidrl.envs.transforms.base import Transform


class _EpisodeEntry(Transform):
    """Adds an entry [*B, 1] that a reset sets to a fixed value.

    Args:
        spec: spec of the entry for a single env.
        at_reset: value of the entry after a reset.
    """

    def __init__(self, key: Key, spec: Spec, at_reset: float = 0):
        super().__init__()
        self.out_keys = (key,)
        self._key, self._spec, self._at_reset = key, spec, at_reset

    def prepare(self, env: EnvBase) -> None:
        # A copy of the last value, because the frame may be overwritten.
        self._last = np.full((*env.batch_size, 1), self._at_reset, self._spec.numpy_dtype)

    def reset(self, source: Frame, target: Frame, mask: np.ndarray | None) -> None:
        rows = ... if mask is None else mask
        self._last[rows] = self._at_reset
        target.observation[self._key][rows] = self._at_reset

    def transform_observation_spec(self, spec: Composite) -> Composite:
        spec[self._key] = self._spec.expand((*spec.shape, 1))
        return spec


class StepCounter(_EpisodeEntry):
    """Adds the number of steps since the reset, int64 [*B, 1].

    Args:
        max_steps: truncate episodes at this length; None for no limit.
        step_count_key: name of the entry.
    """

    def __init__(self, max_steps: int | None = None, step_count_key: Key = "step_count"):
        super().__init__(step_count_key, Bounded(0, torch.iinfo(torch.int64).max, (1,), torch.int64))
        self.max_steps = None if max_steps is None else at_least_one("max_steps", max_steps)

    def prepare(self, env: EnvBase) -> None:
        super().prepare(env)
        self._one = np.ones_like(self._last)

    def step(self, source: Frame, target: Frame) -> None:
        count = target.observation[self._key]
        # In place, or with a Python number, numpy takes three times as long.
        np.add(self._last, self._one, count)
        self._last[...] = count
        if self.max_steps is not None:
            _truncate(target, count >= self.max_steps)


class TimeLimit(Transform):
    """Truncates episodes after `max_steps`; adds no entry."""

    def __init__(self, max_steps: int):
        super().__init__()
        self.max_steps = at_least_one("max_steps", max_steps)

    def prepare(self, env: EnvBase) -> None:
        self._count = np.zeros((*env.batch_size, 1), np.int64)

    def reset(self, source: Frame, target: Frame, mask: np.ndarray | None) -> None:
        self._count[... if mask is None else mask] = 0

    def step(self, source: Frame, target: Frame) -> None:
        self._count += 1
        _truncate(target, self._count >= self.max_steps)


class RewardSum(_EpisodeEntry):
    """Adds the sum of the rewards since the reset, float32 [*B, 1]."""

    def __init__(self, out_key: Key = "episode_reward"):
        super().__init__(out_key, Unbounded((1,), torch.float32))

    def step(self, source: Frame, target: Frame) -> None:
        total = target.observation[self._key]
        np.add(self._last, source.reward, total)
        self._last[...] = total


class InitTracker(_EpisodeEntry):
    """Adds a flag for the start of an episode, bool [*B, 1]: True after a reset, False after a step."""

    def __init__(self, init_key: Key = "is_init"):
        super().__init__(init_key, Categorical(2, (1,), torch.bool), at_reset=True)

    def step(self, source: Frame, target: Frame) -> None:
        target.observation[self._key].fill(False)


def _truncate(frame: Frame, where: np.ndarray) -> None:
    np.logical_or(frame.truncated, where, out=frame.truncated)
    np.logical_or(frame.done, where, out=frame.done)


class FrameSkip(Transform):
    """Applies every action `frame_skip` times, or until the episode is done, and sums the rewards."""

    steps_env = True

    def __init__(self, frame_skip: int):
        super().__init__(in_keys=["reward"])
        self.frame_skip = at_least_one("frame_skip", frame_skip)

    def before_step(self, actions: Arrays) -> Arrays:
        self._actions = actions
        return actions

    def step(self, source: Frame, target: Frame) -> None:
        assert self.parent is not None
        target.reward[...] = source.reward
        for _ in range(self.frame_skip - 1):
            if source.done.any():
                break
            self.parent.step_into(self._actions, source)
            target.reward += source.reward


class NoopReset(Transform):
    """Takes no-op steps after every reset, so that episodes start in different states.

    If the episode ends during these steps, the env is reset again. Transforms inside this one process the no-op steps;
    transforms around it do not.

    Args:
        noops: number of no-op steps; with `random`, the maximum.
        random: draw the number of steps from 1 to `noops` in every reset.
        noop_action: the no-op action, as an argument of `action_spec.encode`.
    """

    steps_env = True

    def __init__(self, noops: int = 30, random: bool = True, noop_action: float = 0):
        super().__init__()
        self.noops, self.random, self.noop_action = at_least_one("noops", noops), random, noop_action
        self._rng = np.random.default_rng()

    def prepare(self, env: EnvBase) -> None:
        self._actions = {key: spec.encode(self.noop_action).cpu().numpy() for key, spec in env.action_leaves().items()}

    def set_seed(self, seed: int) -> None:
        # Not only the seed: the env draws from that stream.
        self._rng = np.random.default_rng((seed, self.noops))

    def reset(self, source: Frame, target: Frame, mask: np.ndarray | None) -> None:
        assert self.parent is not None
        for _ in range(int(self._rng.integers(1, self.noops, endpoint=True)) if self.random else self.noops):
            self.parent.step_into(self._actions, source)
            if source.done.any():
                self.parent.reset_into(source)

    def step(self, source: Frame, target: Frame) -> None: ...
