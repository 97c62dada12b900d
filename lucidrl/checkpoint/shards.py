"""Many tensors as safetensors files of one folder, laid out as Hugging Face does: shards and an index.

Nothing here pickles or unpickles.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from lucidrl.checkpoint.manifest import read_json
from lucidrl.errors import CheckpointError

LARGEST_SHARD_BYTES = 2 * 2**30


def plan_shards(
    sizes: Mapping[str, int], num_writers: int, largest_bytes: int = LARGEST_SHARD_BYTES
) -> list[list[str]]:
    """Which tensors go into a file together: files of about equal size, as many for each writer.

    Args:
        sizes: bytes of each tensor; the order of names is kept within a file.
        num_writers: writer i writes files i, i + num_writers, ...; each has something to write if there is enough.
        largest_bytes: no file is larger, except for a single tensor that is.

    Returns:
        The names in each file; one file without any if there are no tensors.
    """
    num_shards = num_writers * max(1, -(-sum(sizes.values()) // (largest_bytes * num_writers)))
    while True:
        num_shards = max(1, min(num_shards, len(sizes)))
        shards: list[set[str]] = [set() for _ in range(num_shards)]
        emptiest = [(0, 0, number) for number in range(num_shards)]
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            size_bytes, num_tensors, number = emptiest[0]
            shards[number].add(name)
            heapq.heapreplace(emptiest, (size_bytes + sizes[name], num_tensors + 1, number))
        fits = all(size_bytes <= largest_bytes or num_tensors <= 1 for size_bytes, num_tensors, _ in emptiest)
        if fits or num_shards == len(sizes):
            return [[name for name in sizes if name in shard] for shard in shards]
        num_shards += num_writers


def shard_file_names(stem: str, num_shards: int) -> list[str]:
    """`stem.safetensors`, or `stem-00001-of-00002.safetensors` and so on."""
    if num_shards == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1)]


def index_name(stem: str) -> str:
    return f"{stem}.safetensors.index.json"


def index_text(shards: Mapping[str, list[str]], sizes: Mapping[str, int]) -> str:
    """The index of several shards, from the names in each file."""
    files = {name: file for file, names in shards.items() for name in names}
    content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": {name: files[name] for name in sizes}}
    return json.dumps(content, indent=2) + "\n"


def open_tensors(folder: Path, stem: str) -> dict[str, torch.Tensor]:
    """The tensors of a folder by name, mapped into memory: what is not looked at is not read.

    Raises:
        CheckpointError: names the file and the reason; also for an index that does not match its files.
    """
    if (folder / f"{stem}.safetensors").exists() or not (folder / index_name(stem)).exists():
        return _open_file(folder / f"{stem}.safetensors")
    where = folder / index_name(stem)
    content = read_json(folder, where.name)
    index = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise _unusable(where, "it has no weight_map from names to files")
    files = sorted(set(index.values()))
    for file in files:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise _unusable(where, f"{file!r} is not the name of a safetensors file in that folder")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        for name, tensor in _open_file(folder / file).items():
            if name in tensors:
                raise _unusable(folder / file, f"{name} is stored twice")
            if index.get(name) != file:
                raise _unusable(where, f"{name} is in {file}, not in {index.get(name, 'any file')}")
            tensors[name] = tensor
    for name, file in index.items():
        if name not in tensors:
            raise _unusable(folder / file, f"{name} is missing")
    return tensors


def _open_file(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise _unusable(path, "it is not a regular file" if path.exists() else "it is missing")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (OSError, SafetensorError, ValueError) as error:
        raise _unusable(path, f"it is not a readable safetensors file ({error})") from error


def _unusable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} cannot be used: {reason}; restore the file or use another checkpoint")
