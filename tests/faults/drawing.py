"""An environment and an optimizer that read every state a run has: a resumed run that lost one of them shows it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lucidrl.data.datasets import Prompt
from lucidrl.envs.text.interfaces import EnvReply

HUGE = 1e30
"""The largest reward that is accepted; float32 does not hold the norm of gradients of that size."""


def noise() -> float:
    """Drawn from every generator of the process."""
    return random.gauss(0, 1) + float(np.random.standard_normal()) + float(torch.rand(()))


class DrawingEnv:
    """Ten questions; rewards grow from call to call and have noise.

    Args:
        nonfinite_at: calls, counted from 1, whose rewards make the gradient of the step infinite.
    """

    def __init__(self, nonfinite_at: tuple[int, ...] = ()) -> None:
        self._nonfinite_at = nonfinite_at
        self._calls = 0

    def prompts(self) -> list[Prompt]:
        questions = [f"{number}+{number}=" for number in range(10)]
        return [Prompt(text, ({"role": "user", "content": text},), {"answer": "4"}) for text in questions]

    async def step(self, batch: Any) -> list[EnvReply]:
        self._calls += 1
        if self._calls in self._nonfinite_at:
            return [EnvReply(HUGE if number == 0 else -HUGE) for number in range(len(batch))]
        shift = noise()
        return [
            EnvReply(shift * number + self._calls * len(request.completion)) for number, request in enumerate(batch)
        ]

    def state_dict(self) -> dict[str, int]:
        return {"calls": self._calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._calls = state["calls"]


class NoisyAdamW(torch.optim.AdamW):
    """Adds noise to the weights after each step, as Langevin dynamics does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter) + noise(), alpha=0.01 * group["lr"])
        return result


class Picky(DrawingEnv):
    """Wants another state than `DrawingEnv` keeps."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._calls = state["level"]


class Unsavable(DrawingEnv):
    """Keeps what JSON cannot hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"calls": torch.tensor(self._calls)}
