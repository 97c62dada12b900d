"""How a policy's model lies over the ranks; everything else about a worker is the same for one rank and for many.

Rank 0 reads the weights, and every rank gets its part of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lucidrl.distributed.collectives import sum_over
from lucidrl.distributed.mesh import RankMesh
from lucidrl.distributed.process_group import check_exchanges_cpu_tensors
from lucidrl.models.activation_checkpointing import checkpoint_activations
from lucidrl.models.loading import DTYPES, empty_model, load_model
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.optim import plain_norm
from lucidrl.models.policy.config import HALF_PRECISIONS, PolicyConfig

FullTensors = Callable[[str], torch.Tensor]
"""The whole tensor of a parameter, by its Hugging Face name."""


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that this rank holds of a parameter, a gradient or a buffer; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Unit:
    """Weights that this rank holds, and gathers, in one parameter."""

    parameter: nn.Parameter
    names: list[str]
    """Hugging Face names of the whole tensors in it, in their order; tied ones once."""


class Sharding(ABC):
    """How a back end cuts and gathers weights.

    `model` is the module with the model's own methods; `root` is what is called, so that the back end can gather the
    weights that a forward pass needs.

    Args:
        model: not sharded yet; its parameters may be on the meta device.
    """

    root: nn.Module
    units: list[Unit]
    gradient_scale: float = 1.0
    """What a loss is multiplied with, where the back end averages gradients over ranks instead of adding them up."""

    def __init__(self, model: LogprobModel, mesh: RankMesh):
        self.model, self.mesh = model, mesh
        self.shapes = {name: list(parameter.shape) for name, parameter in self._trained()}
        """Hugging Face name → shape of every whole trainable tensor, in the order of the model; tied ones once."""

    @abstractmethod
    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch: gradients are exchanged between ranks at the last one only."""

    @abstractmethod
    def gathered(self) -> AbstractContextManager[None]:
        """Inside, `model` has all its weights on every rank and can be called in parts, as generation does."""

    @abstractmethod
    def _gather(self, unit: Unit, part: torch.Tensor, names: Sequence[str]) -> Iterable[tuple[str, torch.Tensor]]:
        """Those of a unit's whole tensors that are named, from the parts of all ranks."""

    @abstractmethod
    def part_of(self, unit: Unit, full: FullTensors) -> torch.Tensor:
        """The inverse: this rank's part of a unit's whole tensors."""

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters as this rank holds them."""
        return [unit.parameter for unit in self.units]

    def local_weights(self) -> list[torch.Tensor]:
        """What this rank holds of the weights, in the order of `parameters`; shares their memory."""
        return [local_part(parameter.detach()) for parameter in self.parameters()]

    def gather_order(self) -> list[str]:
        """Hugging Face names in the order in which whole tensors are gathered; neighbours cost least together."""
        return [name for unit in self.units for name in unit.names]

    def full_tensors(
        self,
        parts: Sequence[torch.Tensor],
        names: Collection[str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, one at a time, from the parts of all ranks; every rank has to walk through them.

        Args:
            parts: tensors of this rank, shaped as `local_weights`: weights, or moments of an optimizer.
            names: only these are gathered; all by default.
            dtype: what parts are rounded to before they travel; by default they are as they are.

        Yields:
            Hugging Face names and tensors, in the order of `gather_order`; weights that are tied appear once.
        """
        for unit, part in zip(self.units, parts, strict=True):
            if wanted := [name for name in unit.names if names is None or name in names]:
                yield from self._gather(unit, part.to(dtype or part.dtype), wanted)

    def parts_of(self, full: FullTensors) -> Iterator[torch.Tensor]:
        """The inverse: this rank's parts of whole tensors, in the order of `parameters`."""
        return (self.part_of(unit, full) for unit in self.units)

    def full_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        return self.full_tensors(self.local_weights(), dtype=dtype)

    @torch.no_grad()
    def load_full_weights(self, full: FullTensors) -> None:
        for weights, part in zip(self.local_weights(), self.parts_of(full), strict=True):
            weights.copy_(part)

    def total_norm(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Norm of the whole model's gradient, from this rank's part of it (in the order of `parameters`)."""
        if self.mesh.world is None:
            return plain_norm(gradients)
        device = local_part(self.units[0].parameter.detach()).device
        square = torch.zeros((), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
        for parameter, gradient in zip(self.parameters(), gradients, strict=True):
            if gradient is not None:
                square += gradient.to(square.dtype).square().sum() / self._num_copies(parameter)
        return sum_over(square, self.mesh.world).sqrt()

    def _num_copies(self, parameter: nn.Parameter) -> int:
        """How many ranks hold the same part: tensor parallel ranks hold copies of what they do not split."""
        # One axis is FSDP's. The other, if there is one, may also replicate (norms within attention heads).
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        return 1 if len(placements) == 2 and placements[1].is_shard() else self.mesh.layout.tp

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        named = self.model.model.named_parameters()
        return ((name, parameter) for name, parameter in named if parameter.requires_grad)

    def _units_of_one(self) -> list[Unit]:
        """A unit for each parameter."""
        return [Unit(parameter, [name]) for name, parameter in self._trained()]


class Unsharded(Sharding):
    """One rank holds everything."""

    def __init__(self, model: LogprobModel, mesh: RankMesh):
        super().__init__(model, mesh)
        self.root = model
        self.units = self._units_of_one()

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def gathered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _gather(self, unit: Unit, part: torch.Tensor, names: Sequence[str]) -> Iterable[tuple[str, torch.Tensor]]:
        return [(names[0], part)]

    def part_of(self, unit: Unit, full: FullTensors) -> torch.Tensor:
        return full(unit.names[0])


def load_sharded(
    config: PolicyConfig, mesh: RankMesh, seed: int, shard: Callable[[PreTrainedModel], Sharding]
) -> Sharding:
    """The model with its weights; on one rank it is not wrapped.

    Args:
        seed: of the weights of an untrained model.
        shard: lays a model without weights (on the meta device) over the ranks.
    """
    name, trust = config.model_name, config.trust_remote_code
    if mesh.layout.size == 1:
        model = load_model(name, DTYPES[config.precision], seed=seed, trust_remote_code=trust)
        return Unsharded(with_logprobs(config, model).to(mesh.device), mesh)
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


def mixed_precision(model: nn.Module, config: PolicyConfig) -> dict[str, Any]:
    """Arguments that FSDP1 and FSDP2 share: the passes run in the configured precision, parameters and gradients are
    kept and exchanged as they are."""
    kept, computed = next(model.parameters()).dtype, DTYPES[config.precision]
    param_dtype, reduce_dtype = (computed, kept) if computed != kept else (None, None)
    return {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype, "cast_forward_inputs": False}


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
    dtype = sharding.parameters()[0].dtype

    def broadcast(name: str) -> torch.Tensor:
        if weights:
            tensor = weights[name].detach().to(device).contiguous()
        else:
            tensor = torch.empty(sharding.shapes[name], dtype=dtype, device=device)
        dist.broadcast(tensor, src=0)
        return tensor

    sharding.load_full_weights(broadcast)
    # By their order: wrappers around layers change the names.
    # Tensor parallelism may have made DTensors of them, which are whole on every rank.
    buffers = [local_part(buffer) for buffer in sharding.model.model.buffers()]
    for buffer, read in zip(buffers, source.buffers() if source is not None else buffers, strict=True):
        buffer.copy_(read)
        dist.broadcast(buffer, src=0)
    # FSDP settles which memory holds the shards, and which module is the root, in the first pass through the root.
    sharding.root(torch.ones(1, 2, dtype=torch.int64, device=device), torch.full((1,), 2, device=device))
