"""A policy's model as its config names it, on one rank or many: rank 0 reads the weights, each gets its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lucidrl.distributed.mesh import RankMesh
from lucidrl.distributed.process_group import check_exchanges_cpu_tensors
from lucidrl.models.activation_checkpointing import checkpoint_activations
from lucidrl.models.loading import DTYPES, empty_model, load_model
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.policy.config import HALF_PRECISIONS, PolicyConfig
from lucidrl.models.policy.sharding import Sharding, Unsharded


def load_sharded(
    config: PolicyConfig, mesh: RankMesh, device: torch.device, seed: int, shard: Callable[[PreTrainedModel], Sharding]
) -> Sharding:
    """The model with its weights; on one rank it is not wrapped.

    Args:
        seed: of the weights of an untrained model.
        shard: lays a model without weights (on the meta device) over the ranks.
    """
    name, trust = config.model_name, config.trust_remote_code
    if mesh.layout.size == 1:
        model = load_model(name, DTYPES[config.precision], seed=seed, trust_remote_code=trust)
        return Unsharded(with_logprobs(config, model).to(device), mesh)
    if config.dtensor_cfg.cpu_offload:
        check_exchanges_cpu_tensors("policy.dtensor_cfg.cpu_offload=true")
    # Sharded parameters are the optimizer's float32 weights; layers compute with a rounded copy of them.
    dtype = torch.float32 if config.precision in HALF_PRECISIONS else DTYPES[config.precision]
    source = load_model(name, dtype, seed=seed, trust_remote_code=trust) if mesh.rank == 0 else None
    sharding = shard(empty_model(name, dtype, trust))
    _fill_from_rank_0(sharding, source)
    return sharding


def with_logprobs(config: PolicyConfig, model: PreTrainedModel, **parallel: Any) -> LogprobModel:
    """The module that is sharded. In evaluation mode, also in training: with dropout, the policy that is trained would
    be another one than the policy that sampled and scored.

    Args:
        **parallel: what `LogprobModel` has to know of other ranks.
    """
    if config.dtensor_cfg.activation_checkpointing:
        checkpoint_activations(model)
    return LogprobModel(model.eval(), config.generation.temperature, config.recompute_head, **parallel)


def give_memory(model: nn.Module, parameters_device: torch.device, buffers_device: torch.device) -> None:
    """Make the tensors of a model that is on the meta device, without values.

    The two devices differ where parameters wait in host memory: FSDP brings these to the device, but never buffers.
    """
    model.to_empty(device=parameters_device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(buffers_device)


@torch.no_grad()
def _fill_from_rank_0(sharding: Sharding, source: PreTrainedModel | None) -> None:
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
