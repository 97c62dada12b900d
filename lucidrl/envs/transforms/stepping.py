"""Transforms that step the env below them by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lucidrl.envs.arrays import Arrays, Frame
from lucidrl.envs.transforms.base import Transform
from lucidrl.errors import ConfigError

if TYPE_CHECKING:
    from lucidrl.envs.base import EnvBase


class FrameSkip(Transform):
    """Repeats every action `frame_skip` times in all, or until the episode is done, and sums the rewards."""

    steps_env = True

    def __init__(self, frame_skip: int):
        super().__init__(in_keys=["reward"])
        if frame_skip < 1:
            raise ConfigError(f"frame_skip={frame_skip} would never act; give at least 1")
        self.frame_skip = frame_skip

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
    """Takes some steps without effect after every reset, so that episodes begin at different moments.

    An episode that ends by them is begun again. Put transforms that count steps around this one, or they count these.

    Args:
        noops: how many steps; with `random` at most so many, and at least one.
        random: whether every reset draws their number anew; the env's seed decides it.
        noop_action: what has no effect, as `action_spec.encode` takes it: the index of the choice, or a number.
    """

    steps_env = True

    def __init__(self, noops: int = 30, random: bool = True, noop_action: float = 0):
        super().__init__()
        if noops < 1:
            raise ConfigError(f"noops={noops} leaves nothing to do; give at least 1")
        self.noops, self.random, self.noop_action = noops, random, noop_action
        self._rng = np.random.default_rng()

    def prepare(self, env: EnvBase) -> None:
        self._actions = {key: spec.encode(self.noop_action).cpu().numpy() for key, spec in env.action_leaves().items()}

    def set_seed(self, seed: int) -> None:
        # Not the seed alone, from which the env draws the same numbers.
        self._rng = np.random.default_rng((seed, self.noops))

    def reset(self, source: Frame, target: Frame, mask: np.ndarray | None) -> None:
        assert self.parent is not None
        for _ in range(int(self._rng.integers(1, self.noops, endpoint=True)) if self.random else self.noops):
            self.parent.step_into(self._actions, source)
            if source.done.any():
                self.parent.reset_into(source)

    def step(self, source: Frame, target: Frame) -> None: ...
