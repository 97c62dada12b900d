"""Checksums of weights that are cheap enough for every refit: CRC-32 is several times as fast as SHA-256.

They find mistakes, such as tensors that were lost, swapped or permuted; they are no protection against an attacker.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Return a checksum of dtype, shape and elements in their order, as 8 hexadecimal digits.

    Example:
        >>> tensor_checksum(torch.tensor([1.0, 2.0])) != tensor_checksum(torch.tensor([2.0, 1.0]))
        True
    """
    content: Any = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    start = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    return f"{zlib.crc32(content, start):08x}"


def checksums_of(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the checksum of every tensor by name. Several threads compute them; zlib runs without Python's lock."""
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        running = [(name, threads.submit(tensor_checksum, tensor)) for name, tensor in weights]
        return {name: checksum.result() for name, checksum in running}
