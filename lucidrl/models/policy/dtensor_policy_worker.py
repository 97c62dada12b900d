"""The policy worker on FSDP2 and DTensor: data, context, tensor and sequence parallel. A single rank is not wrapped."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lucidrl.distributed.process_group import Layout, RankMesh
from lucidrl.models import context_parallel
from lucidrl.models.context_parallel import ContextParallel
from lucidrl.models.fsdp_internals import (
    drop_waiting_gradients,
    kept_after_forward,
    part_of_whole,
    reset_roots,
    time_collectives,
)
from lucidrl.models.loading import decoder_layers
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.lora import add_adapters
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.sharding import (
    FullTensors,
    Sharding,
    Unit,
    local_shard,
    materialize,
    mixed_precision,
    with_logprobs,
)
from lucidrl.models.policy.worker import PolicyWorker
from lucidrl.models.tensor_parallel import apply_tensor_parallel


class DTensorPolicyWorker(PolicyWorker):
    """One rank of a policy with DTensor parameters, sharded over data and context parallel ranks."""

    create_context_parallel_ctx = staticmethod(context_parallel.create_context_parallel_ctx)
    train_context = staticmethod(context_parallel.train_context)

    @staticmethod
    def layout_of(config: PolicyConfig, world_size: int) -> Layout:
        parallel = config.dtensor_cfg
        return Layout.of_world(world_size, parallel.context_parallel_size, parallel.tensor_parallel_size)

    def _shard(self, model: PreTrainedModel) -> Sharding:
        parallel, mesh = self.config.dtensor_cfg, self.mesh
        if mesh.layout.tp > 1:
            apply_tensor_parallel(
                model,
                mesh.tp_mesh,
                sequence_parallel=parallel.sequence_parallel,
                custom_plan=parallel.custom_parallel_plan,
            )
        if self.config.lora is not None:
            add_adapters(model, self.config.lora)
        scorer = with_logprobs(
            self.config,
            model,
            tp_group=mesh.tp_group,
            context=ContextParallel(mesh.cp_group) if mesh.cp_group is not None else None,
            length_multiple=mesh.layout.tp if parallel.sequence_parallel else 1,
        )
        return FSDP2Sharding(scorer, mesh, self.config)


@contextmanager
def unshard_fsdp2_model(model: nn.Module) -> Generator[None, None, None]:
    """Context in which all FSDP2 modules are unsharded; they are resharded on exit, even after an exception.

    Submodules can be called directly: forward passes do not reshard.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    with kept_after_forward(modules):
        try:
            for module in modules:
                module.unshard()
            yield
        except BaseException:
            reset_roots(modules)
            raise
        finally:
            for module in modules:
                module.reshard()


def get_cpu_state_dict(
    state_generator: Iterable[tuple[str, torch.Tensor | DTensor]], pin_memory: bool = False
) -> dict[str, torch.Tensor]:
    """Copy this rank's shards to CPU memory.

    Args:
        pin_memory: pin the copies, for fast transfers to a GPU; ignored without a GPU.
    """
    pin_memory = pin_memory and torch.cuda.is_available()
    copies = {}
    for name, tensor in state_generator:
        shard = local_shard(tensor)
        copy = torch.empty(shard.shape, dtype=shard.dtype, device="cpu", pin_memory=pin_memory)
        copies[name] = copy.copy_(shard.detach(), non_blocking=pin_memory)
    if pin_memory:
        torch.cuda.synchronize()
    return copies


def offload_policy(device: torch.device) -> CPUOffloadPolicy:
    """Return the FSDP2 option to keep weights in host memory; pinned if the device is a GPU, so that copies overlap
    with computation."""
    return CPUOffloadPolicy(pin_memory=device.type == "cuda")


class FSDP2Sharding(Sharding):
    """Shards each decoder layer separately; embedding, final norm and head belong to the root.

    Args:
        model: must be on the meta device. It is sharded in place; the shards are allocated uninitialised, so load the
            weights afterwards.
    """

    def __init__(self, model: LogprobModel, mesh: RankMesh, config: PolicyConfig):
        super().__init__(model, mesh)
        self.root = model
        offloads = config.dtensor_cfg.cpu_offload
        options: dict[str, Any] = {
            "mesh": mesh.sharding_mesh,
            # True at the root too: the next forward pass must gather weights that were swapped or loaded in between.
            "reshard_after_forward": True,
            "mp_policy": MixedPrecisionPolicy(**mixed_precision(model, config)),
            "offload_policy": offload_policy(mesh.device) if offloads else OffloadPolicy(),
        }
        for layer in decoder_layers(model.model):
            fully_shard(layer, **options)
        fully_shard(model, **options)
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            # Losses are normalised by global counts, so gradients are summed. Gloo has no other reduction.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        time_collectives(self._modules)
        materialize(model.model, torch.device("cpu") if offloads else mesh.device, mesh.device)
        self._set_unit_per_parameter()

    @contextmanager
    def accumulating(self, is_last: bool) -> Iterator[None]:
        for module in self._modules:
            module.set_requires_gradient_sync(is_last, recurse=False)
            module.set_is_last_backward(is_last)
        try:
            yield
        except BaseException:  # drop all state of this pass and of earlier micro-batches
            self._modules[0].reset_iter_state()  # the root resets all modules below it
            drop_waiting_gradients(self._modules)
            raise

    def gathered(self) -> AbstractContextManager[None]:
        return unshard_fsdp2_model(self.model)

    def _gather(self, unit: Unit, shard: torch.Tensor, names: Sequence[str]) -> Iterable[tuple[str, torch.Tensor]]:
        parameter = unit.parameter
        assert isinstance(parameter, DTensor)
        full = DTensor.from_local(
            shard,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return [(names[0], full.full_tensor())]

    def shard_of(self, unit: Unit, full: FullTensors) -> torch.Tensor:
        assert isinstance(unit.parameter, DTensor)
        return full(unit.names[0])[part_of_whole(unit.parameter)]
