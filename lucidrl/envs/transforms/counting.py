"""Transforms that track an episode: number of steps, sum of rewards, whether it has just begun, its maximum length."""

from __future__ import annotations

import numpy as np
import torch

from lucidrl.envs.arrays import Frame, Key
from lucidrl.envs.base import EnvBase
from lucidrl.envs.failures import at_least_one
from lucidrl.envs.specs import Bounded, Categorical, Composite, Spec, Unbounded
from lucidrl.envs.transforms.base import Transform


class _EpisodeEntry(Transform):
    """Adds an entry [*B, 1] that a reset sets to a fixed value.

    Args:
        spec: spec of a single env.
        at_reset: the value after a reset.
    """

    def __init__(self, key: Key, spec: Spec, at_reset: float = 0):
        super().__init__()
        self.out_keys = (key,)
        self._key, self._spec, self._at_reset = key, spec, at_reset

    def prepare(self, env: EnvBase) -> None:
        # A copy of the last value: others may write to the frame.
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
        max_steps: truncates episodes at this length; None does not.
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
    """Adds the sum of the rewards since the reset, float32 [*B, 1], 0 after it."""

    def __init__(self, out_key: Key = "episode_reward"):
        super().__init__(out_key, Unbounded((1,), torch.float32))

    def step(self, source: Frame, target: Frame) -> None:
        total = target.observation[self._key]
        np.add(self._last, source.reward, total)
        self._last[...] = total


class InitTracker(_EpisodeEntry):
    """Adds whether an episode starts, bool [*B, 1]: True after a reset, False after a step."""

    def __init__(self, init_key: Key = "is_init"):
        super().__init__(init_key, Categorical(2, (1,), torch.bool), at_reset=True)

    def step(self, source: Frame, target: Frame) -> None:
        target.observation[self._key].fill(False)


def _truncate(frame: Frame, where: np.ndarray) -> None:
    np.logical_or(frame.truncated, where, out=frame.truncated)
    np.logical_or(frame.done, where, out=frame.done)
