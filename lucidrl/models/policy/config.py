"""Configuration of a policy: its model, its precision, its batches, its optimizer."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from lucidrl.models.generation.config import GenerationConfig
from lucidrl.utils.config import Config

EMBEDDED_MODELS = ("embedded", "embedded-untrained")
"""Model names that need no folder; see `lucidrl.models.embedded`."""

Precision = Literal["float32", "bfloat16", "float16", "float64"]
HALF_PRECISIONS = ("bfloat16", "float16")
"""Those in which the optimizer keeps float32 weights beside the model's."""


class OptimizerConfig(Config):
    """Any torch optimizer, by import path."""

    name: str = "torch.optim.AdamW"
    """Import path of the optimizer class."""
    kwargs: dict[str, Any] = Field(default_factory=lambda: {"lr": 1e-6})
    """Its arguments. AdamW and Adam use their fused implementation unless told otherwise."""

    @field_validator("kwargs")
    @classmethod
    def _has_usable_learning_rate(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        rate = kwargs.get("lr")
        if rate is not None and not (
            isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate < float("inf")
        ):
            raise ValueError(f"lr={rate!r} is not a learning rate; give a positive number such as 1e-6")
        return kwargs


class SchedulerConfig(Config):
    """Any torch learning-rate scheduler, by import path; it advances once for each call of `train`."""

    name: str
    """Import path of the scheduler class, such as torch.optim.lr_scheduler.LinearLR."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its arguments, without the optimizer."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict | SchedulerConfig) else value


class OptimizationConfig(Config):
    """How the gradients of a model become its new weights."""

    precision: Precision = "float32"
    """What the model computes in. In bfloat16 and float16 the optimizer works on float32 master weights; in float16
    losses are scaled up for the backward pass, as far as gradients stay finite."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    scheduler: Annotated[tuple[SchedulerConfig, ...], BeforeValidator(_as_list)] = ()
    """One learning-rate schedule, or several that follow each other at `scheduler_milestones`."""
    scheduler_milestones: tuple[NonNegativeInt, ...] = ()
    """The `train` calls after which the next scheduler takes over; one fewer than there are schedulers."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this norm."""
    max_nonfinite_steps: PositiveInt = 5
    """Training stops after this many optimizer steps in a row were skipped for NaN or infinite gradients. In float16,
    those that only lower the scale of losses do not count."""

    @model_validator(mode="after")
    def _milestones_fit(self) -> Self:
        expected = max(0, len(self.scheduler) - 1)
        if len(self.scheduler_milestones) != expected:
            raise ValueError(
                f"{len(self.scheduler)} schedulers need {expected} scheduler_milestones, "
                f"not {len(self.scheduler_milestones)}; give the steps at which the next one takes over"
            )
        return self


class TokenBudgetConfig(Config):
    """Micro-batches of as many rows as fit a token budget."""

    enabled: bool = False
    """Use it for training and scoring."""
    train_mb_tokens: PositiveInt = 4096
    """Most tokens, padding included, in a training micro-batch."""
    logprob_mb_tokens: PositiveInt = 8192
    """The same for scoring."""


class DynamicBatchingConfig(TokenBudgetConfig):
    """Micro-batches of rows of similar length, as many as fit a token budget (padding counted)."""

    sequence_length_round: PositiveInt = 8
    """Padded lengths are rounded up to a multiple of this."""


class SequencePackingConfig(TokenBudgetConfig):
    """Micro-batches without padding: rows laid end to end, as many as fit a token budget."""

    enabled: bool = True
    """Use it for training and scoring."""


class DTensorConfig(Config):
    """How `DTensorPolicyWorker` lays a model over several ranks; what these sizes leave is data parallel."""

    enabled: bool = True
    """Use `DTensorPolicyWorker`; otherwise `FSDP1PolicyWorker`, which is data parallel only."""
    tensor_parallel_size: PositiveInt = 1
    """Ranks that share every layer."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share the tokens of every row."""
    sequence_parallel: bool = False
    """Between layers, tensor parallel ranks hold different tokens instead of copies of all."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer in host memory and bring weights to the device as they are needed."""
    activation_checkpointing: bool = False
    """Keep only the inputs of layers for the backward pass and compute the rest again."""
    custom_parallel_plan: str | None = None
    """Import path of a tensor parallel plan, for a model that brings none."""


class PolicyConfig(OptimizationConfig):
    """A language model that is trained, scored and sampled from."""

    model_name: str = "embedded"
    """A Hugging Face model folder on disk, or `embedded` (tiny, warm-started), or `embedded-untrained`."""
    tokenizer: str | None = None
    """Folder of the tokenizer; by default that of the model."""
    pad_token: str | None = None
    """The token that pads; by default the tokenizer's own or, where it names none, its end-of-sequence token."""
    trust_remote_code: bool = False
    """Run Python code that lies in the model folder."""
    train_global_batch_size: PositiveInt | None = None
    """Rows of one optimizer step, over all ranks; by default all rows of a `train` call, so one step a call."""
    train_micro_batch_size: PositiveInt = 32
    """Rows that run at a time in training when neither dynamic batching nor packing is on."""
    logprob_batch_size: PositiveInt = 64
    """The same for scoring."""
    dtensor_cfg: DTensorConfig = DTensorConfig()
    """The model over several ranks."""
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    """Rows of similar length together, up to a token budget."""
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    """No padding at all, up to a token budget."""
    recompute_head: bool = False
    """Keep no logits for the backward pass: least memory, at the price of evaluating the head twice."""
    generation: GenerationConfig = GenerationConfig()
    """How completions are sampled; its temperature holds for scoring and training too."""

    @model_validator(mode="after")
    def _is_consistent(self) -> PolicyConfig:
        if self.dynamic_batching.enabled and self.sequence_packing.enabled:
            raise ValueError(
                "dynamic_batching.enabled and sequence_packing.enabled are both true; turn one of them off "
                "(packing needs no padding and is usually faster)"
            )
        self._check_parallelism()
        return self

    def _check_parallelism(self) -> None:
        parallel = self.dtensor_cfg
        if parallel.sequence_parallel and parallel.tensor_parallel_size == 1:
            raise ValueError(
                "dtensor_cfg.sequence_parallel=true with tensor_parallel_size=1 has no ranks to share tokens; "
                "raise tensor_parallel_size, or turn it off"
            )
        for name, is_on in (
            (f"context_parallel_size={parallel.context_parallel_size}", parallel.context_parallel_size > 1),
            ("sequence_parallel=true", parallel.sequence_parallel),
        ):
            if is_on and self.sequence_packing.enabled:
                raise ValueError(
                    f"dtensor_cfg.{name} splits rows over ranks, which packed rows are not made for; "
                    "set sequence_packing.enabled=false (and dynamic_batching.enabled=true)"
                )
