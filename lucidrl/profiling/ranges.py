"""Named ranges for code that runs for every frame: decided when it is defined, free when they are off.

    @profiled("EnvBase.step")
    def step(self, tensordict): ...

    with _maybe_record_function("Collector.policy"):
        ...

Unless the process is armed (see `lucidrl.profiling.gate`), `profiled` returns the function that it was given.
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


def _identity(function: Callable[P, R]) -> Callable[P, R]:
    return function


if gate.is_armed:

    def profiled(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Each call is a range of this name, as long as ranges are enabled and somebody records."""

        def wrapped(function: Callable[P, R]) -> Callable[P, R]:
            @wraps(function)
            def ranged(*args: P.args, **kwargs: P.kwargs) -> R:
                if not gate.is_enabled:
                    return function(*args, **kwargs)
                with recorded(name):
                    return function(*args, **kwargs)

            return ranged

        return wrapped

    def _maybe_record_function(name: str) -> AbstractContextManager[None]:
        """The block is a range of this name, as long as ranges are enabled and somebody records."""
        return recorded(name) if gate.is_enabled else NOT_RECORDED

else:

    def profiled(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Leaves the function as it is: this process is not armed."""
        return _identity

    def _maybe_record_function(name: str) -> AbstractContextManager[None]:
        """Nothing: this process is not armed."""
        return NOT_RECORDED
