"""How a policy's model is sharded over ranks. Rank 0 reads the weights; every rank receives its shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lucidrl.distributed.process_group import RankMesh, check_exchanges_cpu_tensors, sum_over
from lucidrl.models.loading import DTYPES, checkpoint_activations, empty_model, load_model
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.lora import FACTORS, adapted_layers, add_adapters, merged_weight
from lucidrl.models.muon import matrix_names
from lucidrl.models.optim import plain_norm
from lucidrl.models.parameter_groups import WeightInfo
from lucidrl.models.policy.config import HALF_PRECISIONS, PolicyConfig
from lucidrl.models.policy.interfaces import Role
from lucidrl.models.reward_model import empty_reward_model, load_reward_model

FullTensors = Callable[[str], torch.Tensor]
"""Returns a full tensor, given its Hugging Face name."""


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor behind a parameter, gradient or buffer of this rank. Both share memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Unit:
    """Weights that are sharded and gathered together, as one parameter."""

    parameter: nn.Parameter
    names: list[str]
    """Hugging Face names of the full tensors in the parameter, in memory order; tied tensors are listed once."""


class Sharding(ABC):
    """Shards and gathers the weights of a model.

    Call `root` for a forward pass, because FSDP gathers weights there. `model` is the `LogprobModel` inside `root`.

    Args:
        model: the unsharded model; its parameters may be on the meta device.
    """

    root: nn.Module
    units: list[Unit]
    """Trained units, in the order in which they are gathered."""
    frozen: list[Unit]
    """Units of weights that are not trained: all but the adapters with LoRA, else none."""
    gradient_scale: float = 1.0
    """Multiply losses by this factor, so that gradients are sums over ranks even if the back end averages them."""

    def __init__(self, model: LogprobModel, mesh: RankMesh):
        self.model, self.mesh = model, mesh
        self.shapes = self._shapes(is_trained=True)
        """Hugging Face name → shape of every full trainable tensor, in model order; tied tensors are listed once."""
        self.frozen_shapes = self._shapes(is_trained=False)
        """The same of tensors that are not trained."""
        self._matrices = matrix_names(model.model)

    @abstractmethod
    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Return the context for one micro-batch; after the last one, gradients are reduced over ranks."""

    @abstractmethod
    def gathered(self) -> AbstractContextManager[None]:
        """Return a context in which `model` has full weights on every rank, so submodules can be called directly."""

    @abstractmethod
    def _gather(self, unit: Unit, shard: torch.Tensor, names: Sequence[str]) -> Iterable[tuple[str, torch.Tensor]]:
        """Gather the named full tensors of a unit from the shards of all ranks."""

    @abstractmethod
    def shard_of(self, unit: Unit, full: FullTensors) -> torch.Tensor:
        """Return this rank's shard of a unit, taken from full tensors."""

    def parameters(self) -> list[nn.Parameter]:
        """Return this rank's trainable parameters."""
        return [unit.parameter for unit in self.units]

    def weight_infos(self) -> list[WeightInfo] | None:
        """Describe the weights in `parameters`, for the optimizer; None if a parameter holds several weights."""
        if any(len(unit.names) > 1 for unit in self.units):
            return None
        return [
            WeightInfo(name, partial(self._on_full_matrix, unit) if name in self._matrices else None)
            for unit in self.units
            for name in unit.names
        ]

    def _on_full_matrix(
        self, unit: Unit, shard: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Apply a function to a full matrix; return this rank's shard of the result. Every rank must call it."""
        ((_, full),) = self._gather(unit, shard, unit.names)
        result = function(full)
        return self.shard_of(unit, lambda _: result)

    def local_weights(self) -> list[torch.Tensor]:
        """Return this rank's shards of the weights, in the order of `parameters`.

        The returned tensors share memory with the parameters.
        """
        return [local_shard(parameter.detach()) for parameter in self.parameters()]

    def full_tensors(
        self,
        shards: Sequence[torch.Tensor],
        names: Collection[str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather full tensors one at a time. Each is a collective, so every rank must exhaust the iterator.

        Args:
            shards: tensors of this rank with the shapes of `local_weights`: weights, or optimizer moments.
            names: names of the tensors to gather; all by default.
            dtype: cast shards to this dtype before they are sent.

        Yields:
            Hugging Face names and tensors, in the order of `units`; tied weights once.
        """
        for unit, shard in zip(self.units, shards, strict=True):
            if wanted := [name for name in unit.names if names is None or name in names]:
                yield from self._gather(unit, shard.to(dtype or shard.dtype), wanted)

    def shards_of(self, full: FullTensors) -> Iterator[torch.Tensor]:
        """Return this rank's shards, taken from full tensors, in the order of `parameters`."""
        return (self.shard_of(unit, full) for unit in self.units)

    def full_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        return self.full_tensors(self.local_weights(), dtype=dtype)

    def merged_weights(
        self, names: Collection[str] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather the frozen weights one at a time, with adapters merged in. Every rank must exhaust the iterator.

        Args:
            names: names of the tensors to gather; all by default.
            dtype: cast merged weights to this dtype.
        """
        factors = dict(zip(self.shapes, self.units, strict=True))
        layers = {f"{name}.weight": (name, layer) for name, layer in adapted_layers(self.model.model).items()}
        for unit in self.frozen:
            [name] = unit.names
            if names is not None and name not in names:
                continue
            full = self._full(unit)
            if name in layers:
                of_layer, layer = layers[name]
                a_RI, b_OR = (self._full(factors[f"{of_layer}.{factor}"]) for factor in FACTORS)
                full = merged_weight(full, a_RI, b_OR, layer.scaling)
            yield name, full.to(dtype or full.dtype)

    def _full(self, unit: Unit) -> torch.Tensor:
        """Gather the only tensor of a unit."""
        [(_, full)] = self._gather(unit, local_shard(unit.parameter.detach()), unit.names)
        return full

    @torch.no_grad()
    def load_full_weights(self, full: FullTensors) -> None:
        for weights, shard in zip(self.local_weights(), self.shards_of(full), strict=True):
            weights.copy_(shard)

    @torch.no_grad()
    def load_frozen(self, full: FullTensors) -> None:
        """Load the weights that are not trained."""
        for unit in self.frozen:
            local_shard(unit.parameter.detach()).copy_(self.shard_of(unit, full))

    def total_norm(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the gradient norm of the full model, from this rank's shards (in the order of `parameters`)."""
        if self.mesh.world is None:
            return plain_norm(gradients)
        device = local_shard(self.units[0].parameter.detach()).device
        square = torch.zeros((), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
        for parameter, gradient in zip(self.parameters(), gradients, strict=True):
            if gradient is not None:
                square += gradient.to(square.dtype).square().sum() / self._num_copies(parameter)
        return sum_over(square, self.mesh.world).sqrt()

    def _num_copies(self, parameter: nn.Parameter) -> int:
        """Return how many ranks hold the same shard: tensor parallel ranks replicate parameters that are not split."""
        # The first mesh axis is FSDP's. The second, if any, is tensor parallel; it replicates norms of attention heads.
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        return 1 if len(placements) == 2 and placements[1].is_shard() else self.mesh.layout.tp

    def _named(self, *, is_trained: bool) -> Iterator[tuple[str, nn.Parameter]]:
        named = self.model.model.named_parameters()
        return ((name, parameter) for name, parameter in named if parameter.requires_grad == is_trained)

    def _shapes(self, *, is_trained: bool) -> dict[str, list[int]]:
        return {name: list(parameter.shape) for name, parameter in self._named(is_trained=is_trained)}

    def _set_unit_per_parameter(self) -> None:
        self.units = [Unit(parameter, [name]) for name, parameter in self._named(is_trained=True)]
        self.frozen = [Unit(parameter, [name]) for name, parameter in self._named(is_trained=False)]


class Unsharded(Sharding):
    """One rank holds the full model."""

    def __init__(self, model: LogprobModel, mesh: RankMesh):
        super().__init__(model, mesh)
        self.root = model
        self._set_unit_per_parameter()

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def gathered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _gather(self, unit: Unit, shard: torch.Tensor, names: Sequence[str]) -> Iterable[tuple[str, torch.Tensor]]:
        return [(names[0], shard)]

    def shard_of(self, unit: Unit, full: FullTensors) -> torch.Tensor:
        return full(unit.names[0])


_LOADERS: dict[Role, tuple[Callable[..., PreTrainedModel], Callable[..., PreTrainedModel]]] = {
    "policy": (load_model, empty_model),
    "reward": (load_reward_model, empty_reward_model),
}


def load_sharded(
    config: PolicyConfig, mesh: RankMesh, seed: int, shard: Callable[[PreTrainedModel], Sharding], role: Role = "policy"
) -> Sharding:
    """Load the model and shard it; a single rank is not wrapped.

    Args:
        seed: seed of the weights of an untrained model.
        shard: shards a model that is on the meta device.
    """
    name, trust = config.model_name, config.trust_remote_code
    load, make_empty = _LOADERS[role]
    if mesh.layout.size == 1:
        model = load(name, DTYPES[config.precision], seed=seed, trust_remote_code=trust)
        if config.lora is not None:
            add_adapters(model, config.lora, seed)
        return Unsharded(with_logprobs(config, model).to(mesh.device), mesh)
    if config.dtensor_cfg.cpu_offload:
        check_exchanges_cpu_tensors("policy.dtensor_cfg.cpu_offload=true")
    # Sharded parameters are the optimizer's float32 weights; layers compute with a half-precision copy.
    dtype = torch.float32 if config.precision in HALF_PRECISIONS else DTYPES[config.precision]
    source = load(name, dtype, seed=seed, trust_remote_code=trust) if mesh.rank == 0 else None
    if source is not None and config.lora is not None:
        add_adapters(source, config.lora, seed)
    sharding = shard(make_empty(name, dtype, trust))
    _broadcast_from_rank_0(sharding, source)
    return sharding


def with_logprobs(config: PolicyConfig, model: PreTrainedModel, **parallel: Any) -> LogprobModel:
    """Wrap a model to return log-probabilities.

    The model stays in evaluation mode during training: with dropout, the trained policy would differ from the policy
    that sampled and scored. Only adapters drop inputs if `policy.lora.dropout` says so.

    Args:
        **parallel: parallelism arguments of `LogprobModel`.
    """
    if config.dtensor_cfg.activation_checkpointing:
        checkpoint_activations(model, draws=config.lora is not None and config.lora.dropout > 0)
    return LogprobModel(model.eval(), config.generation.temperature, config.recompute_head, **parallel)


def mixed_precision(model: nn.Module, config: PolicyConfig) -> dict[str, Any]:
    """Return FSDP arguments: compute in the configured precision; store and reduce in the dtype of the parameters."""
    stored, computed = next(model.parameters()).dtype, DTYPES[config.precision]
    param_dtype, reduce_dtype = (computed, stored) if computed != stored else (None, None)
    return {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype, "cast_forward_inputs": False}


def materialize(model: nn.Module, parameters_device: torch.device, buffers_device: torch.device) -> None:
    """Allocate uninitialised tensors for a model that is on the meta device.

    The two devices differ with CPU offload: FSDP moves parameters to the accelerator, but never buffers.
    """
    model.to_empty(device=parameters_device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(buffers_device)


@torch.no_grad()
def _broadcast_from_rank_0(sharding: Sharding, source: PreTrainedModel | None) -> None:
    """Broadcast the weights from rank 0, one tensor at a time; each rank keeps its shards.

    Args:
        source: the full model on rank 0, None elsewhere.
    """
    device = sharding.mesh.device
    weights = dict(source.named_parameters()) if source is not None else {}
    dtype, shapes = sharding.parameters()[0].dtype, sharding.shapes | sharding.frozen_shapes

    def broadcast(name: str) -> torch.Tensor:
        if weights:
            tensor = weights[name].detach().to(device).contiguous()
        else:
            tensor = torch.empty(shapes[name], dtype=dtype, device=device)
        dist.broadcast(tensor, src=0)
        return tensor

    sharding.load_full_weights(broadcast)
    sharding.load_frozen(broadcast)
    # Match buffers by order: wrappers change names. Tensor parallelism may have made them replicated DTensors.
    buffers = [local_shard(buffer) for buffer in sharding.model.model.buffers()]
    for buffer, read in zip(buffers, source.buffers() if source is not None else buffers, strict=True):
        buffer.copy_(read)
        dist.broadcast(buffer, src=0)
    # FSDP decides which memory holds the shards, and which module is the root, in the first forward pass.
    sharding.root(torch.ones(1, 2, dtype=torch.int64, device=device), torch.full((1,), 2, device=device))
