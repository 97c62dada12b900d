"""Policies and envs for tests of collectors with processes; workers import them from here."""

from __future__ import annotations

import random
import time

import numpy as np
import torch
from torch import nn

from tests.unit.envs.toys import Walk


class SlowWalk(Walk):
    """Steps slowly."""

    def __init__(self, step_s=0.002):
        super().__init__()
        self._step_s = step_s

    def _step_into(self, actions, out):
        time.sleep(self._step_s)
        super()._step_into(actions, out)


class Chance(nn.Module):
    """Goes left or right with equal chances, drawn from torch's generator."""

    def forward(self, observation):
        right = (torch.rand(observation.shape[:-1]) < 0.5).long()
        return torch.stack([1 - right, right], dim=-1)


class Versioned(nn.Module):
    """Always goes right; returns the minimum and the maximum of a large weight, which differ if it is torn."""

    def __init__(self, weight=0.0, size=20_000):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), float(weight)))

    def forward(self, observation):
        action = torch.zeros_like(observation, dtype=torch.int64)
        action[..., 1] = 1
        batch = observation.shape[:-1]
        return {
            "action": action,
            "smallest": self.weight.min().expand(batch),
            "largest": self.weight.max().expand(batch),
        }


def by_other_generators(tensordict):
    """A policy that draws from numpy's and from Python's generator."""
    right = int(np.random.random() < 0.5) ^ int(random.random() < 0.5)
    return {"action": torch.tensor([1 - right, right])}


def always_right(tensordict):
    action = torch.zeros_like(tensordict["observation"], dtype=torch.int64)
    action[..., 1] = 1
    return action


def without_action(tensordict):
    return {"motion": torch.zeros(2)}
