"""The first weights of a sharded model: rank 0 has read them, every rank gets its part."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lucidrl.models.policy.sharding import Sharding


@torch.no_grad()
def fill_from_rank_0(sharding: Sharding, source: PreTrainedModel | None) -> None:
    """Give every rank its part of the model that rank 0 has read, one tensor at a time.

    Args:
        source: the whole model on rank 0, None on the others.
    """
    device = sharding.mesh.device
    weights = dict(source.named_parameters()) if source is not None else {}
    shapes = sharding.shapes()
    dtype = sharding.parameters()[0].dtype

    def broadcast(name: str) -> torch.Tensor:
        tensor = weights[name].detach().to(device) if weights else torch.empty(shapes[name], dtype=dtype, device=device)
        tensor = tensor.contiguous()
        dist.broadcast(tensor, src=0)
        return tensor

    for parameter, part in zip(sharding.parameters(), sharding.parts_of(broadcast), strict=True):
        sharding.local(parameter).copy_(part)
    own: nn.Module = sharding.model.model
    # By their order: wrappers around layers change the names.
    # Tensor parallelism may have made DTensors of them, which are whole on every rank.
    buffers = [buffer.to_local() if isinstance(buffer, DTensor) else buffer for buffer in own.buffers()]
    for buffer, read in zip(buffers, source.buffers() if source is not None else buffers, strict=True):
        buffer.copy_(read)
        dist.broadcast(buffer, src=0)
    # FSDP settles which memory holds the shards, and which module is the root, in the first pass through the root.
    sharding.root(torch.ones(1, 2, dtype=torch.int64, device=device), torch.full((1,), 2, device=device))
