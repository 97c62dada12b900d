"""Save tensors as safetensors files in the layout of Hugging Face: one file, or shards and an index.

Nested states, such as an optimizer's, are saved bit-exact as tensors and strict JSON.

A file is filled in host memory, then written and hashed. The writer of the safetensors library would hold the
interpreter lock while it writes, and so stop training. Nothing here pickles or unpickles.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lucidrl.checkpoint.manifest import FileDigest, read_json
from lucidrl.errors import CheckpointError

_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_CHUNK_BYTES = 1 << 24
LARGEST_SHARD_BYTES = 2 * 2**30


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """The content of one safetensors file, in host memory.

    Args:
        specs: specs of the tensors, by name.
        memory: memory to reuse, if it has the right size; new memory by default.
        pin_memory: whether new memory is pinned, for copies from an accelerator.

    Example:
        >>> file = TensorFile({"bias": TensorSpec(torch.float32, (4,))})
        >>> file.fill("bias", layer.bias)
        >>> file.write(folder / "model.safetensors").sha256
    """

    def __init__(
        self, specs: Mapping[str, TensorSpec], memory: torch.Tensor | None = None, *, pin_memory: bool = False
    ) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, tuple[int, TensorSpec]] = {}
        end = 0
        # Wide dtypes first, so that every tensor is aligned to its element size.
        for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):
            if spec.dtype not in _DTYPE_NAMES:
                raise CheckpointError(
                    f"{name} has dtype {spec.dtype}, which safetensors does not support; convert the tensor"
                )
            start, end = end, end + spec.size_bytes
            header[name] = {"dtype": _DTYPE_NAMES[spec.dtype], "shape": spec.shape, "data_offsets": [start, end]}
            self._places[name] = (start, spec)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        if memory is None or memory.nbytes != end:
            memory = torch.empty(end, dtype=torch.uint8, pin_memory=pin_memory and end > 0)
        self.memory = memory

    @property
    def names(self) -> list[str]:
        return list(self._places)

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return len(self._header) + self.memory.nbytes

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor into the memory, converted to the dtype of its spec; asynchronously from an accelerator."""
        start, spec = self._places[name]
        place = self.memory[start : start + spec.size_bytes]
        source = tensor.detach()
        if source.is_cpu and source.dtype == spec.dtype and source.is_contiguous() and not source.is_complex():
            # numpy, since torch would synchronize its threads at each of many small tensors.
            place.numpy()[:] = source.view(-1).view(torch.uint8).numpy()
        else:
            place.view(spec.dtype).view(spec.shape).copy_(source, non_blocking=True)

    def write(self, path: Path) -> FileDigest:
        """Write and flush a new file."""
        content: Any = self.memory.numpy()
        chunks = (content[start : start + _CHUNK_BYTES] for start in range(0, len(content), _CHUNK_BYTES))
        return write_file(path, (self._header, *chunks))


def write_file(path: Path, chunks: Iterable[bytes]) -> FileDigest:
    """Write, hash and flush a new file."""
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            size_bytes += file.write(chunk)
            digest.update(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(size_bytes, digest.hexdigest())


def plan_shards(
    sizes: Mapping[str, int], num_writers: int, largest_bytes: int = LARGEST_SHARD_BYTES
) -> list[list[str]]:
    """Distribute tensors over files of about equal size, with equally many files per writer.

    Args:
        sizes: bytes of each tensor; the order of names is kept within a file.
        num_writers: writer i writes files i, i + num_writers, ...
        largest_bytes: maximum size of a file, unless a single tensor is larger.

    Returns:
        The names in each file; one empty file if there are no tensors.
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
    """The content of the index file.

    Args:
        shards: names of the tensors in each file.
        sizes: bytes of each tensor.
    """
    files = {name: file for file, names in shards.items() for name in names}
    content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": {name: files[name] for name in sizes}}
    return json.dumps(content, indent=2) + "\n"


def open_tensors(folder: Path, stem: str) -> dict[str, torch.Tensor]:
    """The tensors of a folder by name, mapped into memory and read at first use.

    Raises:
        CheckpointError: with the file and the reason; also for an index that does not match its files.
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
                raise _unusable(where, f"{name} is stored in {file}, but the index says {index.get(name, 'nothing')}")
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
