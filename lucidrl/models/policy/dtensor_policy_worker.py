"""The policy worker on FSDP2 and DTensor: data, context, tensor and sequence parallel. One rank is not wrapped."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lucidrl.distributed.mesh import Layout
from lucidrl.models import context_parallel
from lucidrl.models.activation_checkpointing import checkpoint_activations
from lucidrl.models.context_parallel import ContextParallel
from lucidrl.models.loading import DTYPES, empty_model, load_model
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.policy.config import HALF_PRECISIONS, PolicyConfig
from lucidrl.models.policy.fill import fill_from_rank_0
from lucidrl.models.policy.fsdp2 import FSDP2Sharding, get_cpu_state_dict, unshard_fsdp2_model
from lucidrl.models.policy.sharding import Sharding, Unsharded
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

    def _load_sharded(self, seed: int) -> Sharding:
        config = self.config
        name, trust = config.model_name, config.trust_remote_code
        if self.mesh.layout.size == 1:
            model = load_model(name, DTYPES[config.precision], seed=seed, trust_remote_code=trust).to(self.device)
            return Unsharded(self._with_logprobs(model), self.mesh)
        # Sharded parameters are the optimizer's float32 weights; layers compute with a rounded copy of them.
        dtype = torch.float32 if config.precision in HALF_PRECISIONS else DTYPES[config.precision]
        source = load_model(name, dtype, seed=seed, trust_remote_code=trust) if self.rank == 0 else None
        model = empty_model(name, dtype, trust)
        if self.mesh.layout.tp > 1:
            parallel = config.dtensor_cfg
            apply_tensor_parallel(
                model,
                self.mesh.tp_mesh,
                sequence_parallel=parallel.sequence_parallel,
                custom_plan=parallel.custom_parallel_plan,
            )
        sharding = FSDP2Sharding(
            self._with_logprobs(model), self.mesh, DTYPES[config.precision], config.dtensor_cfg.cpu_offload
        )
        model.to_empty(device="cpu" if config.dtensor_cfg.cpu_offload else self.device)
        fill_from_rank_0(sharding, source)
        return sharding

    def _with_logprobs(self, model: PreTrainedModel) -> LogprobModel:
        """The module that is sharded. In evaluation mode, also in training: with dropout, the policy that is trained
        would be another one than the policy that sampled and scored."""
        config, mesh = self.config, self.mesh
        if config.dtensor_cfg.activation_checkpointing:
            checkpoint_activations(model)
        return LogprobModel(
            model.eval(),
            config.generation.temperature,
            config.recompute_head,
            tp_group=mesh.tp_group,
            context=ContextParallel(mesh.cp_group) if mesh.cp_group is not None else None,
            length_multiple=mesh.layout.tp if config.dtensor_cfg.sequence_parallel else 1,
        )
