"""The policy worker: trains, scores and samples from one language model, alone or as one of many ranks.

It is composed of parts, each in a module of its own; a worker group calls them as `checkpoints.begin`. How the model
lies over the ranks is up to a `Sharding`, which each documented class chooses.
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
from lucidrl.distributed.collectives import gather_over
from lucidrl.distributed.mesh import Layout, RankMesh
from lucidrl.distributed.process_group import init_process_group_from_environment, leave_process_group
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
from lucidrl.models.policy.sharding import Sharding, load_sharded, local_part
from lucidrl.models.policy.training import Training, merged_outcomes
from lucidrl.profiling.recording import Recording
from lucidrl.profiling.spans import span
from lucidrl.utils.config import validate
from lucidrl.utils.device import default_device
from lucidrl.utils.nsys import POLICY, is_recorded, worker_name
from lucidrl.utils.random_state import random_state, seed_everything, set_random_state

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
_NUM_SAMPLED_PARAMETERS = 3
_NOISE_STD = 0.01


class PolicyWorker(ABC):
    """One rank of a policy.

    Started by a worker group or by torchrun it joins the other ranks; otherwise it is the only one. Methods that work
    on the model are to be called on every rank, each with its own rows (those of a context or tensor parallel group
    with the same), and so are those of its parts: `checkpoints`, `generator`, `scorer`, `training`, `export`.

    Args:
        config: a `PolicyConfig`, or a mapping of its fields.
        tokenizer: saved beside the weights.
        weights_path: folder written by `save_checkpoint`, to start from instead of the model's own weights.
        optimizer_path: the optimizer's folder that goes with them.
        init_optimizer: without one the worker scores and evaluates, but does not train.
        init_reference_model: keep the weights of the model as loaded, before any checkpoint, as the reference policy.
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
        if self.mesh.layout.size > 1:  # ranks that work on the same rows draw the same
            seed_everything(options.seed, stream=1 + self.mesh.layout.data_rank(self.rank))
        self.sharding = sharding = load_sharded(self.config, self.mesh, options.seed, self._shard)
        self.model = sharding.model
        self.optimizer: PolicyOptimizer | None = None
        if init_optimizer:
            self.optimizer = PolicyOptimizer(sharding.parameters(), self.config, local_part, sharding.total_norm)
        self.offload = Offload(sharding, self.optimizer)
        self.row_plans = RowPlans(self.config, self.mesh)
        self.training = Training(sharding, self.row_plans, self.config.max_nonfinite_steps)
        self.scorer = Scorer(sharding, self.row_plans, self.offload, has_reference=init_reference_model)
        whole_weights = partial(_whole_weights, self.config, self.offload, sharding)
        self.generator = BuiltinGenerator(self.model, tokenizer, self.config.generation, options.seed, whole_weights)
        self.checkpoints = PolicyCheckpoints(sharding, self.offload, tokenizer, self.config.precision)
        self.export = WeightExport(sharding, self.offload, self.config, world.local_rank)
        self.memory = CudaMemory(self.device) if self.device.type == "cuda" else ProcessMemory()
        self._recording = Recording(worker_name(POLICY, self.rank))
        if weights_path is not None:
            self.load_checkpoint(weights_path, optimizer_path)

    @staticmethod
    @abstractmethod
    def layout_of(config: PolicyConfig, world_size: int) -> Layout:
        """How this kind of worker arranges so many ranks; refused with a sentence if it cannot."""

    @abstractmethod
    def _shard(self, model: PreTrainedModel) -> Sharding:
        """Lay a model without weights over the ranks of `self.mesh`, of which there are several."""

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
        """Walk this rank's rows in global batches of `gbs` rows over all ranks, one optimizer step each.

        In `eval_mode` nothing changes but the numbers returned. Ranks may have different numbers of rows, also none.
        Micro-batches are as configured or, given `mbs`, of that many rows.

        Returns:
            `global_loss` (one value per global batch, of all ranks), `grad_norm` (of the last one), `rank`,
            `all_mb_metrics` (metric → one value per micro-batch of this rank), `metrics` (of all ranks, reduced as the
            loss declared) and `num_skipped_steps`.
        """
        optimizer = None if eval_mode else self.offload.optimizer_for("train")
        self.offload.check_weights("train")
        rate = self.optimizer.learning_rate if self.optimizer is not None else 0.0
        step = partial(self.training.step, loss_fn=loss_fn, optimizer=optimizer, mbs=mbs)
        with span("train"):
            outcomes = list(map(step, self.row_plans.global_batches(data, gbs)))
            if optimizer is not None:
                optimizer.schedule()
            return {"rank": self.rank, **merged_outcomes(outcomes, rate, self.mesh.dp_group)}

    def get_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Score every token of every row; leaves the model as it was.

        Micro-batches are as configured or, given `micro_batch_size`, of that many rows.
        """
        return self.scorer.logprobs(data, micro_batch_size)

    def use_reference_model(self) -> AbstractContextManager[None]:
        """Inside, the worker's model is the reference policy."""
        return self.scorer.reference_swapped_in()

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """`get_logprobs` of the reference policy."""
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
        """Write the weights as a Hugging Face folder, and optimizer and tokenizer where a path is given.

        Folders saved before are replaced when the new ones are complete. Returns when all is on disk.
        """
        self.checkpoints.save(weights_path, optimizer_path, tokenizer_path)

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Take what `save_checkpoint` wrote, or weights from any Hugging Face folder: verified, and all or nothing."""
        self.checkpoints.load(weights_path, optimizer_path, verify=True)

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps over a run that no checkpoint of tensors holds, as plain values."""
        state: dict[str, Any] = {
            "generator_calls": self.generator.calls,
            "nonfinite_steps_in_a_row": self.training.nonfinite_steps_in_a_row,
        }
        if self.mesh.layout.size > 1:  # a single rank is part of the driver's process, which keeps its own
            state["process"] = {"random": random_state(), "num_threads": torch.get_num_threads()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; without `process`, the random state stays as it is."""
        self.generator.calls = state["generator_calls"]
        self.training.nonfinite_steps_in_a_row = state["nonfinite_steps_in_a_row"]
        if "process" in state:
            set_random_state(state["process"]["random"])

    def shutdown(self) -> None:
        """Stop profiling and leave the other ranks; may be called twice."""
        with ExitStack() as parts:  # all of them, in this order backwards, whatever one of them raises
            parts.callback(leave_process_group, self._world)
            parts.callback(self.export.close)
            parts.callback(self.stop_gpu_profiling)

    def prepare_weights_for_ipc(self) -> tuple[list[tuple[str, int]], float]:
        """Name and bytes of every weight, and the free bytes that buckets of them may take."""
        return self.export.prepare_for_ipc()

    def get_weights_ipc_handles(self, keys: Iterable[str]) -> dict[str, Any]:
        """Id of a device → (True, where it finds the named weights, packed); see `WeightExport.ipc_handles`."""
        return self.export.ipc_handles(list(keys))

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Form a group with generators, to send them weights; see `WeightExport.join_collective`."""
        self.export.join_collective(ip, port, world_size)

    def prepare_info_for_collective(self) -> dict[str, Any]:
        """Name → (shape, dtype) of every weight, in the order in which they are sent."""
        return self.export.info_for_collective()

    def broadcast_weights_for_collective(self) -> None:
        """Send all weights to the group of `init_collective`; rank 0 sends, the others help it to gather."""
        self.export.broadcast()

    def prepare_for_lp_inference(self) -> None:
        """Bring back the weights, if they are away; the optimizer stays where it is."""
        self.offload.bring_weights_back()

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Bring back everything that is away. Arguments are taken for compatibility, and none has a meaning."""
        self.offload.bring_weights_back()
        self.offload.bring_optimizer_back()

    def offload_before_refit(self) -> None:
        """Put the optimizer into host memory and drop gradients: what is left on the device is needed to refit."""
        self.offload.put_optimizer_away()

    def offload_after_refit(self) -> None:
        """Put the weights away too; nothing of the policy is left on the device."""
        self.offload.put_optimizer_away()
        self.offload.put_weights_away()

    def move_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """Move a model's parameters, gradients and buffers to the host or to this worker's device; returns it.

        Only the memory moves: on the host it waits, and the model cannot be used before it is back.
        """
        self.offload.move(tensors_of(model), device)
        return model

    def move_buffer_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """`move_to_device` of the buffers alone."""
        self.offload.move(model.buffers(), device)
        return model

    def move_to_cuda(self, model: nn.Module) -> nn.Module:
        """`move_to_device` to this worker's own device, whichever that is."""
        return self.move_to_device(model, self.device)

    def move_to_cpu(self, model: nn.Module) -> nn.Module:
        """`move_to_device` to the host."""
        return self.move_to_device(model, "cpu")

    def is_alive(self) -> bool:
        """True, from any worker that can answer."""
        return True

    def get_gpu_info(self) -> dict[str, Any]:
        """`rank`, `world_size`, `device`, `memory_{allocated,reserved,peak,total}_mb` (see `ProcessMemory` for CPUs),
        `environment` (the rank variables; None where unset) and `parameter_devices` (of some parameters)."""
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
        """Restart the peak that `get_gpu_info` reports."""
        self.memory.reset_peak()

    def report_device_id(self) -> str:
        """A name of this worker's device that other processes know it by too; see `device_id`."""
        return self.export.device_id

    def report_place(self) -> Place:
        """Where this worker is, and on which device."""
        return place_with(self.report_device_id())

    def return_state_dict(self) -> dict[str, Any]:
        """The model's state dict under Hugging Face names; to be called on every rank.

        One rank and FSDP2 give what the rank holds (FSDP2: DTensors), sharing its memory; FSDP1 gathers whole tensors.
        """
        # Asked of the root, since only that knows how its weights are sharded; the root calls the model "model".
        return {name.removeprefix("model."): value for name, value in self.sharding.root.state_dict().items()}

    def start_gpu_profiling(self) -> None:
        """Record this worker from now on, unless names were asked for and its own is none of them; see `Recording`."""
        if is_recorded(self._recording.name):
            self._recording.start()

    def stop_gpu_profiling(self) -> None:
        """Write what was recorded; harmless if nothing was."""
        self._recording.stop()

    @torch.no_grad()
    def _add_noise_to_weights(self) -> None:
        """Add N(0, 0.01) to the trainable weights, for tests; to be called on every rank.

        The noise follows from rank 0's torch seed, however the model is sharded.
        """
        seed = gather_over(int(torch.randint(1 << 31, ())), self.mesh.world)[0]

        def draw(name: str) -> torch.Tensor:
            # Seeded by name, because ranks may not ask for the same tensors in the same order. Torch uses 32 bits.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            return _NOISE_STD * torch.randn(self.sharding.shapes[name], generator=generator)

        for weights, part in zip(self.sharding.local_weights(), self.sharding.parts_of(draw), strict=True):
            weights.add_(part.to(weights))
        if self.optimizer is not None:
            self.optimizer.take_weights()


@contextmanager
def _whole_weights(config: PolicyConfig, offload: Offload, sharding: Sharding) -> Iterator[None]:
    """Around each call of the generator. No method: the worker would never be freed before a garbage collection."""
    if config.dtensor_cfg.sequence_parallel:
        raise ConfigError(
            "policy.dtensor_cfg.sequence_parallel=true shares the tokens of rows, but generation adds single ones; "
            "turn it off where the policy generates, or set policy.generation.placement=separate"
        )
    offload.check_weights("generate")
    with sharding.gathered():
        yield
