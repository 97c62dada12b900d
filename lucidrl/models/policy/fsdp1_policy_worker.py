"""The policy worker on FSDP1 (FullyShardedDataParallel): data parallel. One rank is not wrapped.

FSDP1 lays the weights of a unit end to end in one flat parameter, fills it up to a multiple of the number of ranks, and
gives each rank an equal piece of it. The optimizer and the reference policy work on those pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
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
from lucidrl.models.loading import DTYPES, decoder_layers
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.sharding import FullTensors, Sharding, norm_over_ranks, with_logprobs
from lucidrl.models.policy.worker import PolicyWorker


class FSDP1PolicyWorker(PolicyWorker):
    """One rank of a policy whose parameters are pieces of flat ones, sharded over all ranks."""

    @staticmethod
    def layout_of(config: PolicyConfig, world_size: int) -> Layout:
        parallel = config.dtensor_cfg
        for name, size in (
            ("tensor_parallel_size", parallel.tensor_parallel_size),
            ("context_parallel_size", parallel.context_parallel_size),
        ):
            if size > 1:
                raise ConfigError(
                    f"policy.dtensor_cfg.{name}={size} with FSDP1, which is data parallel only; "
                    "set it to 1, or policy.dtensor_cfg.enabled=true to use DTensorPolicyWorker"
                )
        return Layout(dp=world_size)

    def manual_offload_to_cpu(self, model: nn.Module) -> nn.Module:
        """Move a model's parameters, gradients and buffers from the accelerator to host memory; returns the model.

        It cannot be used until `manual_load_to_gpu`. On a CPU everything is in host memory and stays as it is.
        """
        return self.move_to_cpu(model)

    def manual_load_to_gpu(self, model: nn.Module) -> nn.Module:
        """Undo `manual_offload_to_cpu`; returns the model."""
        return self.move_to_cuda(model)

    def _shard(self, model: PreTrainedModel) -> Sharding:
        dtype, offloads = DTYPES[self.config.precision], self.config.dtensor_cfg.cpu_offload
        return FSDP1Sharding(with_logprobs(self.config, model), self.mesh, self.device, dtype, offloads)


@dataclass(frozen=True)
class _Slot:
    """Where a tensor of the model lies in a flat parameter."""

    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class _Unit:
    """What is gathered together."""

    module: FullyShardedDataParallel
    parameter: nn.Parameter
    """This rank's piece of the flat parameter."""
    slots: list[_Slot]


class FSDP1Sharding(Sharding):
    """Each decoder layer is one unit of gathering; embedding, final norm and head are another.

    Args:
        model: its parameters are on the meta device; those of the units are made, without values, on `device`.
        device: what this rank computes on.
        compute_dtype: what forward and backward run in; parameters are kept, and gradients exchanged, as they are.
    """

    root: FullyShardedDataParallel

    def __init__(
        self,
        model: LogprobModel,
        mesh: RankMesh,
        device: torch.device,
        compute_dtype: torch.dtype,
        cpu_offload: bool = False,
    ):
        self.model = model
        self.mesh = mesh
        self.gradient_scale = float(mesh.layout.size)
        # A CPU's weights are in host memory anyway.
        offloads = cpu_offload and device.type != "cpu"
        dtype = next(model.parameters()).dtype
        # Gradients that wait for the last micro-batch add up in the dtype of the backward pass. In half precision they
        # are better exchanged each time, and added up in float32; FSDP1 cannot do that with gradients on the host.
        self._exchanges_once = compute_dtype == dtype or offloads
        self._shapes = {name: list(parameter.shape) for name, parameter in model.model.named_parameters()}
        name_of_module = {module: name for name, module in model.model.named_modules()}
        layers = set(decoder_layers(model.model))
        options: dict[str, Any] = {
            "process_group": mesh.dp_group,
            "device_id": device,
            "mixed_precision": MixedPrecision(
                param_dtype=compute_dtype if compute_dtype != dtype else None,
                reduce_dtype=dtype if compute_dtype != dtype else None,
                cast_forward_inputs=False,
                cast_root_forward_inputs=False,
            ),
            "cpu_offload": CPUOffload(offload_params=offloads),
        }
        sharded = FullyShardedDataParallel(
            model,
            auto_wrap_policy=CustomPolicy(lambda module: module in layers),
            param_init_fn=_maker_of_tensors(device),
            **options,
        )
        # FSDP1 keeps the weights of its root gathered after a forward pass, and would not see what is then swapped or
        # loaded into the pieces: so the root is a second shell, without weights.
        self.root = FullyShardedDataParallel(sharded, **options)
        self._units = [
            _Unit(module, flat, _slots(flat, name_of_module))
            for module in FullyShardedDataParallel.fsdp_modules(self.root)
            if (flat := flat_parameter(module)) is not None
        ]

    def parameters(self) -> list[nn.Parameter]:
        return [unit.parameter for unit in self._units]

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @contextmanager
    def accumulating(self, is_last: bool) -> Iterator[None]:
        waits = self._exchanges_once and not is_last
        try:
            with self.root.no_sync() if waits else nullcontext():
                yield
        except BaseException:
            end_failed_pass(self.root, self.parameters())
            raise

    def total_norm(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        # What fills up the last piece is 0.
        return norm_over_ranks(gradients, [1] * len(gradients), self._units[0].parameter.device, self.mesh.world)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for unit in self._units:
                stack.enter_context(gathered_unit(unit.module))
            yield

    def full_tensors(
        self, parts: Sequence[torch.Tensor], names: Collection[str] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for unit, part in zip(self._units, parts, strict=True):
            slots = [slot for slot in unit.slots if names is None or slot.name in names]
            if not slots:
                continue
            part = part.to(dtype or part.dtype).contiguous()
            whole = part.new_empty(part.numel() * self.mesh.layout.size)
            dist.all_gather_into_tensor(whole, part, group=self.mesh.dp_group)
            for slot in slots:
                # A copy: who keeps one tensor should not keep the whole unit.
                yield slot.name, whole[slot.start : slot.stop].view(slot.shape).clone()

    def gather_order(self) -> list[str]:
        return [slot.name for unit in self._units for slot in unit.slots]

    def parts_of(self, full: FullTensors) -> Iterator[torch.Tensor]:
        for unit in self._units:
            size = unit.parameter.numel()
            first = self.mesh.rank * size
            part: torch.Tensor | None = None
            for slot in unit.slots:
                tensor = full(slot.name)
                if part is None:
                    part = tensor.new_zeros(size)
                start, stop = max(slot.start, first), min(slot.stop, first + size)
                if start < stop:
                    part[start - first : stop - first] = tensor.flatten()[start - slot.start : stop - slot.start]
            assert part is not None, "FSDP1 makes no flat parameter of nothing"
            yield part

    def shapes(self) -> dict[str, list[int]]:
        return dict(self._shapes)


def _slots(flat: nn.Parameter, name_of_module: dict[nn.Module, str]) -> list[_Slot]:
    """The tensors in a flat parameter, in their order; of tied ones the first."""
    slots: list[_Slot] = []
    for module, own_name, shape in tensors_in(flat):
        name = f"{name_of_module[module]}.{own_name}".removeprefix(".")
        slots.append(_Slot(name, shape, slots[-1].stop if slots else 0))
    return slots


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
