"""What the TensorDict hooks of a user's env return: checked against the specs, and written into arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tensordict import TensorDictBase

from lucidrl.envs.arrays import FLAGS, Arrays, Frame, Key
from lucidrl.envs.failures import checked_array
from lucidrl.envs.tensordicts import arrays_of
from lucidrl.errors import EnvironmentFailure


def checked_entries(result: TensorDictBase, expected: Mapping[Key, np.ndarray], whose: str) -> Arrays:
    """Entries of a result, each fit for the array that it is meant for."""
    arrays = arrays_of(result, list(expected), whose)
    return {key: checked_array(key, arrays[key], array) for key, array in expected.items()}


def write_step(result: TensorDictBase, out: Frame, whose: str) -> None:
    """Write what came of a step, and the flags that were left out.

    Raises:
        EnvironmentFailure: if something does not fit the specs, or a reward is not finite.
        DataError: if an entry is missing.
    """
    given = [name for name in FLAGS if result.get(name, None) is not None]
    if not set(given) & {"done", "terminated"}:
        raise EnvironmentFailure(f"{whose} gave neither 'done' nor 'terminated' in a step; one of them must say it")
    expected: Arrays = {**out.observation, "reward": out.reward}
    expected |= {name: getattr(out, name) for name in given}
    for key, array in checked_entries(result, expected, whose).items():
        expected[key][...] = array
    if not np.isfinite(out.reward).all():
        raise EnvironmentFailure(
            f"the reward is {out.reward.reshape(-1).tolist()}, but learning needs finite ones; mend the env"
        )
    if "truncated" not in given:
        out.truncated[...] = out.done & ~out.terminated if {"done", "terminated"} <= set(given) else False
    if "terminated" not in given:
        np.logical_and(out.done, ~out.truncated, out=out.terminated)
    ended = out.terminated | out.truncated
    if "done" in given and (out.done & ~ended).any():
        raise EnvironmentFailure(
            f"{whose} is 'done', but neither 'terminated' nor 'truncated'; one of them must be why"
        )
    out.done[...] = ended
