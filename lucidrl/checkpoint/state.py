"""Nested states (of an optimizer, say) as tensors plus strict JSON.

Nothing here pickles or unpickles. What comes back is equal to what went in, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from lucidrl.errors import CheckpointError


def flatten_state(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Take a nested state apart into its tensors and a structure that is strict JSON.

    Dictionaries (with keys of any plain type), lists, tuples, strings, ints, floats (NaN and infinities too), bools
    and None are kept as they are; tensors are named by their path, such as `state/0/exp_avg`.

    Example:
        >>> tensors, structure = flatten_state({"step": 3, "momentum": torch.zeros(2)})
        >>> tensors.keys(), structure
        (dict_keys(['momentum']), {'step': 3, 'momentum': {'$tensor': 'momentum'}})

    Raises:
        CheckpointError: names the path and type of a value that is none of these.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _encode(state, (), tensors)


def unflatten_state(tensors: Mapping[str, torch.Tensor], structure: Any) -> Any:
    """Put together again what `flatten_state` took apart."""
    if isinstance(structure, list):
        return [unflatten_state(tensors, item) for item in structure]
    if not isinstance(structure, dict):
        return structure
    match structure:
        case {"$tensor": name}:
            if name not in tensors:
                raise CheckpointError(
                    f"tensor {name!r} of the saved state is missing from its safetensors file; use another checkpoint"
                )
            return tensors[name]
        case {"$float": text}:
            return float(text)
        case {"$tuple": items}:
            return tuple(unflatten_state(tensors, item) for item in items)
        case {"$dict": pairs}:
            return {unflatten_state(tensors, key): unflatten_state(tensors, value) for key, value in pairs}
    return {key: unflatten_state(tensors, value) for key, value in structure.items()}


def _encode(value: Any, path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON; what JSON lacks becomes an object with one key that starts with a dollar sign."""
    if isinstance(value, torch.Tensor):
        name = _free_name("/".join(path) or "tensor", tensors)
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_encode(item, (*path, str(i)), tensors) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [_encode(item, (*path, str(i)), tensors) for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _encode(item, (*path, key), tensors) for key, item in value.items()}
        pairs = [
            (_encode(key, path, tensors), _encode(item, (*path, str(key)), tensors)) for key, item in value.items()
        ]
        return {"$dict": [list(pair) for pair in pairs]}
    raise CheckpointError(
        f"{'/'.join(path) or 'the state'} is a {type(value).__name__}, which a checkpoint cannot hold; "
        "convert it to tensors, numbers, strings, lists or dictionaries of these"
    )


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    """`name`, or a variant not in `taken`: the keys 0 and "0" have the same path."""
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}~{count}"
    return candidate
