"""The policy worker on FSDP1 (FullyShardedDataParallel): data parallel. One rank is not wrapped.

FSDP1 lays the weights of a unit end to end in one flat parameter, fills it up to a multiple of the number of ranks, and
gives each rank an equal piece of it. The optimizer and the reference policy work on those pieces.
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

from lucidrl.distributed.mesh import Layout, RankMesh
from lucidrl.errors import ConfigError
from lucidrl.models.fsdp_internals import end_failed_pass, flat_parameter, gathered_unit, tensors_in
from lucidrl.models.loading import decoder_layers
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.policy.config import HALF_PRECISIONS, PolicyConfig
from lucidrl.models.policy.sharding import FullTensors, Sharding, Unit, mixed_precision, with_logprobs
from lucidrl.models.policy.worker import PolicyWorker


class FSDP1PolicyWorker(PolicyWorker):
    """One rank of a policy whose parameters are pieces of flat ones, sharded over all ranks."""

    manual_offload_to_cpu = PolicyWorker.move_to_cpu
    manual_load_to_gpu = PolicyWorker.move_to_cuda

    @staticmethod
    def layout_of(config: PolicyConfig, world_size: int) -> Layout:
        for name in ("tensor_parallel_size", "context_parallel_size"):
            if (size := getattr(config.dtensor_cfg, name)) > 1:
                raise ConfigError(
                    f"policy.dtensor_cfg.{name}={size} with FSDP1, which is data parallel only; "
                    "set it to 1, or policy.dtensor_cfg.enabled=true to use DTensorPolicyWorker"
                )
        return Layout(dp=world_size)

    def _shard(self, model: PreTrainedModel) -> Sharding:
        return FSDP1Sharding(with_logprobs(self.config, model), self.mesh, self.config)


class FSDP1Sharding(Sharding):
    """Each decoder layer is one unit of gathering; embedding, final norm and head are another.

    Args:
        model: its parameters are on the meta device; those of the units are made, without values.
    """

    root: FullyShardedDataParallel

    def __init__(self, model: LogprobModel, mesh: RankMesh, config: PolicyConfig):
        super().__init__(model, mesh)
        self.gradient_scale = float(mesh.layout.size)
        # A CPU's weights are in host memory anyway.
        offloads = config.dtensor_cfg.cpu_offload and mesh.device.type != "cpu"
        # Gradients that wait for the last micro-batch add up in the dtype of the backward pass. In half precision they
        # are better exchanged each time, and added up in float32; FSDP1 cannot do that with gradients on the host.
        self._exchanges_once = config.precision not in HALF_PRECISIONS or offloads
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
            param_init_fn=_maker_of_tensors(mesh.device),
            **options,
        )
        # FSDP1 keeps the weights of its root gathered after a forward pass, and would not see what is then swapped or
        # loaded into the pieces: so the root is a second shell, without weights.
        self.root = FullyShardedDataParallel(sharded, **options)
        self._modules, self.units = [], []
        for module in FullyShardedDataParallel.fsdp_modules(self.root):
            if (flat := flat_parameter(module)) is not None:
                names = [f"{name_of_module[owner]}.{name}".removeprefix(".") for owner, name, _ in tensors_in(flat)]
                self._modules.append(module)
                self.units.append(Unit(flat, names))

    @contextmanager
    def accumulating(self, is_last: bool) -> Iterator[None]:
        waits = self._exchanges_once and not is_last
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

    def _gather(self, unit: Unit, part: torch.Tensor, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        whole = part.new_empty(part.numel() * self.mesh.layout.size)
        dist.all_gather_into_tensor(whole, part.contiguous(), group=self.mesh.dp_group)
        for name, start, stop in self._places(unit):
            if name in names:
                # A copy: who keeps one tensor should not keep the whole unit.
                yield name, whole[start:stop].view(self.shapes[name]).clone()

    def part_of(self, unit: Unit, full: FullTensors) -> torch.Tensor:
        size = unit.parameter.numel()
        first = self.mesh.rank * size
        part: torch.Tensor | None = None
        for name, start, stop in self._places(unit):
            tensor = full(name)
            if part is None:
                part = tensor.new_zeros(size)  # what fills up the last piece stays 0, also in norms
            own = slice(max(start, first), min(stop, first + size))
            if own.start < own.stop:
                part[own.start - first : own.stop - first] = tensor.flatten()[own.start - start : own.stop - start]
        assert part is not None, "FSDP1 makes no flat parameter of nothing"
        return part

    def _places(self, unit: Unit) -> Iterator[tuple[str, int, int]]:
        """Where the tensors of a unit begin and end in its flat parameter."""
        start = 0
        for name in unit.names:
            stop = start + math.prod(self.shapes[name])
            yield name, start, stop
            start = stop


def _maker_of_tensors(device: torch.device) -> Callable[[nn.Module], None]:
    """A function that gives the tensors of one module memory; what is tied stays tied."""
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
