"""Slow parts of asynchronous runs, which new processes can import."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from lucidrl.envs.text.arithmetic import ArithmeticConfig, ArithmeticEnv
from lucidrl.models.generation.generation_worker import GenerationWorker
from lucidrl.models.generation.replica import Replica

MARKER = "LUCIDRL_TEST_MARKER"


class Slow(Replica):
    """Decodes one token per slice, slowly; otherwise as the worker class that comes after it."""

    def advance(self, requests: Any, aborted: Any, seconds: float) -> Any:
        time.sleep(0.03)
        return super().advance(requests, aborted, 0.0) or self.engine.step()


class SlowGenerator(Slow, GenerationWorker):
    """A replica of the built-in engine."""


class BrokenEnv(ArithmeticEnv):
    """Raises at the fourth call."""

    def __init__(self) -> None:
        super().__init__(ArithmeticConfig())
        self._num_calls = 0

    async def step(self, batch: Any) -> Any:
        self._num_calls += 1
        if self._num_calls == 4:
            raise KeyError("no such reward")
        return await super().step(batch)


class ExitingEnv(ArithmeticEnv):
    """Its worker exits at the fifth call, once."""

    def __init__(self) -> None:
        super().__init__(ArithmeticConfig(max_operand=9))
        self._num_calls = 0

    async def step(self, batch: Any) -> Any:
        self._num_calls += 1
        if self._num_calls == 5 and not Path(os.environ[MARKER]).exists():
            Path(os.environ[MARKER]).touch()
            os._exit(9)
        return await super().step(batch)
