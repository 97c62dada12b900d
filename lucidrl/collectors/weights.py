"""Weights of a policy in memory that a collector shares with its worker processes, one whole version at a time.

The memory has room for two versions. The driver writes over the older one and then names it the newest; a worker copies
the newest one, and begins again if there was a newer one meanwhile. Neither ever waits for the other: a worker that is
killed or stopped in the middle of a copy is in nobody's way. The memory has no name, and is gone with its last holder.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import torch

from lucidrl.collectors.parts import Weights, check_weights

_ALIGNMENT_BYTES = 64

# Words beside the weights: how often some were published, and the version in each slot. What was published the n-th
# time is in slot n % 2, which is not written again before the next one was named the newest.
_NEWEST, _VERSIONS = 0, 1
_NUM_WORDS = 3


@dataclass(frozen=True)
class SharedWeights:
    """The memory itself, which can be given to processes as an argument when they start."""

    shapes: Mapping[str, torch.Size]
    dtypes: Mapping[str, torch.dtype]
    slots: tuple[Any, Any]
    words: Any

    @classmethod
    def like(cls, weights: Weights) -> SharedWeights:
        """Room for two versions of such weights."""
        size_bytes = sum(_room_bytes(tensor.shape, tensor.dtype) for tensor in weights.values())
        return cls(
            {name: tensor.shape for name, tensor in weights.items()},
            {name: tensor.dtype for name, tensor in weights.items()},
            # What has no weights has versions all the same.
            tuple(RawArray(ctypes.c_uint8, max(1, size_bytes)) for _ in range(2)),  # type: ignore[arg-type]
            RawArray(ctypes.c_int64, _NUM_WORDS),
        )

    def views(self, memory: np.ndarray) -> dict[str, torch.Tensor]:
        """The tensors on the memory of a slot, or on a copy of it."""
        tensors, begin = {}, 0
        for name, shape in self.shapes.items():
            dtype = self.dtypes[name]
            end = begin + math.prod(shape) * dtype.itemsize
            tensors[name] = torch.from_numpy(memory[begin:end]).view(dtype).view(shape)
            begin += _room_bytes(shape, dtype)
        return tensors


class WeightWriter:
    """The driver's end; there is one."""

    def __init__(self, shared: SharedWeights):
        self._shapes = shared.shapes
        self._slots = [shared.views(np.frombuffer(slot, np.uint8)) for slot in shared.slots]
        self._words = np.frombuffer(shared.words, np.int64)
        self._lock = threading.Lock()

    def publish(self, weights: Weights, version: int) -> None:
        """What workers read from now on; tensors on another device come to host memory here.

        Raises:
            ConfigError: if these are not the weights of the policy; nothing has happened then.
        """
        check_weights(weights, self._shapes)
        words = self._words
        with self._lock, torch.no_grad():
            newest = int(words[_NEWEST]) + 1
            slot = newest % 2
            _fence()
            for name, tensor in self._slots[slot].items():
                tensor.copy_(weights[name])
            words[_VERSIONS + slot] = version
            _fence()
            words[_NEWEST] = newest


class WeightReader:
    """A worker's end."""

    def __init__(self, shared: SharedWeights):
        self._slots = [np.frombuffer(slot, np.uint8) for slot in shared.slots]
        self._words = np.frombuffer(shared.words, np.int64)
        self._copy = np.empty_like(self._slots[0])
        self._tensors = shared.views(self._copy)
        self._seen = 0

    def read(self) -> tuple[Weights, int] | None:
        """The newest weights and their version, if they were not read before; they stay until the next call."""
        words = self._words
        newest = int(words[_NEWEST])
        while newest != self._seen:
            _fence()
            # All at once: quicker than the writer, which goes from tensor to tensor, and so not overtaken for ever.
            self._copy[...] = self._slots[newest % 2]
            version = int(words[_VERSIONS + newest % 2])
            _fence()
            before, newest = newest, int(words[_NEWEST])
            if newest == before:
                self._seen = newest
                return self._tensors, version
        return None


def _fence() -> None:
    """Make what this thread did before visible to others before what it does next, on any kind of processor."""
    lock = threading.Lock()
    lock.acquire()
    lock.release()  # nothing from above moves below this
    lock.acquire()  # nothing from below moves above this


def _room_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    return math.ceil(math.prod(shape) * dtype.itemsize / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
