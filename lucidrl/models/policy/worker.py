"""The policy worker: trains, scores and saves one language model.

`PolicyWorker` runs on one rank, on the unwrapped model; the parts it is composed of live in modules of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lucidrl.algorithms.interfaces import LossFunction, reduce_metrics
from lucidrl.checkpoint.tensors import flatten_state, load_tensors, save_tensors, unflatten_state
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.batching import Plan, dynamic_plan, fixed_plan, inverse_permutation, packed_plan
from lucidrl.errors import CheckpointError, ConfigError, DataError, TrainingError
from lucidrl.models.loading import DTYPES, load_model
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.interfaces import LogprobOutputSpec, ReferenceLogprobOutputSpec
from lucidrl.models.policy.optim import PolicyOptimizer
from lucidrl.models.policy.reference import ReferencePolicy
from lucidrl.models.policy.train_step import StepOutcome, run_micro_batches
from lucidrl.profiling.spans import span
from lucidrl.utils.config import validate
from lucidrl.utils.device import default_device

WEIGHTS_FILE, OPTIMIZER_TENSORS, OPTIMIZER_STRUCTURE = "model.safetensors", "optimizer.safetensors", "optimizer.json"


class PolicyWorker:
    """One rank's policy.

    Args:
        config: a `PolicyConfig`, or a mapping of its fields.
        tokenizer: saved beside the weights.
        weights_path: folder written by `save_checkpoint`, to start from instead of the model's own weights.
        optimizer_path: the optimizer's folder that goes with them.
        init_optimizer: without one the worker scores and evaluates, but does not train.
        init_reference_model: keep the weights of the model as loaded, before any checkpoint, as the reference policy.
        seed: of the weights of an untrained model.
    """

    def __init__(
        self,
        config: PolicyConfig | Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        *,
        seed: int = 0,
    ):
        self.config = validate(PolicyConfig, config)
        self.tokenizer = tokenizer
        self.rank = 0
        model = load_model(
            self.config.model_name,
            DTYPES[self.config.precision],
            seed=seed,
            trust_remote_code=self.config.trust_remote_code,
        )
        self.device = default_device()
        # In evaluation mode, also in training: with dropout, the policy that is trained would be another one than the
        # policy that sampled and scored.
        self.model = LogprobModel(model.to(self.device), self.config.generation.temperature, self.config.recompute_head)
        self.reference = ReferencePolicy(self.model) if init_reference_model else None
        self.optimizer = PolicyOptimizer(self.model.parameters(), self.config) if init_optimizer else None
        self._nonfinite_steps_in_a_row = 0
        if weights_path is not None:
            self.load_checkpoint(weights_path, optimizer_path)

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
        """Walk the rows in global batches of `gbs`, one optimizer step each (none in `eval_mode`).

        Returns:
            `global_loss` (one value a global batch), `grad_norm`, `rank`, `all_mb_metrics` (metric → one value a
            micro-batch), `metrics` (the same, reduced as the loss declared) and `num_skipped_steps`.
        """
        self._check_batch(data)
        optimizer = None if eval_mode else self._optimizer_for_training()
        rows = gbs or self.config.train_global_batch_size or data.size
        if data.size == 0 or data.size % rows:
            raise DataError(
                f"{data.size} rows do not split into global batches of {rows}; "
                "make the number of rows a multiple of train_global_batch_size"
            )
        outcomes, grad_norm, num_skipped = [], 0.0, 0
        rate = self.optimizer.learning_rate if self.optimizer is not None else 0.0
        try:
            for start in range(0, data.size, rows):
                batch = data.slice(start, start + rows)
                with nullcontext() if optimizer else torch.no_grad():
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
        return self._train_result(outcomes, grad_norm, num_skipped, rate)

    @torch.no_grad()
    def get_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Score every token of every row; leaves the model as it was."""
        plan, order = self._plan(data, micro_batch_size or self.config.logprob_batch_size, for_training=False)
        logprobs = torch.zeros(data["input_ids"].shape, dtype=torch.float32)
        scored = []
        with span("logprobs"):
            for micro in data.microbatches(plan, length_multiple=self._length_multiple):
                tokens, lengths = micro["input_ids"].to(self.device), micro["input_lengths"].to(self.device)
                outputs = self.model(tokens, lengths, packed=self._packs)
                assert outputs.logprobs is not None
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

    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None = None, tokenizer_path: str | None = None
    ) -> None:
        """Write the weights as a Hugging Face folder, and optimizer and tokenizer where a path is given."""
        # One file, whatever its size: that is what `load_checkpoint` reads.
        self.model.model.save_pretrained(weights_path, max_shard_size="1000GB")
        if tokenizer_path is not None:
            self.tokenizer.save_pretrained(tokenizer_path)
        if optimizer_path is not None:
            folder = Path(optimizer_path)
            folder.mkdir(parents=True, exist_ok=True)
            tensors, structure = flatten_state(self._optimizer_for_training().state_dict())
            save_tensors(folder / OPTIMIZER_TENSORS, tensors)
            (folder / OPTIMIZER_STRUCTURE).write_text(json.dumps(structure))

    @torch.no_grad()
    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Take weights, and the optimizer's state if its path is given, from what `save_checkpoint` wrote."""
        saved = load_tensors(Path(weights_path) / WEIGHTS_FILE)
        self._check_same_model(saved, weights_path)
        for name, parameter in self.model.model.named_parameters():
            parameter.copy_(saved[name])
        if self.optimizer is not None:
            self.optimizer.take_weights()
        if optimizer_path is None:
            return
        optimizer, folder = self._optimizer_for_training(), Path(optimizer_path)
        try:
            structure = json.loads((folder / OPTIMIZER_STRUCTURE).read_text())
            optimizer.load_state_dict(unflatten_state(load_tensors(folder / OPTIMIZER_TENSORS), structure))
        except (OSError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{optimizer_path} holds no state of this policy's optimizer ({type(error).__name__}: {error}); "
                "resume with the policy.optimizer, policy.scheduler and policy.precision it was saved with"
            ) from error

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
        micro_batches = batch.microbatches(plan, length_multiple=self._length_multiple)
        return run_micro_batches(self.model, batch, micro_batches, loss_fn, packed=self._packs, backward=backward)

    def _note_step(self, grad_norm: float, outcome: StepOutcome) -> bool:
        """Count a skipped step; too many in a row end the training."""
        is_skipped = not torch.isfinite(torch.tensor(grad_norm))
        self._nonfinite_steps_in_a_row = self._nonfinite_steps_in_a_row + 1 if is_skipped else 0
        if self._nonfinite_steps_in_a_row >= self.config.max_nonfinite_steps:
            suspects = ", ".join(str(name) for name in outcome.suspects()[:8])
            raise TrainingError(
                f"gradients were NaN or infinite in {self._nonfinite_steps_in_a_row} optimizer steps in a row "
                f"(last in samples {suspects}); lower the learning rate or look at those samples"
            )
        return is_skipped

    def _train_result(
        self, outcomes: list[StepOutcome], grad_norm: float, num_skipped: int, rate: float
    ) -> dict[str, Any]:
        parts = [part for outcome in outcomes for part in outcome.parts]
        per_micro_batch: dict[str, list[float]] = {}
        for outcome in outcomes:
            common = {
                "lr": rate,
                "global_valid_seqs": float(outcome.global_valid_seqs),
                "global_valid_toks": float(outcome.global_valid_toks),
            }
            for metrics, num_valid_samples in outcome.parts:
                values = {name: float(getattr(metric, "value", metric)) for name, metric in metrics.items()}
                for name, value in {**values, **common, "num_valid_samples": float(num_valid_samples)}.items():
                    per_micro_batch.setdefault(name, []).append(value)
        return {
            "global_loss": torch.stack([outcome.loss.cpu() for outcome in outcomes]),
            "grad_norm": torch.tensor(grad_norm),
            "rank": self.rank,
            "all_mb_metrics": per_micro_batch,
            "metrics": reduce_metrics((metrics, float(samples)) for metrics, samples in parts) | {"lr": rate},
            "num_skipped_steps": num_skipped,
        }

    def _check_batch(self, data: BatchedDataDict[Any]) -> None:
        missing = {"input_ids", "input_lengths", "token_mask", "sample_mask"} - set(data.keys())
        if missing:
            raise DataError(f"the batch has no {', '.join(sorted(missing))}; train needs them (see BatchedDataDict)")

    def _check_same_model(self, saved: Mapping[str, torch.Tensor], path: str) -> None:
        """Refuse weights that differ in name or shape, before any of them is taken."""
        expected = {name: list(parameter.shape) for name, parameter in self.model.model.named_parameters()}
        unknown = sorted(saved.keys() - expected.keys() - dict(self.model.model.named_buffers()).keys())
        for name in [*expected, *unknown]:
            found = list(saved[name].shape) if name in saved else None
            if found != expected.get(name):
                raise CheckpointError(
                    f"{path} is of another model: {name} should have shape {expected.get(name, 'none')}, "
                    f"found {found or 'nothing'}; resume with the policy.model_name it was saved from"
                )
