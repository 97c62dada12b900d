"""The policy worker on FSDP1 (FullyShardedDataParallel): data parallel. One rank is not wrapped."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedModel

from lucidrl.distributed.mesh import Layout
from lucidrl.errors import ConfigError
from lucidrl.models.activation_checkpointing import checkpoint_activations
from lucidrl.models.loading import DTYPES, empty_model, load_model
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.policy.config import HALF_PRECISIONS, PolicyConfig
from lucidrl.models.policy.fill import fill_from_rank_0
from lucidrl.models.policy.fsdp1 import FSDP1Sharding
from lucidrl.models.policy.offload import HostMemory
from lucidrl.models.policy.sharding import Sharding, Unsharded
from lucidrl.models.policy.worker import PolicyWorker

__all__ = ["FSDP1PolicyWorker"]


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
        if self.device.type != "cpu":
            self._host_memory.put_away(_tensors_of(model))
            torch.cuda.empty_cache()  # others on this device are to have it
        return model

    def manual_load_to_gpu(self, model: nn.Module) -> nn.Module:
        """Undo `manual_offload_to_cpu`; returns the model."""
        self._host_memory.bring_back(_tensors_of(model))
        return model

    @cached_property
    def _host_memory(self) -> HostMemory:
        return HostMemory()

    def _load_sharded(self, seed: int) -> Sharding:
        config = self.config
        name, trust = config.model_name, config.trust_remote_code
        if self.mesh.layout.size == 1:
            model = load_model(name, DTYPES[config.precision], seed=seed, trust_remote_code=trust)
            return Unsharded(self._with_logprobs(model).to(self.device), self.mesh)
        # Flat parameters are the optimizer's float32 weights; layers compute with a rounded copy of them.
        dtype = torch.float32 if config.precision in HALF_PRECISIONS else DTYPES[config.precision]
        source = load_model(name, dtype, seed=seed, trust_remote_code=trust) if self.rank == 0 else None
        sharding = FSDP1Sharding(
            self._with_logprobs(empty_model(name, dtype, trust)),
            self.mesh,
            self.device,
            DTYPES[config.precision],
            config.dtensor_cfg.cpu_offload,
        )
        fill_from_rank_0(sharding, source)
        return sharding

    def _with_logprobs(self, model: PreTrainedModel) -> LogprobModel:
        """The module that is sharded. In evaluation mode, also in training: with dropout, the policy that is trained
        would be another one than the policy that sampled and scored."""
        if self.config.dtensor_cfg.activation_checkpointing:
            checkpoint_activations(model)
        return LogprobModel(model.eval(), self.config.generation.temperature, self.config.recompute_head)


def _tensors_of(model: nn.Module) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [*parameters, *gradients, *model.buffers()]
