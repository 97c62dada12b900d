"""Named ranges for code that runs for every env step; they cost nothing when off.

    @profiled("EnvBase.step")
    def step(self, tensordict): ...

    with _maybe_record_function("Collector.policy"):
        ...

Unless the process is armed (see `lucidrl.profiling.gate`), `profiled` returns the function unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import ParamSpec, TypeVar

from lucidrl.profiling import gate
from lucidrl.profiling.spans import NOT_RECORDED, recorded

P = ParamSpec("P")
R = TypeVar("R")


def profiled(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make each call a range of this name while ranges are enabled and a profiler records."""

    def wrapped(function: Callable[P, R]) -> Callable[P, R]:
        if not gate.is_armed:
            return function

        @wraps(function)
        def ranged(*args: P.args, **kwargs: P.kwargs) -> R:
            if not gate.is_enabled:
                return function(*args, **kwargs)
            with recorded(name):
                return function(*args, **kwargs)

        return ranged

    return wrapped


def _maybe_record_function(name: str) -> AbstractContextManager[None]:
    """Make the block a range of this name while ranges are enabled and a profiler records."""
    return recorded(name) if gate.is_enabled else NOT_RECORDED
