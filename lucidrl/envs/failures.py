"""What is said when an environment fails, or gives something that does not fit its specs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lucidrl.envs.arrays import Key
from lucidrl.errors import EnvironmentFailure

_MOST_VALUES = 8


def env_failure(
    index: int | None,
    seed: int | None,
    phase: str,
    actions: Mapping[Key, np.ndarray] | None,
    happened: str,
) -> EnvironmentFailure:
    """One sentence on who failed where and with what; its cause is for the caller to chain.

    Args:
        index: of the env among several; None for a single one.
        phase: "step" or "reset".
        actions: of that env alone, if it was given any.
        happened: what the env did, such as the type and the message of its exception.
    """
    who = "the env" if index is None else f"env {index}"
    known = [f"seed {seed}" if seed is not None else "never seeded"]
    known += [f"{_path(key)} {_values(array)}" for key, array in (actions or {}).items()]
    return EnvironmentFailure(f"{who} ({', '.join(known)}) failed in its {phase}: {happened}")


def describe(error: BaseException) -> str:
    """Type and message, as `happened` in `env_failure`; an error of ours speaks for itself."""
    if isinstance(error, EnvironmentFailure):
        return str(error)
    return f"{type(error).__name__}: {error}"


def checked_array(what: Key, value: Any, expected: np.ndarray) -> np.ndarray:
    """The value as an array that can be written over `expected`.

    Raises:
        EnvironmentFailure: if it is of another shape, or an array or number of another dtype. What has no dtype, such
            as a list or a Python number, is converted, unless that would lose something.
    """
    array = np.asarray(value)
    if array.shape != expected.shape:
        raise EnvironmentFailure(
            f"{_path(what)} has shape {list(array.shape)}, but its spec says {list(expected.shape)}; "
            "mend the env or its spec"
        )
    if array.dtype != expected.dtype:
        if isinstance(value, np.ndarray | np.generic) or not np.can_cast(array.dtype, expected.dtype, "same_kind"):
            raise EnvironmentFailure(
                f"{_path(what)} has dtype {array.dtype}, but its spec says {expected.dtype}; mend the env or its spec"
            )
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


def _path(key: Key) -> str:
    return key if isinstance(key, str) else "/".join(key)


def _values(array: np.ndarray) -> str:
    flat = array.reshape(-1)
    shown = np.array2string(flat[:_MOST_VALUES], separator=", ", precision=4)
    return shown if flat.size <= _MOST_VALUES else f"{shown[:-1]}, ...] ({flat.size} values)"
