"""Between the arrays inside and the TensorDicts at the edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from lucidrl.envs.arrays import FLAGS, Arrays, Frame, Key, path_of
from lucidrl.envs.failures import checked_array
from lucidrl.errors import DataError, EnvironmentFailure


def tensordict_of(
    entries: Mapping[Key, np.ndarray | torch.Tensor], batch_size: Sequence[int], device: torch.device | None
) -> TensorDict:
    """Entries by key as a TensorDict; on the CPU it shares the memory of arrays."""
    nested: dict[str, Any] = {}
    for key, value in entries.items():
        *parents, name = path_of(key)
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return TensorDict(nested, batch_size=torch.Size(batch_size), device=device)


def arrays_of(tensordict: TensorDictBase, keys: Sequence[Key], whose: str = "the TensorDict") -> Arrays:
    """Entries as arrays, which share the memory of CPU tensors.

    Raises:
        DataError: if one is missing.
    """
    arrays: Arrays = {}
    for key in keys:
        value = tensordict.get(key, None)
        if value is None:
            there = sorted(map(str, tensordict.keys(include_nested=True, leaves_only=True)))
            raise DataError(f"{whose} has no entry {key!r}; it has {', '.join(there) or 'none'}")
        arrays[key] = value.detach().cpu().numpy()
    return arrays


def quick_view(tensor: torch.Tensor) -> Any:
    """The values for quick access to a few rows: as an array, if there are arrays of the dtype. Of host memory it is a
    view, of another device's a copy."""
    if tensor.requires_grad or not tensor.is_cpu:
        tensor = tensor.detach().cpu()
    return tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()


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
