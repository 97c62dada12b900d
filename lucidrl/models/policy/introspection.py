"""What a policy worker tells about itself: memory, device and profile of its process, and noise on its weights.

"GPU" in the documented names means the worker's accelerator; on a CPU these are facts about the process and its host.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import zlib
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import torch

from lucidrl.distributed.collectives import gather_over
from lucidrl.distributed.process_group import RankInfo
from lucidrl.distributed.workers.place import node_id
from lucidrl.models.policy.sharding import Sharding
from lucidrl.profiling.recording import Recording
from lucidrl.utils.nsys import POLICY, is_recorded, worker_name

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
NOISE_STD = 0.01

_BYTES_PER_MB = 1 << 20
_NUM_SAMPLED_PARAMETERS = 3
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


class Introspection:
    """Facts about the process and device of one worker."""

    def __init__(self, rank: RankInfo, device: torch.device, sharding: Sharding):
        self._rank, self._device, self._sharding = rank, device, sharding
        self.memory = CudaMemory(device) if device.type == "cuda" else ProcessMemory()
        self._recording = Recording(worker_name(POLICY, rank.rank))

    def gpu_info(self) -> dict[str, Any]:
        """See `PolicyWorker.get_gpu_info`."""
        parameters = islice(self._sharding.model.model.named_parameters(), _NUM_SAMPLED_PARAMETERS)
        return {
            "rank": self._rank.rank,
            "world_size": self._rank.world_size,
            "device": str(self._device),
            **asdict(self.memory.read()),
            "environment": {name: os.environ.get(name) for name in RANK_VARIABLES},
            "parameter_devices": {name: str(parameter.device) for name, parameter in parameters},
        }

    def start_recording(self) -> None:
        """See `PolicyWorker.start_gpu_profiling`."""
        if is_recorded(self._recording.name):
            self._recording.start()

    def stop_recording(self) -> None:
        self._recording.stop()

    def device_id(self) -> str:
        return device_id(self._device, self._rank.local_rank)


def device_id(device: torch.device, local_rank: int) -> str:
    """What every process that uses the device of a worker calls it: the UUID that NVML gives a GPU ("GPU-…").

    A CPU has none: there it is an id of the node and the worker's number on it ("CPU-…-0"); see `node_id`.
    """
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"CPU-{node_id()}-{local_rank}"


def state_dict_of(sharding: Sharding) -> dict[str, Any]:
    """The model's state dict under Hugging Face names; to be called on every rank.

    One rank and FSDP2 give what the rank holds (FSDP2: DTensors), sharing its memory; FSDP1, whose shards are no
    tensors of the model, gathers whole ones.
    """
    # Asked of the root, since only that knows how its weights are sharded; the root calls the model "model".
    return {name.removeprefix("model."): value for name, value in sharding.root.state_dict().items()}


@torch.no_grad()
def add_noise(sharding: Sharding) -> None:
    """Add N(0, 0.01) to every trainable weight; all ranks draw the noise of the whole model and take their parts of it.

    What ranks hold copies of stays equal that way, and the result does not depend on how the model is sharded. The
    draw follows from rank 0's torch seed.
    """
    seed = gather_over(int(torch.randint(1 << 31, ())), sharding.mesh.world)[0]
    shapes = sharding.shapes()

    def draw(name: str) -> torch.Tensor:
        # Seeded by name, because ranks may not ask for the same tensors in the same order. Torch uses 32 bits of it.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        return NOISE_STD * torch.randn(shapes[name], generator=generator)

    for parameter, part in zip(sharding.parameters(), sharding.parts_of(draw), strict=True):
        weights = sharding.local(parameter)
        weights.add_(part.to(weights))


def _lifetime_peak_bytes() -> int:
    """Most resident memory this process has had, or has had since Linux was told to start over."""
    if sys.platform == "linux":
        # Not getrusage: its number includes what ran in the process before it became this program.
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
