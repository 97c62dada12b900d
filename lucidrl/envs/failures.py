"""Checks and error messages for env arguments, and for envs that fail or return values outside their specs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lucidrl.envs.arrays import Key, path_of
from lucidrl.errors import ConfigError, EnvironmentFailure

_MOST_VALUES = 8


def env_failure(
    index: int | None,
    seed: int | None,
    phase: str,
    actions: Mapping[Key, np.ndarray] | None,
    reason: str | Exception,
) -> EnvironmentFailure:
    """Make the error for an env that failed, which names env, seed and action; the caller chains the cause.

    Args:
        index: index of the env among several; None for a single one.
        phase: what the env did, such as "step" or "reset".
        actions: actions of that env alone.
        reason: what the env did or raised.
    """
    if isinstance(reason, Exception) and not isinstance(reason, EnvironmentFailure):
        reason = f"{type(reason).__name__}: {reason}"
    who = "the env" if index is None else f"env {index}"
    known = [f"seed {seed}" if seed is not None else "never seeded"]
    known += [f"{'/'.join(path_of(key))} {_values(array)}" for key, array in (actions or {}).items()]
    return EnvironmentFailure(f"{who} ({', '.join(known)}) failed in its {phase}: {reason}")


def at_least_one(name: str, value: int) -> int:
    """Return the value of an argument; raise ConfigError if it is below 1."""
    if value < 1:
        raise ConfigError(f"{name}={value} must be at least 1")
    return int(value)


def checked_array(what: Key, value: Any, expected: np.ndarray) -> np.ndarray:
    """Return the value as an array with the shape and dtype of `expected`.

    Lists and Python numbers are cast to a dtype of the same kind.

    Raises:
        EnvironmentFailure: if shape or dtype differ.
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
    """The reward as a float.

    Raises:
        EnvironmentFailure: if it is not a finite number.
    """
    try:
        reward = float(value)
    except (TypeError, ValueError) as error:
        raise EnvironmentFailure(f"the reward is {value!r}, not a number; fix the env") from error
    if not math.isfinite(reward):
        raise EnvironmentFailure(f"the reward is {reward}; it must be finite: fix the env")
    return reward


def _misfit(key: Key, what: str, found: Any, expected: Any) -> EnvironmentFailure:
    name = "/".join(path_of(key))
    return EnvironmentFailure(f"{name} has {what} {found}, but its spec says {expected}; fix the env or its spec")


def _values(array: np.ndarray) -> str:
    flat = array.reshape(-1)
    shown = np.array2string(flat[:_MOST_VALUES], separator=", ", precision=4)
    return shown if flat.size <= _MOST_VALUES else f"{shown[:-1]}, ...] ({flat.size} values)"
