"""Buckets of weights: many tensors packed into few byte ranges, since one call per tensor makes a refit slow.

Sender and receiver plan the same buckets from names, shapes and dtypes alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import psutil
import torch

from lucidrl.distributed.shared_memory import MemoryHandle
from lucidrl.errors import RefitError

ALIGNMENT_BYTES = 64
"""Alignment of every tensor in a bucket: a cache line, and enough for a view of any dtype."""

PIECE_BYTES = 1 << 20
"""Unit of parallel copying: larger tensors are split into pieces of this size, which several threads copy."""
BYTES_PER_THREAD = 8 << 20
"""Fewest bytes per copying thread; for fewer, starting the thread costs more time than it saves."""

Piece = tuple[int, int, int]
"""Memory to copy: address of the target, address of the source, number of bytes."""


@dataclass(frozen=True)
class TensorInfo:
    """Name, shape and dtype of a tensor; receivers know them before a refit."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Tensors that are packed together, and the offset of each in bytes."""

    tensors: tuple[TensorInfo, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Sequence[TensorInfo]) -> Bucket:
        """Lay out the tensors, at least one, in their order."""
        ends = accumulate(_aligned(tensor.size_bytes) for tensor in tensors)
        return cls(tuple(tensors), (0, *ends)[:-1])

    @property
    def size_bytes(self) -> int:
        return _aligned(self.offsets[-1] + self.tensors[-1].size_bytes)

    def pack(self, tensors: Iterable[torch.Tensor], memory: torch.Tensor) -> None:
        """Write tensors into `memory`, converted to the bucket's dtypes.

        Args:
            tensors: full tensors on any device, in the bucket's order.
            memory: a 1-d uint8 tensor of at least `size_bytes`.
        """
        copy_weights([(target, tensor) for (_, target), tensor in zip(self.unpack(memory), tensors, strict=True)])

    def unpack(self, memory: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors in the bucket's order; the tensors are views of `memory`."""
        for info, offset in zip(self.tensors, self.offsets, strict=True):
            yield info.name, memory[offset : offset + info.size_bytes].view(info.dtype).view(info.shape)


@dataclass(frozen=True)
class BucketHandle:
    """Handle by which another process on this machine opens a packed bucket."""

    bucket: Bucket
    memory: MemoryHandle
    version: int
    digest: str | None
    """`digest_of` the packed bytes; None if the receiver does not verify them."""


def plan_buckets(infos: Sequence[TensorInfo], bucket_bytes: int) -> list[Bucket]:
    """Split `infos`, in order, into buckets of at most `bucket_bytes`; a larger tensor gets a separate bucket."""
    groups: list[list[TensorInfo]] = []
    end = 0
    for info in infos:
        size_bytes = _aligned(info.size_bytes)
        if not groups or end + size_bytes > bucket_bytes:
            groups.append([])
            end = 0
        groups[-1].append(info)
        end += size_bytes
    return [Bucket.of(group) for group in groups]


def copy_weights(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """`target.copy_(source)` for many pairs; on a GPU the copies are queued on the current stream.

    Host memory is copied by separate threads, as many as torch has. Torch's own threads would synchronize after every
    tensor; on busy cores that takes longer than the copy.
    """
    pieces: list[Piece] = []
    for target, source in pairs:
        assert target.shape == source.shape, f"source {tuple(source.shape)} does not fit target {tuple(target.shape)}"
        if _is_contiguous_host_memory(target) and _is_contiguous_host_memory(source) and target.dtype == source.dtype:
            to, start = target.data_ptr(), source.data_ptr()
            pieces += [
                (to + first, start + first, min(PIECE_BYTES, target.nbytes - first))
                for first in range(0, target.nbytes, PIECE_BYTES)
            ]
        else:
            target.copy_(source.detach(), non_blocking=True)
    first, *others = _shares(pieces)
    with ThreadPoolExecutor(max(1, len(others))) as threads:
        copies = [threads.submit(_move, share) for share in others]
        _move(first)
        for copy in copies:
            copy.result()


def fitting_bucket_bytes(infos: Sequence[TensorInfo], most_bytes: int, free_bytes: float) -> int:
    """The bucket size: `most_bytes`, or less if two buckets do not fit into the free memory.

    Raises:
        RefitError: if the largest weight does not fit into the free memory twice.
    """
    largest = max(infos, key=lambda info: info.size_bytes)
    if 2 * largest.size_bytes > free_bytes:
        raise RefitError(
            f"{largest.name} takes {largest.size_bytes:,} bytes, and a refit needs twice that (one bucket is packed "
            f"while another is read), but policy and generators have {int(free_bytes):,} bytes free; free memory on "
            "their devices, or use a smaller model"
        )
    return min(most_bytes, int(free_bytes) // 2)


def digest_of(memory: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    content: Any = memory.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content).hexdigest()


def checksum_of(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes; does not depend on the order of the weights."""
    lines = [f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest_of(tensor)}\n" for name, tensor in weights]
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def free_bytes(device: torch.device) -> int:
    """Free memory of a device, in bytes; for the CPU, that of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _aligned(size_bytes: int) -> int:
    return math.ceil(size_bytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _is_contiguous_host_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous()


def _shares(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Split the pieces over threads; each thread gets consecutive pieces, which is faster than interleaving them."""
    size_bytes = sum(piece[-1] for piece in pieces)
    num_threads = max(1, min(torch.get_num_threads(), size_bytes // BYTES_PER_THREAD))
    shares: list[list[Piece]] = [[] for _ in range(num_threads)]
    done_bytes = 0
    for piece in pieces:
        shares[done_bytes * num_threads // size_bytes].append(piece)
        done_bytes += piece[-1]
    return shares


def _move(pieces: Iterable[Piece]) -> None:
    for piece in pieces:
        ctypes.memmove(*piece)
