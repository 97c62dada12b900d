"""Small envs that tests share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from lucidrl.envs.arrays import Arrays, Frame
from lucidrl.envs.base import EnvBase
from lucidrl.envs.specs import Bounded, Composite, OneHot, Unbounded

START = 21


class Countdown(EnvBase):
    """A stateless TensorDict env: actions subtract from the entry "left"."""

    def __init__(self, batch_size: Sequence[int] = ()):
        super().__init__(batch_size=batch_size)
        shape = (*batch_size, 1)
        self.observation_spec = Composite(left=Unbounded(shape, torch.int64), shape=batch_size)
        self.action_spec = Bounded(1, 3, shape, torch.int64)

    def _set_seed(self, seed: int) -> None: ...

    def _reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        return TensorDict({"left": torch.full((*self.batch_size, 1), START)}, self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        left = tensordict["left"] - tensordict["action"]
        reward = -torch.ones(*self.batch_size, 1)
        return TensorDict({"left": left, "reward": reward, "terminated": left <= 0}, self.batch_size)


class Walk(EnvBase):
    """An array env: a walk from a random place to either end, 0 or 1; each env of the batch has its own place."""

    def __init__(self, batch_size: Sequence[int] = ()):
        super().__init__(batch_size=batch_size)
        self.observation_spec = Composite(observation=Unbounded((*batch_size, 2)), shape=batch_size)
        self.action_spec = OneHot(2, (*batch_size, 2))
        self._places = np.zeros(batch_size)
        self._random = np.random.default_rng()

    def _set_seed(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def _reset_into(self, out: Frame, mask: np.ndarray | None) -> None:
        places = self._random.uniform(0.3, 0.7, self.batch_size)
        self._places = places if mask is None else np.where(mask, places, self._places)
        self._tell(out, mask)

    def _step_into(self, actions: Arrays, out: Frame) -> None:
        self._places = self._places + np.where(actions["action"][..., 1] == 1, 0.1, -0.1)
        self._tell(out, None)
        out.reward[..., 0] = self._places
        out.terminated[..., 0] = (self._places <= 0) | (self._places >= 1)
        out.truncated.fill(False)
        out.done[...] = out.terminated

    def _tell(self, out: Frame, mask: np.ndarray | None) -> None:
        seen = np.stack([self._places, 1 - self._places], axis=-1)
        if mask is None:
            out.observation["observation"][...] = seen
        else:
            out.observation["observation"][mask] = seen[mask]
