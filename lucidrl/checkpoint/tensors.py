"""The content of one safetensors file in host memory, laid out as on disk: filled in place, then written and hashed.

The library's own writer holds the interpreter while it writes, which would stop the training beside it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lucidrl.checkpoint.manifest import FileDigest
from lucidrl.errors import CheckpointError

_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class TensorSpec:
    """What has to be known of a tensor to give it a place."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """Tensors that will be one file.

    Args:
        specs: of the tensors, by name.
        memory: bytes to use, such as those of an earlier file of the same size; new ones by default.
        pin_memory: of new memory, for copies from an accelerator.

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
        # Wide elements first: then every tensor is aligned to its elements.
        for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):
            if spec.dtype not in _DTYPE_NAMES:
                raise CheckpointError(f"{name} has dtype {spec.dtype}, which safetensors cannot hold; convert it")
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
        """Of the file."""
        return len(self._header) + self.memory.nbytes

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor to its place, in the dtype of its spec; from an accelerator when its stream comes to it."""
        start, spec = self._places[name]
        place = self.memory[start : start + spec.size_bytes]
        source = tensor.detach()
        if source.is_cpu and source.dtype == spec.dtype and source.is_contiguous() and not source.is_complex():
            # Memory is the limit, not threads: torch would wait for all of its own at each of many small tensors.
            place.numpy()[:] = source.view(-1).view(torch.uint8).numpy()
        else:
            place.view(spec.dtype).view(spec.shape).copy_(source, non_blocking=True)

    def write(self, path: Path) -> FileDigest:
        """Write a new file, down to the disk."""
        content: Any = self.memory.numpy()
        chunks = (content[start : start + _CHUNK_BYTES] for start in range(0, len(content), _CHUNK_BYTES))
        digest = hashlib.sha256()
        with path.open("xb") as file:
            for chunk in (self._header, *chunks):
                file.write(chunk)
                digest.update(chunk)
            file.flush()
            os.fsync(file.fileno())
        return FileDigest(self.size_bytes, digest.hexdigest())
