"""The policy worker: trains, scores and samples from one language model, alone or as one of many ranks.

What all workers do is here, composed of parts that live in modules of their own; how the model lies over the ranks is
the business of a `Sharding`, which each documented class chooses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lucidrl.algorithms.interfaces import LossFunction
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.batching import Plan, dynamic_plan, fixed_plan, inverse_permutation, packed_plan
from lucidrl.distributed.collectives import gather_over, largest_over
from lucidrl.distributed.mesh import Layout, RankMesh
from lucidrl.distributed.process_group import init_process_group_from_environment, leave_process_group
from lucidrl.errors import ConfigError, DataError, TrainingError
from lucidrl.models.generation.builtin import BuiltinGenerator
from lucidrl.models.generation.interfaces import GenerationDatumSpec, GenerationOutputSpec
from lucidrl.models.policy.checkpoint import load_optimizer, load_weights, save_optimizer, save_weights
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.interfaces import LogprobOutputSpec, ReferenceLogprobOutputSpec, WorkerOptions
from lucidrl.models.policy.introspection import Introspection, add_noise, state_dict_of
from lucidrl.models.policy.model_on_ranks import load_sharded
from lucidrl.models.policy.optim import PolicyOptimizer
from lucidrl.models.policy.reference import ReferencePolicy
from lucidrl.models.policy.sharding import Sharding
from lucidrl.models.policy.train_step import StepOutcome, merged_outcomes, run_micro_batches, with_empty_rounds
from lucidrl.profiling.spans import span
from lucidrl.utils.config import validate
from lucidrl.utils.device import default_device


class PolicyWorker(ABC):
    """One rank of a policy.

    Started by a worker group or by torchrun it joins the other ranks; otherwise it is the only one. Methods that work
    on the model are to be called on every rank, each with its own rows (those of a context or tensor parallel group
    with the same).

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
        world = init_process_group_from_environment(options.timeout_s)
        self.rank = world.rank
        self.device = default_device()
        self.mesh = RankMesh(self.layout_of(self.config, world.world_size), self.device.type)
        self.sharding = load_sharded(self.config, self.mesh, self.device, options.seed, self._shard)
        self.model = self.sharding.model
        self._introspection = Introspection(world, self.device, self.sharding)
        weights = [self.sharding.local(parameter.detach()) for parameter in self.sharding.parameters()]
        self.reference = ReferencePolicy(weights) if init_reference_model else None
        self.optimizer: PolicyOptimizer | None = None
        if init_optimizer:
            sharding = self.sharding
            self.optimizer = PolicyOptimizer(sharding.parameters(), self.config, sharding.local, sharding.total_norm)
        self._generator = BuiltinGenerator(self.model, tokenizer, self.config.generation, options.seed)
        self._nonfinite_steps_in_a_row = 0
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

        Returns:
            `global_loss` (one value a global batch, of all ranks), `grad_norm`, `rank`, `all_mb_metrics` (metric → one
            value a micro-batch of this rank), `metrics` (of all ranks, reduced as the loss declared) and
            `num_skipped_steps`.
        """
        self._check_batch(data)
        optimizer = None if eval_mode else self._optimizer_for_training()
        batches = self._global_batches(data, gbs)
        outcomes, grad_norm, num_skipped = [], 0.0, 0
        rate = self.optimizer.learning_rate if self.optimizer is not None else 0.0
        try:
            for batch in batches:
                with torch.set_grad_enabled(optimizer is not None):
                    outcome = self._run(batch, loss_fn, mbs, backward=optimizer is not None)
                outcomes.append(outcome)
                if optimizer is not None:
                    with span("optimizer"):
                        grad_norm = optimizer.step()
                    num_skipped += self._note_step(grad_norm, outcome)
        finally:
            if optimizer is not None:
                optimizer.zero_grad()  # after an exception in the loss, some of the gradient is there
        if optimizer is not None:
            optimizer.schedule()
        return {
            **merged_outcomes(outcomes, rate, self.mesh.dp_group),
            "grad_norm": torch.tensor(grad_norm),
            "rank": self.rank,
            "num_skipped_steps": num_skipped,
        }

    @torch.no_grad()
    def get_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Score every token of every row; leaves the model as it was."""
        plan, order = self._plan(data, micro_batch_size or self.config.logprob_batch_size, for_training=False)
        rounds = largest_over(len(plan), self.mesh.world)
        micro_batches = data.microbatches(plan, length_multiple=self._length_multiple)
        logprobs = torch.zeros(data["input_ids"].shape, dtype=torch.float32)
        scored = []
        with span("logprobs"):
            for micro, is_real in with_empty_rounds(micro_batches, data, rounds):
                tokens, lengths = micro["input_ids"].to(self.device), micro["input_lengths"].to(self.device)
                outputs = self.sharding.root(tokens, lengths, packed=self._packs)
                if is_real:
                    missing = logprobs.shape[1] - outputs.logprobs.shape[1]
                    scored.append(torch.nn.functional.pad(outputs.logprobs.float().cpu(), (0, missing)))
        result = BatchedDataDict({"logprobs": torch.cat(scored) if scored else logprobs})
        result.reorder_data(order)
        return result

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """Inside, the worker's model is the reference policy."""
        if self.reference is None:
            raise ConfigError("this policy was made with init_reference_model=False; it has no reference policy to use")
        with self.reference.swapped_in():
            yield

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """`get_logprobs` of the reference policy."""
        with span("reference"), self.use_reference_model():
            scored = self.get_logprobs(data, micro_batch_size)
        return BatchedDataDict({"reference_logprobs": scored["logprobs"]})

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete this rank's prompts with the current weights; see `BuiltinGenerator`."""
        if self.config.dtensor_cfg.sequence_parallel:
            raise ConfigError(
                "policy.dtensor_cfg.sequence_parallel=true shares the tokens of rows, but generation adds single ones; "
                "turn it off where the policy generates"
            )
        with self.sharding.gathered():
            return self._generator.generate(data, greedy)

    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None = None, tokenizer_path: str | None = None
    ) -> None:
        """Write the weights as a Hugging Face folder, and optimizer and tokenizer where a path is given."""
        save_weights(self.sharding, self.config.precision, weights_path)
        if tokenizer_path is not None and self.rank == 0:
            self.tokenizer.save_pretrained(tokenizer_path)
        if optimizer_path is not None:
            save_optimizer(self.sharding, self._optimizer_for_training(), optimizer_path)

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Take weights, and the optimizer's state if its path is given, from what `save_checkpoint` wrote."""
        load_weights(self.sharding, weights_path)
        if self.optimizer is not None:
            self.optimizer.take_weights()
        if optimizer_path is not None:
            load_optimizer(self.sharding, self._optimizer_for_training(), optimizer_path)

    def shutdown(self) -> None:
        """Stop profiling and leave the other ranks; may be called twice."""
        try:
            self.stop_gpu_profiling()
        finally:
            leave_process_group()

    def is_alive(self) -> bool:
        """True, from any worker that can answer."""
        return True

    def get_gpu_info(self) -> dict[str, Any]:
        """`rank`, `world_size`, `device`, `memory_{allocated,reserved,peak,total}_mb` (see `HostMemory` for CPUs),
        `environment` (the rank variables; None where unset) and `parameter_devices` (of some parameters)."""
        return self._introspection.gpu_info()

    def reset_peak_memory_stats(self) -> None:
        """Restart the peak that `get_gpu_info` reports."""
        self._introspection.memory.reset_peak()

    def report_device_id(self) -> str:
        """A name of this worker's device that other processes know it by too; see `device_id`."""
        return self._introspection.device_id()

    def return_state_dict(self) -> dict[str, Any]:
        """The model's state dict, sharded where the back end can; see `state_dict_of`."""
        return state_dict_of(self.sharding)

    def start_gpu_profiling(self) -> None:
        """Begin a profile of this worker; see `DeviceProfiler`."""
        self._introspection.profiler.start()

    def stop_gpu_profiling(self) -> None:
        """End it; harmless if none was begun."""
        self._introspection.profiler.stop()

    def _add_noise_to_weights(self) -> None:
        """Add N(0, 0.01) to the trainable weights, for tests; to be called on every rank."""
        add_noise(self.sharding)
        if self.optimizer is not None:
            self.optimizer.take_weights()

    @property
    def _packs(self) -> bool:
        return self.config.sequence_packing.enabled

    @property
    def _length_multiple(self) -> int:
        dynamic = self.config.dynamic_batching
        return dynamic.sequence_length_round if dynamic.enabled else 1

    def _optimizer_for_training(self) -> PolicyOptimizer:
        if self.optimizer is None:
            raise ConfigError("this policy was made with init_optimizer=False; it can score but not train")
        return self.optimizer

    def _global_batches(self, data: BatchedDataDict[Any], gbs: int | None) -> list[BatchedDataDict[Any]]:
        """This rank's share of each global batch."""
        sizes = gather_over(data.size, self.mesh.dp_group)
        rows = gbs or self.config.train_global_batch_size or sum(sizes)
        number = sum(sizes) // rows if rows else 0
        if number == 0 or sum(sizes) % rows:
            raise DataError(
                f"{sum(sizes)} rows do not split into global batches of {rows}; "
                "make the number of rows a multiple of train_global_batch_size"
            )
        if any(size % number for size in sizes):
            raise DataError(
                f"shards of {sizes} rows do not split into {number} global batches; "
                "give every rank the same share of each (see shard_by_batch_size)"
            )
        share = data.size // number
        return [data.slice(start, start + share) for start in range(0, share * number, share or 1)] or [data] * number

    def _plan(self, data: BatchedDataDict[Any], mbs: int, *, for_training: bool) -> tuple[Plan, list[int]]:
        """Which rows run together, and the permutation that puts their results back in order."""
        packing, dynamic = self.config.sequence_packing, self.config.dynamic_batching
        lengths = data["input_lengths"].tolist()
        if packing.enabled:
            plan = packed_plan(lengths, packing.train_mb_tokens if for_training else packing.logprob_mb_tokens)
        elif dynamic.enabled:
            budget = dynamic.train_mb_tokens if for_training else dynamic.logprob_mb_tokens
            plan = dynamic_plan(lengths, budget, length_multiple=dynamic.sequence_length_round)
        else:
            plan = fixed_plan(data.size, mbs)
        return plan, inverse_permutation([row for group in plan for row in group])

    def _run(
        self, batch: BatchedDataDict[Any], loss_fn: LossFunction, mbs: int | None, *, backward: bool
    ) -> StepOutcome:
        # Rows that are masked out as a whole take no part in the loss, and cost nothing.
        batch = batch.select_indices(batch["sample_mask"].nonzero()[:, 0]).to(self.device)
        plan, _ = self._plan(batch, mbs or self.config.train_micro_batch_size, for_training=True)
        rounds = largest_over(len(plan), self.mesh.world)
        micro_batches = batch.microbatches(plan, length_multiple=self._length_multiple)
        return run_micro_batches(
            self.sharding,
            batch,
            micro_batches,
            rounds,
            loss_fn,
            packed=self._packs,
            backward=backward,
            loss_scale=self.optimizer.loss_scale if self.optimizer is not None else 1.0,
        )

    def _note_step(self, grad_norm: float, outcome: StepOutcome) -> bool:
        """Count a skipped step; too many in a row end the training. All ranks see the same norm, and do the same."""
        is_skipped = not torch.isfinite(torch.tensor(grad_norm))
        self._nonfinite_steps_in_a_row = self._nonfinite_steps_in_a_row + 1 if is_skipped else 0
        if self._nonfinite_steps_in_a_row >= self.config.max_nonfinite_steps:
            named = [name for names in gather_over(outcome.suspects(), self.mesh.dp_group) for name in names]
            raise TrainingError(
                f"gradients were NaN or infinite in {self._nonfinite_steps_in_a_row} optimizer steps in a row "
                f"(last in samples {', '.join(map(str, named[:8]))}); lower the learning rate or look at those samples"
            )
        return is_skipped

    def _check_batch(self, data: BatchedDataDict[Any]) -> None:
        missing = {"input_ids", "input_lengths", "token_mask", "sample_mask"} - set(data.keys())
        if missing:
            raise DataError(f"the batch has no {', '.join(sorted(missing))}; train needs them (see BatchedDataDict)")
