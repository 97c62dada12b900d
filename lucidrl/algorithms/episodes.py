"""Returns and lengths of episodes, which begin and end anywhere in batches.

Shapes: B envs, T time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class Episode(NamedTuple):
    """One that has ended."""

    reward: float
    """The sum of its rewards."""
    length: int
    """Its frames."""


class EpisodeCounter:
    """Adds up the rewards of each env's episode over batches."""

    def __init__(self, num_envs: int):
        self._rewards, self._lengths = [0.0] * num_envs, [0] * num_envs

    def count(self, rewards_BT: torch.Tensor, done_BT: torch.Tensor) -> list[Episode]:
        """The episodes that ended in this batch, which follows the one before."""
        ended = []
        for env, (rewards, done) in enumerate(zip(rewards_BT.double().cpu(), done_BT.cpu(), strict=True)):
            start = 0
            for end in (done.nonzero()[:, 0] + 1).tolist():
                self._add(env, rewards[start:end])
                ended.append(Episode(self._rewards[env], self._lengths[env]))
                self._rewards[env], self._lengths[env] = 0.0, 0
                start = end
            self._add(env, rewards[start:])
        return ended

    def _add(self, env: int, rewards: torch.Tensor) -> None:
        self._rewards[env] += float(rewards.sum())
        self._lengths[env] += len(rewards)

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": list(self._rewards), "lengths": list(self._lengths)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rewards, self._lengths = list(state["rewards"]), list(state["lengths"])
