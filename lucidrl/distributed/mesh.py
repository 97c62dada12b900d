"""The mesh of the ranks: data parallel x context parallel x tensor parallel.

Tensor parallelism is the innermost axis, because it communicates most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lucidrl.errors import ConfigError

DP, CP, TP, DP_CP = "dp", "cp", "tp", "dp_cp"


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes."""

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
                f"tensor_parallel_size={tp}; set cluster.num_workers to a multiple of {cp * tp}, or lower one of them"
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
    """The process groups of this rank; a collective constructor, so every rank has to call it."""

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
        """Ranks with different rows."""
        return self._group(DP)

    @cached_property
    def cp_group(self) -> ProcessGroup | None:
        """Ranks with different tokens of the same rows."""
        return self._group(CP)

    @cached_property
    def tp_group(self) -> ProcessGroup | None:
        """Ranks with different shards of the same layers."""
        return self._group(TP)

    def _group(self, axis: str) -> ProcessGroup | None:
        if self._mesh is None or getattr(self.layout, axis) == 1:
            return None
        return self._mesh.get_group(axis)
