"""Between the arrays inside and the TensorDicts at the edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from lucidrl.envs.arrays import Arrays, Key
from lucidrl.errors import DataError


def tensordict_of(
    entries: Mapping[Key, np.ndarray | torch.Tensor], batch_size: Sequence[int], device: torch.device | None
) -> TensorDict:
    """Entries by key as a TensorDict; on the CPU it shares the memory of arrays."""
    nested: dict[str, Any] = {}
    for key, value in entries.items():
        *parents, name = (key,) if isinstance(key, str) else key
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
