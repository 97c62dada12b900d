"""A model sharded by FSDP2 over data and context parallel ranks, on top of tensor parallelism."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lucidrl.distributed.mesh import RankMesh
from lucidrl.models.loading import decoder_layers
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.policy.sharding import FullTensors, Sharding, norm_over_ranks


@contextmanager
def unshard_fsdp2_model(model: nn.Module) -> Generator[None, None, None]:
    """Gather the parameters of all FSDP2 modules; sharded again afterwards, also on an exception.

    Inside, the modules may be called in parts: forward passes leave the parameters gathered.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    # What a forward pass does with the parameters when it is through; `set_reshard_after_forward` cannot be read back.
    settings = [group.post_forward_mesh_info for group in groups]
    try:
        for group in groups:
            group.post_forward_mesh_info = None
        for module in modules:
            module.unshard()
        yield
    except BaseException:
        for module in modules:
            if module._get_fsdp_state()._is_root:
                module.reset_iter_state()  # a forward pass that was cut short would not let go of its parameters
        raise
    finally:
        for module in modules:
            module.reshard()
        for group, setting in zip(groups, settings, strict=True):
            group.post_forward_mesh_info = setting


def get_cpu_state_dict(
    state_generator: Iterable[tuple[str, torch.Tensor | DTensor]], pin_memory: bool = False
) -> dict[str, torch.Tensor]:
    """Copies of this rank's parts in CPU memory; nothing is shared with what they were made from.

    Args:
        pin_memory: for fast copies to a GPU. Where there is none, memory is as it always is.
    """
    pin_memory = pin_memory and torch.cuda.is_available()
    copies = {}
    for name, tensor in state_generator:
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        copy = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=pin_memory)
        copies[name] = copy.copy_(part.detach(), non_blocking=pin_memory)
    if pin_memory:
        torch.cuda.synchronize()
    return copies


def offload_policy(device: torch.device) -> CPUOffloadPolicy:
    """Weights wait in host memory: pinned where they travel to a GPU, so that copies overlap with computing."""
    return CPUOffloadPolicy(pin_memory=device.type == "cuda")


class FSDP2Sharding(Sharding):
    """Each decoder layer is one unit of gathering; embedding, final norm and head are the root's.

    Args:
        model: its parameters are sharded in place. They may be on the meta device.
        compute_dtype: what forward and backward run in; parameters and gradients are exchanged and kept as they are.
    """

    def __init__(self, model: LogprobModel, mesh: RankMesh, compute_dtype: torch.dtype, cpu_offload: bool = False):
        self.model = self.root = model
        self.mesh = mesh
        dtype = next(model.parameters()).dtype
        options: dict[str, Any] = {
            "mesh": mesh.sharding_mesh,
            # Also at the root: what is swapped or loaded into the shards must be what the next pass gathers.
            "reshard_after_forward": True,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=compute_dtype if compute_dtype != dtype else None,
                reduce_dtype=dtype if compute_dtype != dtype else None,
                cast_forward_inputs=False,
            ),
            "offload_policy": offload_policy(mesh.device) if cpu_offload else OffloadPolicy(),
        }
        for layer in decoder_layers(model.model):
            fully_shard(layer, **options)
        fully_shard(model, **options)
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            # Losses are normalised by global counts: gradients are added up, and plainly, which every back end can.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        assert isinstance(tensor, DTensor)
        return tensor.to_local()

    @contextmanager
    def accumulating(self, is_last: bool) -> Iterator[None]:
        for module in self._modules:
            module.set_requires_gradient_sync(is_last, recurse=False)
            module.set_is_last_backward(is_last)
        try:
            yield
        except BaseException:
            self._forget_pass()
            raise

    def total_norm(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        parameters = self.parameters()
        # What tensor parallel ranks hold copies of counts once.
        copies = [1 if _is_tensor_parallel(parameter) else self.mesh.layout.tp for parameter in parameters]
        return norm_over_ranks(gradients, copies, self.local(parameters[0]).device, self.mesh.world)

    def gathered(self) -> AbstractContextManager[None]:
        return unshard_fsdp2_model(self.model)

    def full_tensors(
        self, parts: Sequence[torch.Tensor], names: Collection[str] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for (name, parameter), part in zip(self._named_parameters(), parts, strict=True):
            if names is not None and name not in names:
                continue
            whole = DTensor.from_local(
                part.to(dtype or part.dtype),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            yield name, whole.full_tensor()

    def gather_order(self) -> list[str]:
        return list(self.shapes())

    def parts_of(self, full: FullTensors) -> Iterator[torch.Tensor]:
        for name, parameter in self._named_parameters():
            shape, start = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            yield full(name)[tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))]

    def shapes(self) -> dict[str, list[int]]:
        return {name: list(parameter.shape) for name, parameter in self._named_parameters()}

    def _forget_pass(self) -> None:
        """Leave nothing of a pass that failed, nor of the micro-batches before it."""
        self._modules[0].reset_iter_state()  # of the root, and all below it
        # Gradients that wait for the last micro-batch are kept with the gathered weights, where no optimizer sees them.
        for module in self._modules:
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    parameter._unsharded_param.grad = None

    def _named_parameters(self) -> Iterator[tuple[str, DTensor]]:
        for name, parameter in self.model.model.named_parameters():
            if parameter.requires_grad:
                assert isinstance(parameter, DTensor)
                yield name, parameter


def _is_tensor_parallel(parameter: nn.Parameter) -> bool:
    """Whether tensor parallel ranks hold different parts of it."""
    assert isinstance(parameter, DTensor)
    # One axis is FSDP's. The other, if there is one, may also replicate (norms within attention heads).
    return len(parameter.placements) == 2 and parameter.placements[1].is_shard()
