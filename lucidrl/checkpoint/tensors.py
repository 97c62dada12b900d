"""Tensors as safetensors files, and nested states (of an optimizer, say) as tensors plus strict JSON.

Nothing here pickles or unpickles. What comes back is on the CPU and equal to what went in, to the bit.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from lucidrl.errors import CheckpointError

_ALIASES = "lucidrl.aliases"  # metadata key: JSON of {tied name: name it is stored under}


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write the tensors to one safetensors file.

    Tied tensors (same memory, same shape) are stored once and come back tied; tensors that merely overlap, and
    non-contiguous ones, are stored in full.

    Args:
        path: file to write; its folder must exist.
        tensors: dense tensors on any device.
        metadata: text kept in the header of the file, see `read_metadata`.

    Raises:
        CheckpointError: for a tensor that safetensors cannot hold.
        OSError: if the file cannot be written.
    """
    stored, aliases = _without_ties(tensors)
    header = {"format": "pt", **(metadata or {}), _ALIASES: json.dumps(aliases)}
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(stored, path, metadata=header)
    except SafetensorError as error:
        if f"os error {errno.ENOSPC}" in str(error):  # the library has no error of its own for a full disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise OSError(f"cannot write {path}: {error}") from error
    # The library renames a private file into place, which only its owner may read; keep what the umask allows.
    path.chmod(mode)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by name, on the CPU; tied names give the very same tensor."""
    try:
        tensors = load_file(path)
        aliases = json.loads(read_metadata(path).get(_ALIASES, "{}"))
        return tensors | {name: tensors[stored] for name, stored in aliases.items()}
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file ({error}); use another checkpoint") from error


def read_metadata(path: Path) -> dict[str, str]:
    """The text in the header of a safetensors file, without reading its tensors."""
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def flatten_state(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Take a nested state apart into its tensors and a structure that is strict JSON.

    Dictionaries (with keys of any plain type), lists, tuples, strings, ints, floats (NaN and infinities too), bools
    and None are kept as they are; tensors are named by their path, such as `state/0/exp_avg`.

    Example:
        >>> tensors, structure = flatten_state(optimizer.state_dict())
        >>> save_tensors(folder / "optimizer.safetensors", tensors)
        >>> (folder / "optimizer.json").write_text(json.dumps(structure))

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
                raise CheckpointError(f"tensor {name!r} of the saved state is missing from its safetensors file")
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


def _without_ties(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """CPU tensors that share no memory, and {tied name: stored name} for those that are the same tensor."""
    stored: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first_name: dict[tuple[Any, ...], str] = {}
    claimed: set[tuple[torch.device, int]] = set()
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.dtype == torch.complex128:
            kind = f"{tensor.dtype} tensor with layout {tensor.layout} on {tensor.device}"
            raise CheckpointError(f"{name} is a {kind}; safetensors holds dense tensors of up to 64 bits an element")
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        view = (*storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_conj())
        if tensor.numel() and view in first_name:
            aliases[name] = first_name[view]
            continue
        first_name[view] = name
        dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        shares_memory = dense.data_ptr() == tensor.data_ptr() and storage in claimed
        stored[name] = dense.clone() if shares_memory else dense
        claimed.add(storage)
    return stored, aliases
