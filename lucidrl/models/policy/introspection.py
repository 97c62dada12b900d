"""Memory and name of the device that a worker computes on; on a CPU, those of its process and host."""

from __future__ import annotations

import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from lucidrl.distributed.workers.place import node_id

_BYTES_PER_MB = 1 << 20
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one worker, in MB of 2**20 bytes."""

    memory_allocated_mb: float
    memory_reserved_mb: float
    memory_peak_mb: float
    """Most that was allocated since the peak was reset."""
    memory_total_mb: float
    """What the device, or the host, has."""


class CudaMemory:
    """Memory of a GPU as torch's allocator counts it for this process."""

    def __init__(self, device: torch.device):
        self._device = device

    def read(self) -> MemoryUse:
        return MemoryUse(
            torch.cuda.memory_allocated(self._device) / _BYTES_PER_MB,
            torch.cuda.memory_reserved(self._device) / _BYTES_PER_MB,
            torch.cuda.max_memory_allocated(self._device) / _BYTES_PER_MB,
            torch.cuda.get_device_properties(self._device).total_memory / _BYTES_PER_MB,
        )

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class ProcessMemory:
    """Resident memory of this process, whoever allocated it; nothing is reserved beyond it.

    The operating system keeps the peak, and Linux restarts it on request. Where it does not (another system, or a
    sandbox), the peak since a reset is exact once it exceeds the peak of before; until then it is the largest that
    `reset_peak` and `read` saw, and what came and went between two calls is missed.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._peak_of_before = 0
        self._largest_seen = 0

    def read(self) -> MemoryUse:
        resident = self._process.memory_info().rss
        self._largest_seen = max(self._largest_seen, resident)
        lifetime_peak = _lifetime_peak_bytes()
        peak = lifetime_peak if lifetime_peak > self._peak_of_before else self._largest_seen
        return MemoryUse(
            resident / _BYTES_PER_MB,
            resident / _BYTES_PER_MB,
            max(peak, resident) / _BYTES_PER_MB,  # the kernel's two numbers are read one after the other
            psutil.virtual_memory().total / _BYTES_PER_MB,
        )

    def reset_peak(self) -> None:
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:
            self._peak_of_before = _lifetime_peak_bytes()
        else:
            self._peak_of_before = 0
        self._largest_seen = self._process.memory_info().rss


def device_id(device: torch.device, local_rank: int) -> str:
    """What every process that uses the device of a worker calls it: the UUID that NVML gives a GPU ("GPU-…").

    A CPU has none: there it is an id of the node and the worker's number on it ("CPU-…-0"); see `node_id`.
    """
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"CPU-{node_id()}-{local_rank}"


def _lifetime_peak_bytes() -> int:
    """Most resident memory this process has had, or has had since Linux was told to start over."""
    if sys.platform == "linux":
        # Not getrusage: its number includes what ran in the process before it became this program.
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
