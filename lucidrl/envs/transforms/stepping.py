"""Transforms that step the env themselves."""

from __future__ import annotations

import numpy as np

from lucidrl.envs.arrays import Arrays, Frame
from lucidrl.envs.base import EnvBase
from lucidrl.envs.failures import at_least_one
from lucidrl.envs.transforms.base import Transform


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
    """Takes steps without effect after every reset, so episodes start in different states.

    An episode that ends within these steps is reset. Transforms inside this one see the steps, those around it do not.

    Args:
        noops: number of steps; with `random` the maximum.
        random: draw a number from 1 to `noops` in every reset.
        noop_action: the action without effect, as an argument of `action_spec.encode`.
    """

    steps_env = True

    def __init__(self, noops: int = 30, random: bool = True, noop_action: float = 0):
        super().__init__()
        self.noops, self.random, self.noop_action = at_least_one("noops", noops), random, noop_action
        self._rng = np.random.default_rng()

    def prepare(self, env: EnvBase) -> None:
        self._actions = {key: spec.encode(self.noop_action).cpu().numpy() for key, spec in env.action_leaves().items()}

    def set_seed(self, seed: int) -> None:
        # Not the seed alone, which the env uses.
        self._rng = np.random.default_rng((seed, self.noops))

    def reset(self, source: Frame, target: Frame, mask: np.ndarray | None) -> None:
        assert self.parent is not None
        for _ in range(int(self._rng.integers(1, self.noops, endpoint=True)) if self.random else self.noops):
            self.parent.step_into(self._actions, source)
            if source.done.any():
                self.parent.reset_into(source)

    def step(self, source: Frame, target: Frame) -> None: ...
