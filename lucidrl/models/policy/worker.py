"""The policy worker: one rank that trains, scores and samples from a language model.

A worker is composed of components, each in a separate module. A worker group calls their methods by path, such as
`checkpoints.begin`. Each subclass chooses a `Sharding`.
"""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.process_group import (
    Layout,
    RankMesh,
    gather_over,
    init_process_group_from_environment,
    leave_process_group,
)
from lucidrl.distributed.workers.place import Place, place_with
from lucidrl.errors import ConfigError
from lucidrl.losses.interfaces import LossFunction
from lucidrl.models.generation.builtin import BuiltinGenerator
from lucidrl.models.generation.interfaces import GenerationDatumSpec, GenerationOutputSpec
from lucidrl.models.optim import PolicyOptimizer
from lucidrl.models.policy.checkpoint import PolicyCheckpoints
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.interfaces import LogprobOutputSpec, ReferenceLogprobOutputSpec, WorkerOptions
from lucidrl.models.policy.introspection import CudaMemory, ProcessMemory
from lucidrl.models.policy.offload import Offload, tensors_of
from lucidrl.models.policy.refit import WeightExport
from lucidrl.models.policy.row_plans import RowPlans
from lucidrl.models.policy.scoring import Scorer
from lucidrl.models.policy.sharding import Sharding, load_sharded, local_shard
from lucidrl.models.policy.training import Training, merged_results
from lucidrl.profiling.recording import Recording
from lucidrl.profiling.spans import span
from lucidrl.utils.config import validate
from lucidrl.utils.device import default_device
from lucidrl.utils.nsys import worker_name
from lucidrl.utils.random_state import random_state, seed_everything, set_random_state
from lucidrl.utils.recorded import Recorded

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
_NUM_SAMPLED_PARAMETERS = 3
_NOISE_STD = 0.01


class PolicyWorker(Recorded, ABC):
    """One rank of a policy.

    A worker started by a worker group or torchrun joins the other ranks; otherwise it is the only rank. Call methods
    that use the model, including methods of the components, on every rank. Data parallel ranks get different rows;
    ranks of a context or tensor parallel group get the same rows.

    Args:
        config: a `PolicyConfig`, or a mapping of its fields.
        tokenizer: saved with the weights.
        weights_path: folder written by `save_checkpoint`; its weights replace those of `config.model_name`.
        optimizer_path: the optimizer folder of the same `save_checkpoint`.
        init_optimizer: if False, the worker scores and evaluates, but does not train.
        init_reference_model: keep the weights of `config.model_name`, not of `weights_path`, as the reference policy.
        **kwargs: fields of `WorkerOptions`.
    """

    def __init__(
        self,
        config: PolicyConfig | Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        **kwargs: Any,
    ):
        options = WorkerOptions(**kwargs)
        self.config = validate(PolicyConfig, config)
        self.tokenizer = tokenizer
        self._world = world = init_process_group_from_environment(options.timeout_s)
        self.rank = world.rank
        self.device = default_device()
        self.mesh = RankMesh(self.layout_of(self.config, world.world_size), self.device)
        if self.mesh.layout.size > 1:  # ranks with the same rows use the same seed
            seed_everything(options.seed, stream=1 + self.mesh.layout.data_rank(self.rank))
        self.sharding = sharding = load_sharded(self.config, self.mesh, options.seed, self._shard, options.role)
        self.model = sharding.model
        self.optimizer: PolicyOptimizer | None = None
        if init_optimizer:
            self.optimizer = PolicyOptimizer(
                sharding.parameters(),
                self.config,
                local_shard,
                sharding.total_norm,
                weights=sharding.weight_infos(),
            )
        self.offload = Offload(sharding, self.optimizer)
        self.row_plans = RowPlans(self.config, self.mesh)
        self.training = Training(sharding, self.row_plans, self.config.max_nonfinite_steps)
        self.scorer = Scorer(sharding, self.row_plans, self.offload, has_reference=init_reference_model)
        gathered_weights = partial(_gathered_weights, self.config, self.offload, sharding)
        self.generator = BuiltinGenerator(self.model, tokenizer, self.config.generation, options.seed, gathered_weights)
        self.checkpoints = PolicyCheckpoints(sharding, self.offload, tokenizer, self.config, options.seed)
        self.export = WeightExport(sharding, self.offload, self.config, world.local_rank)
        self.memory = CudaMemory(self.device) if self.device.type == "cuda" else ProcessMemory()
        self._recording = Recording(worker_name(options.name, self.rank))
        if weights_path is not None:
            self.load_checkpoint(weights_path, optimizer_path)

    @staticmethod
    @abstractmethod
    def layout_of(config: PolicyConfig, world_size: int) -> Layout:
        """Return the layout of `world_size` ranks; raise ConfigError if the worker does not support it."""

    @abstractmethod
    def _shard(self, model: PreTrainedModel) -> Sharding:
        """Shard a model on the meta device over the ranks of `self.mesh`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}[rank={self.rank}]"

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Train on this rank's rows, one optimizer update per global batch. Ranks may have different numbers of rows.

        Args:
            eval_mode: compute losses and metrics only.
            gbs: rows per global batch, over all ranks.
            mbs: rows per micro-batch; by default as configured.

        Returns:
            `global_loss` (per global batch, over all ranks), `grad_norm` (of the last step), `rank`, `all_mb_metrics`
            (metric → values per micro-batch of this rank), `metrics` (over all ranks, reduced as the loss declares)
            and `num_skipped_steps`.
        """
        optimizer = None if eval_mode else self.offload.optimizer_for("train")
        self.offload.check_weights("train")
        rate = self.optimizer.learning_rate if self.optimizer is not None else 0.0
        step = partial(self.training.step, loss_fn=loss_fn, optimizer=optimizer, mbs=mbs)
        self.generator.release_memory()  # callers without a collector have not; training changes the weights
        with span("train"):
            results = list(map(step, self.row_plans.global_batches(data, gbs)))
            if optimizer is not None:
                optimizer.schedule()
            return {"rank": self.rank, **merged_results(results, rate, self.mesh.dp_group)}

    def get_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Return the log-probability of every token; `micro_batch_size` overrides the configured micro-batches."""
        return self.scorer.logprobs(data, micro_batch_size)

    def use_reference_model(self) -> AbstractContextManager[None]:
        """Context in which the worker's model has the reference weights."""
        return self.scorer.reference_swapped_in()

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """`get_logprobs` under the reference policy."""
        scored = self.scorer.logprobs(data, micro_batch_size, of_reference=True)
        return BatchedDataDict({"reference_logprobs": scored["logprobs"]})

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete this rank's prompts with the current weights; see `BuiltinGenerator`."""
        return self.generator.generate(data, greedy)

    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None = None, tokenizer_path: str | None = None
    ) -> None:
        """Write the weights as a Hugging Face folder; write optimizer and tokenizer only if their path is set.

        Replaces folders of an earlier save once the new ones are complete. Returns when all files are on disk.
        """
        self.checkpoints.save(weights_path, optimizer_path, tokenizer_path)

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Load folders of `save_checkpoint`, or any Hugging Face weights; verify all files before the first change."""
        self.generator.release_memory()
        self.checkpoints.load(weights_path, optimizer_path, verify=True)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state that is not in weights or optimizer, as plain values."""
        state: dict[str, Any] = {
            "generator_calls": self.generator.calls,
            "nonfinite_steps_in_a_row": self.training.nonfinite_steps_in_a_row,
        }
        if self.mesh.layout.size > 1:  # a single rank shares the driver's process state
            state["process"] = {"random": random_state(), "num_threads": torch.get_num_threads()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`. If it has no `process` entry, the random state does not change."""
        self.generator.calls = state["generator_calls"]
        self.training.nonfinite_steps_in_a_row = state["nonfinite_steps_in_a_row"]
        if "process" in state:
            set_random_state(state["process"]["random"])

    def shutdown(self) -> None:
        """Stop profiling, free refit memory and leave the process group; may be called twice."""
        with ExitStack() as parts:  # runs all callbacks, last first, even if one raises
            parts.callback(leave_process_group, self._world)
            parts.callback(self.export.close)
            parts.callback(self.stop_gpu_profiling)

    def prepare_weights_for_ipc(self) -> tuple[list[tuple[str, int]], float]:
        """Start a refit; return (name, bytes) of every weight, and the bytes available for buckets."""
        return self.export.prepare_for_ipc()

    def get_weights_ipc_handles(self, keys: Iterable[str]) -> dict[str, Any]:
        """Pack the named weights; return device id → (True, handle). See `WeightExport.ipc_handles`."""
        return self.export.ipc_handles(list(keys))

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Join a weight group with the generators; see `WeightExport.join_collective`."""
        self.export.join_collective(ip, port, world_size)

    def prepare_info_for_collective(self) -> dict[str, Any]:
        """Return name → (shape, dtype) of every weight, in broadcast order."""
        return {info.name: (info.shape, info.dtype) for info in self.export.infos()}

    def broadcast_weights_for_collective(self) -> None:
        """Broadcast all weights to the group of `init_collective`; rank 0 sends, all ranks gather."""
        self.export.broadcast()

    def prepare_for_lp_inference(self) -> None:
        """Reload offloaded weights; the optimizer stays where it is."""
        self.offload.reload_weights()

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Reload weights and optimizer. Arguments are accepted for compatibility and ignored."""
        self.offload.reload_weights()
        self.offload.reload_optimizer()

    def offload_before_refit(self) -> None:
        """Offload the optimizer to host memory and drop gradients; the weights stay for the refit."""
        self.offload.offload_optimizer()

    def offload_after_refit(self) -> None:
        """Offload optimizer and weights to host memory."""
        self.offload.offload_optimizer()
        self.offload.offload_weights()

    def move_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """Move a model's parameters, gradients and buffers to the host or this worker's device; return the model.

        A model on the host cannot be used until it is moved back.
        """
        self.offload.move(tensors_of(model), device)
        return model

    def move_buffer_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """`move_to_device` for buffers only."""
        self.offload.move(model.buffers(), device)
        return model

    def move_to_cuda(self, model: nn.Module) -> nn.Module:
        """`move_to_device` to this worker's device."""
        return self.move_to_device(model, self.device)

    def move_to_cpu(self, model: nn.Module) -> nn.Module:
        """`move_to_device` to the host."""
        return self.move_to_device(model, "cpu")

    def is_alive(self) -> bool:
        """Return True; a liveness check."""
        return True

    def get_gpu_info(self) -> dict[str, Any]:
        """Return `rank`, `world_size`, `device`, `memory_{allocated,reserved,peak,total}_mb` (see `ProcessMemory` for
        CPUs), `environment` (rank variables; None if unset) and `parameter_devices` (of some parameters)."""
        parameters = islice(self.model.model.named_parameters(), _NUM_SAMPLED_PARAMETERS)
        return {
            "rank": self.rank,
            "world_size": self.mesh.layout.size,
            "device": str(self.device),
            **asdict(self.memory.read()),
            "environment": {name: os.environ.get(name) for name in _RANK_VARIABLES},
            "parameter_devices": {name: str(parameter.device) for name, parameter in parameters},
        }

    def reset_peak_memory_stats(self) -> None:
        """Reset the peak that `get_gpu_info` reports."""
        self.memory.reset_peak()

    def report_device_id(self) -> str:
        """Return the id of this worker's device; see `device_id`."""
        return self.export.device_id

    def report_place(self) -> Place:
        """Return the node and device of this worker."""
        return place_with(self.report_device_id())

    def return_state_dict(self) -> dict[str, Any]:
        """Return the model's state dict under Hugging Face names; call it on every rank.

        A single rank returns its tensors, FSDP2 returns DTensors, and FSDP1 gathers full tensors.
        """
        # The root knows how the weights are sharded. It prefixes names with "model.".
        return {name.removeprefix("model."): value for name, value in self.sharding.root.state_dict().items()}

    @torch.no_grad()
    def _add_noise_to_weights(self) -> None:
        """Add N(0, 0.01) to the trainable weights, for tests; call it on every rank.

        The noise depends on rank 0's torch seed only, not on the sharding.
        """
        seed = gather_over(int(torch.randint(1 << 31, ())), self.mesh.world)[0]

        def draw(name: str) -> torch.Tensor:
            # Seeded by name: ranks may draw tensors in a different order. Torch uses 32 bits of the seed.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            return _NOISE_STD * torch.randn(self.sharding.shapes[name], generator=generator)

        for weights, noise in zip(self.sharding.local_weights(), self.sharding.shards_of(draw), strict=True):
            weights.add_(noise.to(weights))
        if self.optimizer is not None:
            self.optimizer.reset_to_model()


@contextmanager
def _gathered_weights(config: PolicyConfig, offload: Offload, sharding: Sharding) -> Iterator[None]:
    """Context of each generator call. It is a function, because a method would make a reference cycle."""
    if config.dtensor_cfg.sequence_parallel:
        raise ConfigError(
            "policy.dtensor_cfg.sequence_parallel=true splits the tokens of a row over ranks, but generation adds one "
            "token at a time; set it to false, or set policy.generation.placement=separate"
        )
    offload.check_weights("generate")
    with sharding.gathered():
        yield
