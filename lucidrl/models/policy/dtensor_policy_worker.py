"""The policy worker on FSDP2 and DTensor: data, context, tensor and sequence parallel. One rank is not wrapped."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lucidrl.distributed.mesh import Layout
from lucidrl.models import context_parallel
from lucidrl.models.context_parallel import ContextParallel
from lucidrl.models.loading import DTYPES
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.fsdp2 import FSDP2Sharding, get_cpu_state_dict, unshard_fsdp2_model
from lucidrl.models.policy.model_on_ranks import give_memory, with_logprobs
from lucidrl.models.policy.sharding import Sharding
from lucidrl.models.policy.worker import PolicyWorker
from lucidrl.models.tensor_parallel import apply_tensor_parallel

__all__ = ["DTensorPolicyWorker", "get_cpu_state_dict", "unshard_fsdp2_model"]


class DTensorPolicyWorker(PolicyWorker):
    """One rank of a policy whose parameters are DTensors, sharded over data and context parallel ranks."""

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
        scorer = with_logprobs(
            self.config,
            model,
            tp_group=mesh.tp_group,
            context=ContextParallel(mesh.cp_group) if mesh.cp_group is not None else None,
            length_multiple=mesh.layout.tp if parallel.sequence_parallel else 1,
        )
        sharding = FSDP2Sharding(scorer, mesh, DTYPES[self.config.precision], parallel.cpu_offload)
        give_memory(model, torch.device("cpu") if parallel.cpu_offload else self.device, self.device)
        return sharding
