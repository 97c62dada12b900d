"""The policy worker on FSDP1 (FullyShardedDataParallel): data parallel. One rank is not wrapped."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from lucidrl.distributed.mesh import Layout
from lucidrl.errors import ConfigError
from lucidrl.models.loading import DTYPES
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.fsdp1 import FSDP1Sharding
from lucidrl.models.policy.model_on_ranks import with_logprobs
from lucidrl.models.policy.sharding import Sharding
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
        return self.move_to_cpu(model)

    def manual_load_to_gpu(self, model: nn.Module) -> nn.Module:
        """Undo `manual_offload_to_cpu`; returns the model."""
        return self.move_to_cuda(model)

    def _shard(self, model: PreTrainedModel) -> Sharding:
        dtype, offloads = DTYPES[self.config.precision], self.config.dtensor_cfg.cpu_offload
        return FSDP1Sharding(with_logprobs(self.config, model), self.mesh, self.device, dtype, offloads)
