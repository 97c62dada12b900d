"""Memory use and id of a worker's device; on a CPU, of its process and host."""

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
    """Maximum allocated since `reset_peak`."""
    memory_total_mb: float
    """Capacity of the device or host."""


class CudaMemory:
    """GPU memory of this process, as torch's allocator reports it."""

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
    """Resident memory of this process; reserved equals allocated.

    Linux resets the kernel's peak on request. Elsewhere, or in a sandbox, the peak is exact once it exceeds the peak
    before the reset; until then it is the maximum that `reset_peak` and `read` measured.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._peak_before_reset = 0
        self._largest_measured = 0

    def read(self) -> MemoryUse:
        resident = self._process.memory_info().rss
        self._largest_measured = max(self._largest_measured, resident)
        lifetime_peak = _lifetime_peak_bytes()
        peak = lifetime_peak if lifetime_peak > self._peak_before_reset else self._largest_measured
        return MemoryUse(
            resident / _BYTES_PER_MB,
            resident / _BYTES_PER_MB,
            max(peak, resident) / _BYTES_PER_MB,  # the two numbers are not read at the same instant
            psutil.virtual_memory().total / _BYTES_PER_MB,
        )

    def reset_peak(self) -> None:
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:
            self._peak_before_reset = _lifetime_peak_bytes()
        else:
            self._peak_before_reset = 0
        self._largest_measured = self._process.memory_info().rss


def device_id(device: torch.device, local_rank: int) -> str:
    """Return an id that all processes on the device agree on: the NVML UUID of a GPU ("GPU-…").

    For a CPU it is made of the node's id and the local rank ("CPU-…-0"); see `node_id`.
    """
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"CPU-{node_id()}-{local_rank}"


def _lifetime_peak_bytes() -> int:
    """Return the peak resident memory of this process, since the last reset of the kernel's peak if any."""
    if sys.platform == "linux":
        # Not getrusage: it includes memory from before exec.
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
