"""Conversions between the arrays of an env and TensorDicts."""

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
    """Make a TensorDict of entries by key; on the CPU its tensors share memory with the entries."""
    nested: dict[str, Any] = {}
    for key, value in entries.items():
        *parents, name = path_of(key)
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return TensorDict(nested, batch_size=torch.Size(batch_size), device=device)


def arrays_of(tensordict: TensorDictBase, keys: Sequence[Key], owner: str = "the TensorDict") -> Arrays:
    """Return entries as arrays; arrays of CPU tensors share memory with the tensors.

    Args:
        owner: name of the TensorDict's owner in errors.

    Raises:
        DataError: if an entry is missing.
    """
    arrays: Arrays = {}
    for key in keys:
        value = tensordict.get(key, None)
        if value is None:
            there = sorted(map(str, tensordict.keys(include_nested=True, leaves_only=True)))
            raise DataError(f"{owner} has no entry {key!r}; it has {', '.join(there) or 'none'}")
        arrays[key] = value.detach().cpu().numpy()
    return arrays


def quick_view(tensor: torch.Tensor) -> Any:
    """Return the values for fast indexing: as an array, except bfloat16. CPU tensors are not copied."""
    if tensor.requires_grad or not tensor.is_cpu:
        tensor = tensor.detach().cpu()
    return tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()


def checked_entries(result: TensorDictBase, expected: Mapping[Key, np.ndarray], env_name: str) -> Arrays:
    """Return entries of an env's result as arrays; raise if shape or dtype differ from the expected array."""
    arrays = arrays_of(result, list(expected), env_name)
    return {key: checked_array(key, arrays[key], array) for key, array in expected.items()}


def write_step(result: TensorDictBase, out: Frame, env_name: str) -> None:
    """Write a result of the TensorDict hook `_step` into `out`; fill in the done flags that the env did not return.

    Raises:
        EnvironmentFailure: if an entry does not fit its spec, or a reward is not finite.
        DataError: if an entry is missing.
    """
    given = [name for name in FLAGS if result.get(name, None) is not None]
    if not set(given) & {"done", "terminated"}:
        raise EnvironmentFailure(
            f"{env_name} returned neither 'done' nor 'terminated' from a step; return at least one of them"
        )
    expected: Arrays = {**out.observation, "reward": out.reward}
    expected |= {name: getattr(out, name) for name in given}
    for key, array in checked_entries(result, expected, env_name).items():
        expected[key][...] = array
    if not np.isfinite(out.reward).all():
        raise EnvironmentFailure(f"the reward is {out.reward.reshape(-1).tolist()}; it must be finite: fix the env")
    if "truncated" not in given:
        out.truncated[...] = out.done & ~out.terminated if {"done", "terminated"} <= set(given) else False
    if "terminated" not in given:
        np.logical_and(out.done, ~out.truncated, out=out.terminated)
    ended = out.terminated | out.truncated
    if "done" in given and (out.done & ~ended).any():
        raise EnvironmentFailure(f"{env_name} is 'done', but neither 'terminated' nor 'truncated'; set one of them")
    out.done[...] = ended
