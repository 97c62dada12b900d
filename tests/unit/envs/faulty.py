"""Envs that fail on purpose in their process; shared by tests of processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np

from lucidrl.envs.arrays import Arrays, Frame
from tests.unit.envs.toys import Walk


class UnpicklableError(Exception):
    def __init__(self, left: str, right: str):
        super().__init__(f"{left} and {right}")
        self.lock = threading.Lock()


def hang_here() -> None:
    time.sleep(1000)


def _raise() -> None:
    raise ValueError("the wheel came off")


def _raise_unpicklable() -> None:
    raise UnpicklableError("wheel", "axle")


FAULTS = {
    "raise": _raise,
    "unpicklable": _raise_unpicklable,
    "leave": lambda: sys.exit("enough"),
    "exit": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": hang_here,
}


class Faulty(Walk):
    """A walk that does something else in its third step, or in its first reset."""

    def __init__(self, fault: str | None = None, in_reset: bool = False):
        super().__init__()
        self._fault, self._in_reset, self._num_steps = fault, in_reset, 0

    def _reset_into(self, out: Frame, mask: np.ndarray | None) -> None:
        if self._fault and self._in_reset:
            FAULTS[self._fault]()
        super()._reset_into(out, mask)

    def _step_into(self, actions: Arrays, out: Frame) -> None:
        self._num_steps += 1
        if self._fault and not self._in_reset and self._num_steps == 3:
            FAULTS[self._fault]()
        super()._step_into(actions, out)


def healthy() -> Faulty:
    return Faulty()


def one_faulty(num_envs: int, index: int, fault: str, in_reset: bool = False) -> list:
    """Factories of which one makes an env with the fault."""
    factories: list = [healthy] * num_envs
    factories[index] = lambda: Faulty(fault, in_reset)
    return factories
