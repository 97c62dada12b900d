"""The policy worker on FSDP1 (FullyShardedDataParallel): data parallel only. A single rank is not wrapped.

FSDP1 concatenates the weights of an FSDP unit into one flat parameter, pads it to a multiple of the number of ranks,
and gives each rank an equal shard. The optimizer and the reference policy work on these shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import CustomPolicy
from transformers import PreTrainedModel

from lucidrl.distributed.process_group import Layout, RankMesh
from lucidrl.errors import ConfigError
from lucidrl.models.fsdp_internals import end_failed_pass, flat_parameter, gathered_unit, tensors_in
from lucidrl.models.loading import decoder_layers
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.policy.config import HALF_PRECISIONS, MUON, PolicyConfig
from lucidrl.models.policy.sharding import FullTensors, Sharding, Unit, mixed_precision, with_logprobs
from lucidrl.models.policy.worker import PolicyWorker


class FSDP1PolicyWorker(PolicyWorker):
    """One rank of a policy whose flat parameters are sharded over all ranks."""

    manual_offload_to_cpu = PolicyWorker.move_to_cpu
    manual_load_to_gpu = PolicyWorker.move_to_cuda

    @staticmethod
    def layout_of(config: PolicyConfig, world_size: int) -> Layout:
        for name in ("tensor_parallel_size", "context_parallel_size"):
            if (size := getattr(config.dtensor_cfg, name)) > 1:
                raise ConfigError(
                    f"policy.dtensor_cfg.{name}={size} is not supported by FSDP1, which is data parallel only; "
                    "set it to 1, or set policy.dtensor_cfg.enabled=true to use DTensorPolicyWorker"
                )
        optimizer = config.optimizer
        for setting, is_on in (("name=muon", optimizer.name == MUON), ("groups", bool(optimizer.groups))):
            if is_on and world_size > 1:
                raise ConfigError(
                    f"policy.optimizer.{setting} needs separate weights, but FSDP1 flattens the weights of a layer "
                    "into one parameter; set policy.dtensor_cfg.enabled=true to use DTensorPolicyWorker"
                )
        if config.lora is not None and world_size > 1:
            raise ConfigError(
                "policy.lora trains some weights of a layer and freezes the others, but FSDP1 flattens the weights of "
                "a layer into one parameter; set policy.dtensor_cfg.enabled=true to use DTensorPolicyWorker"
            )
        return Layout(dp=world_size)

    def _shard(self, model: PreTrainedModel) -> Sharding:
        return FSDP1Sharding(with_logprobs(self.config, model), self.mesh, self.config)


class FSDP1Sharding(Sharding):
    """Makes each decoder layer one FSDP unit; embedding, final norm and head together are one more unit.

    Args:
        model: must be on the meta device. Wrapping allocates the parameters of each FSDP unit uninitialised; load the
            weights afterwards.
    """

    root: FullyShardedDataParallel

    def __init__(self, model: LogprobModel, mesh: RankMesh, config: PolicyConfig):
        super().__init__(model, mesh)
        self.gradient_scale = float(mesh.layout.size)
        offloads = config.dtensor_cfg.cpu_offload and mesh.device.type != "cpu"
        # Unreduced gradients accumulate in the dtype of the backward pass. In half precision, reduce them after every
        # micro-batch and accumulate in float32; FSDP1 cannot do that with gradients on the host.
        self._reduces_once = config.precision not in HALF_PRECISIONS or offloads
        name_of_module = {module: name for name, module in model.model.named_modules()}
        layers = set(decoder_layers(model.model))
        options: dict[str, Any] = {
            "process_group": mesh.dp_group,
            "device_id": mesh.device,
            "mixed_precision": MixedPrecision(**mixed_precision(model, config), cast_root_forward_inputs=False),
            "cpu_offload": CPUOffload(offload_params=offloads),
        }
        sharded = FullyShardedDataParallel(
            model,
            auto_wrap_policy=CustomPolicy(lambda module: module in layers),
            param_init_fn=_materializer(mesh.device),
            **options,
        )
        # FSDP1 keeps the weights of its root gathered after a forward pass, and would miss weights that are swapped or
        # loaded into the shards: so the root is a second wrapper, without weights.
        self.root = FullyShardedDataParallel(sharded, **options)
        self._modules, self.units, self.frozen = [], [], []
        for module in FullyShardedDataParallel.fsdp_modules(self.root):
            if (flat := flat_parameter(module)) is not None:
                names = [f"{name_of_module[owner]}.{name}".removeprefix(".") for owner, name, _ in tensors_in(flat)]
                self._modules.append(module)
                self.units.append(Unit(flat, names))

    @contextmanager
    def accumulating(self, is_last: bool) -> Iterator[None]:
        waits = self._reduces_once and not is_last
        try:
            with self.root.no_sync() if waits else nullcontext():
                yield
        except BaseException:
            end_failed_pass(self.root, self.parameters())
            raise

    @contextmanager
    def gathered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self._modules:
                stack.enter_context(gathered_unit(module))
            yield

    def _gather(self, unit: Unit, shard: torch.Tensor, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        full = shard.new_empty(shard.numel() * self.mesh.layout.size)
        dist.all_gather_into_tensor(full, shard.contiguous(), group=self.mesh.dp_group)
        for name, start, stop in self._offsets(unit):
            if name in names:
                # The tensor is a copy, so that a reference to it does not keep the whole unit in memory.
                yield name, full[start:stop].view(self.shapes[name]).clone()

    def shard_of(self, unit: Unit, full: FullTensors) -> torch.Tensor:
        size = unit.parameter.numel()
        first = self.mesh.rank * size
        shard: torch.Tensor | None = None
        for name, start, stop in self._offsets(unit):
            tensor = full(name)
            if shard is None:
                shard = tensor.new_zeros(size)  # the padding of the last shard stays 0, so norms are unaffected
            own = slice(max(start, first), min(stop, first + size))
            if own.start < own.stop:
                shard[own.start - first : own.stop - first] = tensor.flatten()[own.start - start : own.stop - start]
        assert shard is not None, "a flat parameter holds at least one tensor"
        return shard

    def _offsets(self, unit: Unit) -> Iterator[tuple[str, int, int]]:
        """Yield name, start and stop of each tensor in the unit's flat parameter."""
        start = 0
        for name in unit.names:
            stop = start + math.prod(self.shapes[name])
            yield name, start, stop
            start = stop


def _materializer(device: torch.device) -> Callable[[nn.Module], None]:
    """Return a function that allocates the tensors of one module; tied tensors stay tied."""
    made: WeakValueDictionary[nn.Parameter, nn.Parameter] = WeakValueDictionary()

    def make(module: nn.Module) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            own = made.get(parameter)
            if own is None:
                own = made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device))
            module.register_parameter(name, own)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)

    return make
