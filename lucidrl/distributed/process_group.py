"""Process groups of ranks: torch's default group, the mesh of its ranks, and collectives over a group.

The mesh is data parallel x context parallel x tensor parallel. Tensor parallelism is the innermost axis, because it
communicates most.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import TypeVar
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lucidrl.errors import ConfigError
from lucidrl.profiling.spans import span
from lucidrl.profiling.worker_times import COMMUNICATION

T = TypeVar("T")


@dataclass(frozen=True)
class RankInfo:
    """Rank of this process."""

    rank: int = 0
    local_rank: int = 0
    """Index of the rank among the ranks of this machine; also the index of its GPU."""
    world_size: int = 1
    own_group: ReferenceType[ProcessGroup] | None = field(default=None, compare=False, repr=False)
    """The default process group, if this module created it and so may destroy it. The reference is weak, because a
    group that is alive at interpreter exit sometimes aborts the process."""


def init_process_group_from_environment(timeout_s: float) -> RankInfo:
    """Join torch's default process group: gloo for CPU tensors and, if there are GPUs, nccl for GPU tensors.

    Without RANK in the environment this process is the only rank, and no group is created. If a default group exists
    already, this changes neither the group nor the current GPU.

    Args:
        timeout_s: timeout of the rendezvous and of every collective.

    Raises:
        ConfigError: if the environment is incomplete, or there are more ranks on this machine than GPUs.
    """
    if dist.is_initialized():
        return RankInfo(dist.get_rank(), int(os.environ.get("LOCAL_RANK", "0")), dist.get_world_size())
    if "RANK" not in os.environ:
        return RankInfo()
    info = _info_from_environment()
    if torch.cuda.is_available():
        if info.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"local rank {info.local_rank} has no GPU: this machine has {torch.cuda.device_count()}, and every "
                "rank needs its own; start fewer ranks here, or hide the GPUs with CUDA_VISIBLE_DEVICES= to use CPUs"
            )
        torch.cuda.set_device(info.local_rank)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    assert dist.group.WORLD is not None
    return replace(info, own_group=ref(dist.group.WORLD))


def leave_process_group(info: RankInfo) -> None:
    """Destroy the default process group if the call that returned `info` created it; may be called twice."""
    if info.own_group is not None and dist.is_initialized() and dist.group.WORLD is info.own_group():
        dist.destroy_process_group()


def check_exchanges_cpu_tensors(why: str) -> None:
    """Raise ConfigError if the default process group, which the user may have created, has no CPU backend.

    Args:
        why: the setting that needs collectives of CPU tensors, such as `a.b=true`; the error starts with it.
    """
    backend = dist.get_backend_config()
    if "cpu:" not in backend:
        raise ConfigError(
            f"{why} exchanges CPU tensors, but the existing process group has only the backend {backend}; create the "
            "group with cpu:gloo,cuda:nccl, or let the worker create it"
        )


def _info_from_environment() -> RankInfo:
    needed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in os.environ]:
        raise ConfigError(
            f"RANK={os.environ['RANK']} is set without {' and '.join(missing)}; a rank needs all of "
            f"{', '.join(needed)}: start it with torchrun, or unset RANK to run a single rank"
        )
    rank, local_rank, world_size = (int(os.environ[name]) for name in needed[:3])
    return RankInfo(rank, local_rank, world_size)


# Collectives; without a group there is a single rank and nothing to exchange.


def sum_over(values: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """The sum of `values` over all ranks; does not change `values`."""
    if group is None:
        return values
    total = values.clone()
    with span(COMMUNICATION):
        dist.all_reduce(total, group=group)
    return total


def largest_over(value: int, group: ProcessGroup | None) -> int:
    """The largest `value` of all ranks."""
    if group is None:
        return value
    largest = torch.tensor(value, device="cuda" if dist.get_backend(group) == "nccl" else "cpu")
    with span(COMMUNICATION):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return int(largest)


def gather_over(value: T, group: ProcessGroup | None) -> list[T]:
    """`value` of every rank, in rank order. For small objects only, because they are pickled."""
    if group is None:
        return [value]
    values: list[T | None] = [None] * group.size()
    with span(COMMUNICATION):
        dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value] # all are filled


DP, CP, TP, DP_CP = "dp", "cp", "tp", "dp_cp"


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes."""

    dp: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def of_world(cls, world_size: int, cp: int, tp: int) -> Layout:
        """Derive the data parallel size from the world size.

        Raises:
            ConfigError: if the world size is not a multiple of cp x tp.
        """
        if world_size % (cp * tp):
            raise ConfigError(
                f"{world_size} ranks do not split into groups of context_parallel_size={cp} x "
                f"tensor_parallel_size={tp}; set cluster.num_workers to a multiple of {cp * tp}, or lower a size"
            )
        return cls(world_size // (cp * tp), cp, tp)

    @property
    def size(self) -> int:
        return self.dp * self.cp * self.tp

    def data_rank(self, rank: int) -> int:
        """The data parallel index of a rank."""
        return rank // (self.cp * self.tp)

    def __str__(self) -> str:
        return f"dp={self.dp} x cp={self.cp} x tp={self.tp}"


class RankMesh:
    """The process groups of this rank. The constructor is a collective call: every rank must make it."""

    def __init__(self, layout: Layout, device: torch.device):
        self.layout, self.device = layout, device
        self.rank = dist.get_rank() if layout.size > 1 else 0
        self._mesh: DeviceMesh | None = None
        if layout.size > 1:
            shape = (layout.dp, layout.cp, layout.tp)
            self._mesh = init_device_mesh(device.type, shape, mesh_dim_names=(DP, CP, TP))
            self.sharding_mesh = self._mesh[DP, CP]._flatten(DP_CP)
            """The mesh over which parameters are sharded and gradients summed."""

    @property
    def tp_mesh(self) -> DeviceMesh:
        assert self._mesh is not None
        return self._mesh[TP]

    @cached_property
    def world(self) -> ProcessGroup | None:
        return dist.group.WORLD if self._mesh is not None else None

    @cached_property
    def dp_group(self) -> ProcessGroup | None:
        """Ranks that process different rows."""
        return self._group(DP)

    @cached_property
    def cp_group(self) -> ProcessGroup | None:
        """Ranks that process different tokens of the same rows."""
        return self._group(CP)

    @cached_property
    def tp_group(self) -> ProcessGroup | None:
        """Ranks that hold different shards of the same layers."""
        return self._group(TP)

    def _group(self, axis: str) -> ProcessGroup | None:
        if self._mesh is None or getattr(self.layout, axis) == 1:
            return None
        return self._mesh.get_group(axis)
