"""Generators that new processes can import, and that get a signal in the middle of a call that a test chose."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lucidrl.models.generation.generation_worker import GenerationWorker
from lucidrl.models.generation.replica import Replica
from lucidrl.models.generation.vllm_worker import VllmWorker

FOLDER_VARIABLE = "LUCIDRL_TEST_DEATHS"
"""Where deaths are planned; a variable that processes on other nodes see too."""


def plan_death(method: str, number: int, with_signal: signal.Signals = signal.SIGKILL, times: int = 1) -> None:
    """So many next calls of the method by the generator of that number, in whichever process, end in the signal."""
    _plan(method, number).write_text(f"{int(with_signal)} {times}")


def was_met(method: str, number: int) -> bool:
    """Whether a planned death has come as often as it was to."""
    return not _plan(method, number).exists()


def _plan(method: str, number: int) -> Path:
    return Path(os.environ[FOLDER_VARIABLE], f"{method}.{number}")


class Mortal(Replica):
    """Otherwise as the worker class that comes after it."""

    def __init__(self, *args: Any, number: int = 0, **kwargs: Any):
        self._number = number
        self._meet_fate("start")
        super().__init__(*args, number=number, **kwargs)

    def pid(self) -> int:
        return os.getpid()

    def generate(self, *args: Any) -> Any:
        self._meet_fate("generate")
        return super().generate(*args)

    def advance(self, *args: Any) -> Any:
        self._meet_fate("advance")
        return super().advance(*args)

    def take_weights(self, handles: Mapping[str, Any]) -> str | None:
        self._meet_fate("take_weights")
        return super().take_weights(handles)

    def join_collective(self, *args: Any) -> str | None:
        self._meet_fate("join_collective")
        return super().join_collective(*args)

    def _meet_fate(self, method: str) -> None:
        plan = _plan(method, self._number)
        if not plan.exists():
            return
        number, times = map(int, plan.read_text().split())
        if times == 1:
            plan.unlink()
        else:
            plan.write_text(f"{number} {times - 1}")
        os.kill(os.getpid(), number)


class MortalGenerator(Mortal, GenerationWorker):
    """A replica of the built-in engine."""

    def receive_weights(self) -> str | None:
        begin = self.receiver.begin

        def begin_and_die(version: int) -> None:  # the sender is in the middle of it
            self._meet_fate("receive_weights")
            begin(version)

        self.receiver.begin = begin_and_die  # type: ignore[method-assign]
        return super().receive_weights()


class MortalVllm(Mortal, VllmWorker):
    """A replica of vLLM; the loader of its last rank raises where a death is planned in `load`."""

    def on_ranks(self, method: str, *args: Any) -> list[Any]:
        plan = _plan("load", self._number)
        if method == "commit" and plan.exists():
            plan.unlink()
            self.engine._engine.collective_rpc(_break_loader)
        return super().on_ranks(method, *args)


def _break_loader(rank: Any) -> None:
    if rank.rank == rank.parallel_config.world_size - 1:
        rank.refit_rank.receiver._load = _fail


def _fail(weights: Any) -> None:
    next(iter(weights))
    raise RuntimeError("a planned failure of the loader")
