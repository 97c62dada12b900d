"""Nested states, such as that of an optimizer, as tensors plus strict JSON; bit-exact, without pickle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from lucidrl.errors import CheckpointError


def flatten_state(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Split a nested state into its tensors and a structure that is strict JSON.

    Dictionaries (with keys of any plain type), lists, tuples, strings, ints, floats (NaN and infinities too), bools
    and None are kept as they are; tensors are named by their path, such as `state/0/exp_avg`.

    Example:
        >>> tensors, structure = flatten_state({"step": 3, "momentum": torch.zeros(2)})
        >>> tensors.keys(), structure
        (dict_keys(['momentum']), {'step': 3, 'momentum': {'$tensor': 'momentum'}})

    Raises:
        CheckpointError: for a value of another type, with its path.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _encode(state, (), tensors)


def unflatten_state(tensors: Mapping[str, torch.Tensor], structure: Any) -> Any:
    """The inverse of `flatten_state`."""
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
    """`value` as JSON; types that JSON lacks become an object with one key that starts with a dollar sign."""
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
