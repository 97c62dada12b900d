"""How a policy's model lies over the ranks; everything else about a worker is the same for one rank and for many.

Rank 0 reads the weights, and every rank gets its part of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lucidrl.distributed.collectives import sum_over
from lucidrl.distributed.mesh import RankMesh
from lucidrl.distributed.process_group import check_exchanges_cpu_tensors
from lucidrl.models.loading import DTYPES, checkpoint_activations, empty_model, load_model
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.optim import plain_norm
from lucidrl.models.policy.config import HALF_PRECISIONS, PolicyConfig

FullTensors = Callable[[str], torch.Tensor]
"""The whole tensor of a parameter, by its Hugging Face name."""


def norm_over_ranks(
    gradients: Sequence[torch.Tensor | None], copies: Sequence[int], device: torch.device, group: ProcessGroup | None
) -> torch.Tensor:
    """Norm of gradients of which each rank has a part; of each part, so many ranks hold copies."""
    square = torch.zeros((), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
    for gradient, num_copies in zip(gradients, copies, strict=True):
        if gradient is not None:
            square += gradient.to(square.dtype).square().sum() / num_copies
    return sum_over(square, group).sqrt()


class Sharding(ABC):
    """What a back end states: how weights are cut, gathered and measured.

    `model` is the module with the model's own methods; `root` is what is called, so that the back end can gather the
    weights that a forward pass needs. Parameters are those of this rank: each holds a part of the model.
    """

    mesh: RankMesh
    model: LogprobModel
    root: nn.Module
    gradient_scale: float = 1.0
    """What a loss is multiplied with, where the back end averages gradients over ranks instead of adding them up."""

    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters as this rank holds them."""

    @abstractmethod
    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """The plain tensor of this rank behind a parameter or its gradient; shares its memory."""

    @abstractmethod
    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch: gradients are exchanged between ranks at the last one only."""

    @abstractmethod
    def total_norm(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Norm of the whole model's gradient, from this rank's part of it (in the order of `parameters`)."""

    @abstractmethod
    def gathered(self) -> AbstractContextManager[None]:
        """Inside, `model` has all its weights on every rank and can be called in parts, as generation does."""

    @abstractmethod
    def full_tensors(
        self,
        parts: Sequence[torch.Tensor],
        names: Collection[str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, one at a time, from the parts of all ranks; every rank has to walk through them.

        Args:
            parts: tensors of this rank, shaped as `local` of `parameters`: weights, or moments of an optimizer.
            names: only these are gathered; all by default.
            dtype: what parts are rounded to before they travel; by default they are as they are.

        Yields:
            Hugging Face names and tensors, in the order of `gather_order`; weights that are tied appear once.
        """

    @abstractmethod
    def gather_order(self) -> list[str]:
        """Hugging Face names in the order in which whole tensors are gathered; neighbours cost least together."""

    @abstractmethod
    def parts_of(self, full: FullTensors) -> Iterator[torch.Tensor]:
        """The inverse: this rank's parts of whole tensors, in the order of `parameters`."""

    @abstractmethod
    def shapes(self) -> dict[str, list[int]]:
        """Hugging Face name → shape of every whole trainable tensor, in the order of the model; tied ones once."""

    def local_weights(self) -> list[torch.Tensor]:
        """What this rank holds of the weights, in the order of `parameters`; shares their memory."""
        return [self.local(parameter.detach()) for parameter in self.parameters()]

    def full_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        return self.full_tensors(self.local_weights(), dtype=dtype)

    @torch.no_grad()
    def load_full_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        for parameter, part in zip(self.parameters(), self.parts_of(weights.__getitem__), strict=True):
            self.local(parameter).copy_(part)


class Unsharded(Sharding):
    """One rank holds everything."""

    def __init__(self, model: LogprobModel, mesh: RankMesh):
        self.model = self.root = model
        self.mesh = mesh
        named = model.model.named_parameters()
        # Once: a walk through all modules takes longer than the copy of many a weight.
        self._named = {name: parameter for name, parameter in named if parameter.requires_grad}

    def parameters(self) -> list[nn.Parameter]:
        return list(self._named.values())

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def total_norm(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        return plain_norm(gradients)

    def gathered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def full_tensors(
        self, parts: Sequence[torch.Tensor], names: Collection[str] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, part in zip(self._named, parts, strict=True):
            if names is None or name in names:
                yield name, part.to(dtype or part.dtype)

    def gather_order(self) -> list[str]:
        return list(self._named)

    def parts_of(self, full: FullTensors) -> Iterator[torch.Tensor]:
        return (full(name) for name in self._named)

    def shapes(self) -> dict[str, list[int]]:
        return {name: list(parameter.shape) for name, parameter in self._named.items()}


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
