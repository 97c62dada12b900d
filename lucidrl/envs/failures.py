"""What is said when an environment fails, or gives something that does not fit its specs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lucidrl.envs.arrays import Key, path_of
from lucidrl.errors import EnvironmentFailure

_MOST_VALUES = 8


def env_failure(
    index: int | None,
    seed: int | None,
    phase: str,
    actions: Mapping[Key, np.ndarray] | None,
    happened: str | Exception,
) -> EnvironmentFailure:
    """One sentence on which env failed where and with what; the caller chains the cause.

    Args:
        index: of the env among several; None for a single one.
        phase: "step" or "reset".
        actions: of that env alone, if it was given any.
        happened: what the env did, or raised.
    """
    if isinstance(happened, Exception) and not isinstance(happened, EnvironmentFailure):
        happened = f"{type(happened).__name__}: {happened}"
    who = "the env" if index is None else f"env {index}"
    known = [f"seed {seed}" if seed is not None else "never seeded"]
    known += [f"{'/'.join(path_of(key))} {_values(array)}" for key, array in (actions or {}).items()]
    return EnvironmentFailure(f"{who} ({', '.join(known)}) failed in its {phase}: {happened}")


def checked_array(what: Key, value: Any, expected: np.ndarray) -> np.ndarray:
    """The value as an array that can be written over `expected`.

    Raises:
        EnvironmentFailure: if it is of another shape, or an array or number of another dtype. What has no dtype, such
            as a list or a Python number, is converted, unless that would lose something.
    """
    array = np.asarray(value)
    if array.shape != expected.shape:
        raise _misfit(what, "shape", list(array.shape), list(expected.shape))
    if array.dtype != expected.dtype:
        if isinstance(value, np.ndarray | np.generic) or not np.can_cast(array.dtype, expected.dtype, "same_kind"):
            raise _misfit(what, "dtype", array.dtype, expected.dtype)
        array = array.astype(expected.dtype)
    return array


def checked_reward(value: Any) -> float:
    """The reward as a number.

    Raises:
        EnvironmentFailure: if it is none, or not finite.
    """
    try:
        reward = float(value)
    except (TypeError, ValueError) as error:
        raise EnvironmentFailure(f"the reward is {value!r}, but a number is needed; mend the env") from error
    if not math.isfinite(reward):
        raise EnvironmentFailure(f"the reward is {reward}, but learning needs finite ones; mend the env")
    return reward


def _misfit(key: Key, what: str, found: Any, expected: Any) -> EnvironmentFailure:
    name = "/".join(path_of(key))
    return EnvironmentFailure(f"{name} has {what} {found}, but its spec says {expected}; mend the env or its spec")


def _values(array: np.ndarray) -> str:
    flat = array.reshape(-1)
    shown = np.array2string(flat[:_MOST_VALUES], separator=", ", precision=4)
    return shown if flat.size <= _MOST_VALUES else f"{shown[:-1]}, ...] ({flat.size} values)"
