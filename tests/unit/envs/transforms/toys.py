"""A small env with one entry of every kind, and what it does when it is not transformed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict

from lucidrl.envs.arrays import Arrays, Frame
from lucidrl.envs.base import EnvBase
from lucidrl.envs.specs import Binary, Bounded, Categorical, Composite, OneHot, Unbounded
from lucidrl.envs.transforms import Compose, Transform, TransformedEnv

SEED = 7
NUM_STEPS = 40


class Weather(EnvBase):
    """Observes random numbers; the episode of env i ends after `first_length` + i steps."""

    def __init__(self, batch_size: Sequence[int] = (), *, one_hot: bool = True, first_length: int = 3):
        super().__init__(batch_size=batch_size)
        batch = tuple(batch_size)
        self.observation_spec = Composite(
            observation=Unbounded((*batch, 3)),
            wide=Bounded(-1, 1, (*batch, 2), torch.float64),
            hour=Unbounded(batch, torch.int64),
            pixels=Bounded(0, 255, (*batch, 6, 4, 3), torch.uint8),
            action_mask=Binary(shape=(*batch, 3), dtype=torch.bool),
            shape=batch,
        )
        self.observation_spec["sky", "cloud"] = Unbounded((*batch, 1))
        self.action_spec = OneHot(3, (*batch, 3)) if one_hot else Categorical(3, batch)
        self._lengths = first_length + np.arange(self.batch_size.numel()).reshape(batch)
        self._hours = np.zeros(batch, np.int64)
        self._random = np.random.default_rng()

    def _set_seed(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def _reset_into(self, out: Frame, mask: np.ndarray | None) -> None:
        rows = ... if mask is None else mask
        self._hours[rows] = 0
        for key, array in self._drawn().items():
            out.observation[key][rows] = array[rows]

    def _step_into(self, actions: Arrays, out: Frame) -> None:
        self._hours += 1
        for key, array in self._drawn().items():
            out.observation[key][...] = array
        out.reward[...] = self._random.normal(1.0, 2.0, out.reward.shape)
        out.terminated[..., 0] = self._hours >= self._lengths
        out.truncated.fill(False)
        out.done[...] = out.terminated

    def _drawn(self) -> Arrays:
        batch = tuple(self.batch_size)
        mask = self._random.random((*batch, 3)) < 0.5
        mask[..., 0] |= ~mask.any(-1)
        return {
            "observation": self._random.normal(3.0, 2.0, (*batch, 3)),
            "wide": self._random.uniform(-1, 1, (*batch, 2)),
            "hour": self._hours,
            "pixels": self._random.integers(0, 255, (*batch, 6, 4, 3), endpoint=True),
            "action_mask": mask,
            ("sky", "cloud"): self._random.random((*batch, 1)),
        }


def rollouts(transform: Transform | Compose, batch_size: Sequence[int] = ()) -> tuple[TensorDict, TensorDict]:
    """The same steps of the env with a transform and of the plain one, [*B, NUM_STEPS], over several episodes."""
    found = []
    for env in (TransformedEnv(Weather(batch_size), transform), Weather(batch_size)):
        env.set_seed(SEED)
        found.append(env.rollout(NUM_STEPS, break_when_any_done=False))
    return found[0], found[1]
