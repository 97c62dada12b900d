"""Configuration of a policy: model, precision, batches, optimizer."""

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
"""Precisions with float32 master weights in the optimizer."""


MUON = "muon"
"""The optimizer that has no import path; see `lucidrl.models.muon`."""


class ParameterGroupConfig(Config):
    """Weights with their own learning rate or weight decay."""

    pattern: str
    """Which weights, by name, with `*` for any characters: `*norm*`, `model.layers.0.*`."""
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Their learning rate; by default that of `kwargs`. Schedules scale it like that of `kwargs`."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Their weight decay; by default that of `kwargs`."""

    @model_validator(mode="after")
    def _sets_something(self) -> Self:
        if self.lr is None and self.weight_decay is None:
            raise ValueError(f"the group {self.pattern!r} sets nothing; set its lr or weight_decay, or remove it")
        return self


class OptimizerConfig(Config):
    """Any torch optimizer, by import path, or muon."""

    name: str = "torch.optim.AdamW"
    """Import path of the optimizer class, or `muon`: Muon for matrices of the layers, AdamW for the rest."""
    kwargs: dict[str, Any] = Field(default_factory=lambda: {"lr": 1e-6})
    """Arguments of the optimizer class. AdamW and Adam default to `fused=true`."""
    groups: tuple[ParameterGroupConfig, ...] = ()
    """Weights with their own learning rate or weight decay. A weight belongs to the first group that matches it."""

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if "." not in name and name != MUON:
            raise ValueError(
                f"{name!r} is not an optimizer; set {MUON}, or the import path of an optimizer such as "
                "torch.optim.AdamW"
            )
        return name

    @field_validator("kwargs")
    @classmethod
    def _has_usable_learning_rate(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        rate = kwargs.get("lr")
        if rate is not None and not (
            isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate < float("inf")
        ):
            raise ValueError(f"lr={rate!r} is not a learning rate; set a positive number such as 1e-6")
        return kwargs


SCHEDULES = ("constant", "cosine", "linear")
"""Learning-rate schedules by name; see `lucidrl.models.optim.schedule_factor`."""


class SchedulerConfig(Config):
    """A learning-rate schedule; it advances once per training step."""

    name: str
    """constant, cosine or linear, or the import path of a torch scheduler, such as
    torch.optim.lr_scheduler.LinearLR."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the schedule, without the optimizer. constant, cosine and linear accept `warmup_steps`,
    `total_steps` (default: the steps of the run) and `final_fraction`, the final fraction of the learning rate
    (default 0)."""

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if "." not in name and name not in SCHEDULES:
            raise ValueError(
                f"{name!r} is not a schedule; choose {', '.join(SCHEDULES)}, or the import path of a torch scheduler "
                "such as torch.optim.lr_scheduler.LinearLR"
            )
        return name


def _as_list(value: Any) -> Any:
    if isinstance(value, str):
        value = {"name": value}
    return [value] if isinstance(value, dict | SchedulerConfig) else value


class OptimizationConfig(Config):
    """Precision, optimizer and schedule of a trained model."""

    precision: Precision = "float32"
    """Precision of the model's computations. With bfloat16 and float16 the optimizer keeps float32 master weights; with
    float16 the loss is scaled dynamically."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    scheduler: Annotated[tuple[SchedulerConfig, ...], BeforeValidator(_as_list)] = ()
    """How the learning rate changes: `cosine` or `linear` (down to 0 at the end of the run), `constant`, or one or
    several torch schedulers that run one after another; see `scheduler_milestones`."""
    scheduler_milestones: tuple[NonNegativeInt, ...] = ()
    """Steps after which the next scheduler starts; one value fewer than there are schedulers."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly; for the schedules cosine, linear and constant."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip gradients to this norm; null turns clipping off."""
    max_nonfinite_steps: PositiveInt = 5
    """Stop training after this many consecutive optimizer updates were skipped because of NaN or infinite gradients.
    Updates that are skipped only to lower the float16 loss scale do not count."""

    @model_validator(mode="after")
    def _milestones_fit(self) -> Self:
        expected = max(0, len(self.scheduler) - 1)
        if len(self.scheduler_milestones) != expected:
            raise ValueError(
                f"{len(self.scheduler)} schedulers need {expected} scheduler_milestones, "
                f"not {len(self.scheduler_milestones)}; list the steps after which the next scheduler starts"
            )
        if self.warmup_steps and any(entry.name not in SCHEDULES for entry in self.scheduler):
            raise ValueError(
                f"warmup_steps={self.warmup_steps} is for the schedules {', '.join(SCHEDULES)}, but scheduler lists "
                "torch schedulers; set scheduler=cosine, for instance, or put the warm-up into the list"
            )
        return self

    def with_total_steps(self, total_steps: int) -> Self:
        """Return a copy whose schedules cosine and linear end with the run, unless they set `total_steps`."""
        entries = self.scheduler or ([SchedulerConfig(name="constant")] if self.warmup_steps else [])
        spelled_out = tuple(
            entry.model_copy(
                update={"kwargs": {"total_steps": total_steps, "warmup_steps": self.warmup_steps, **entry.kwargs}}
            )
            if entry.name in SCHEDULES
            else entry
            for entry in entries
        )
        return self.model_copy(update={"scheduler": spelled_out})


class TokenBudgetConfig(Config):
    """Micro-batches filled up to a token budget."""

    enabled: bool = False
    """Whether training and scoring use this kind of micro-batch."""
    train_mb_tokens: PositiveInt = 4096
    """Maximum tokens per training micro-batch, padding included."""
    logprob_mb_tokens: PositiveInt = 8192
    """Maximum tokens per scoring micro-batch, padding included."""


class DynamicBatchingConfig(TokenBudgetConfig):
    """Padded micro-batches of rows of similar length, up to a token budget."""

    sequence_length_round: PositiveInt = 8
    """Round padded lengths up to a multiple of this."""


class SequencePackingConfig(TokenBudgetConfig):
    """Micro-batches of concatenated rows, without padding, up to a token budget."""

    enabled: bool = True
    """Whether training and scoring use this kind of micro-batch."""


class DTensorConfig(Config):
    """Parallelism over several ranks. The data parallel size is the number of ranks, divided by
    `tensor_parallel_size * context_parallel_size`."""

    enabled: bool = True
    """Use `DTensorPolicyWorker` (FSDP2); if false, `FSDP1PolicyWorker`, which is data parallel only."""
    tensor_parallel_size: PositiveInt = 1
    """Ranks over which every layer is split."""
    context_parallel_size: PositiveInt = 1
    """Ranks over which the tokens of every row are split."""
    sequence_parallel: bool = False
    """Split activations between layers over tensor parallel ranks along the sequence, instead of replicating them."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer in host memory; copy weights to the device when needed."""
    activation_checkpointing: bool = False
    """Keep only layer inputs for the backward pass and recompute the other activations."""
    custom_parallel_plan: str | None = None
    """Import path of a tensor parallel plan, for a model for which transformers has no plan."""


ALL_LINEAR = "all-linear"
"""Target of adapters: every linear layer but the language model's head."""


class LoraConfig(Config):
    """Low-rank adapters: train two thin matrices beside each target layer and keep the model itself frozen."""

    rank: int = 8
    """Rows of A and columns of B; a target's output grows by alpha / rank * B @ A @ input."""
    alpha: float = 16.0
    """Scale of the adapters; alpha / rank multiplies their output."""
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    """Linear layers with an adapter: `all-linear` (all but the head), or the last parts of their names, such as
    `[q_proj, v_proj]` or `layers.0.mlp.up_proj`."""
    dropout: float = 0.0
    """Probability that an input of A is dropped, in training only. Scoring and generation drop nothing, so with
    dropout the trained policy differs from the one that sampled."""

    @field_validator("rank")
    @classmethod
    def _is_a_rank(cls, rank: int) -> int:
        if rank < 1:
            raise ValueError(f"{rank} is not a rank; set a positive integer such as 8, or policy.lora=null")
        return rank

    @field_validator("alpha")
    @classmethod
    def _is_a_scale(cls, alpha: float) -> float:
        if not 0 < alpha < float("inf"):
            raise ValueError(f"{alpha} is not a scale; set a positive number such as 16")
        return alpha

    @field_validator("dropout")
    @classmethod
    def _is_a_probability(cls, dropout: float) -> float:
        if not 0 <= dropout < 1:
            raise ValueError(f"{dropout} is not a dropout probability; set a number from 0 to below 1, such as 0.05")
        return dropout

    @field_validator("target_modules")
    @classmethod
    def _names_layers(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(targets, str):
            targets = targets if targets == ALL_LINEAR else (targets,)
        if not all(targets):
            raise ValueError(f"no layers are named; set {ALL_LINEAR}, or names such as [q_proj, v_proj]")
        return targets

    @property
    def scaling(self) -> float:
        """The factor of B @ A."""
        return self.alpha / self.rank


class PolicyConfig(OptimizationConfig):
    """A language model to train, score and sample from."""

    model_name: str = "embedded"
    """Hugging Face model folder, run folder (`RUN` or `RUN@best`), checkpoint, or `hub:ORG/NAME[@REVISION]`, which is
    downloaded; or `embedded` (tiny, warm-started on arithmetic), or `embedded-untrained`."""
    tokenizer: str | None = None
    """Path of the tokenizer folder; by default the model folder."""
    pad_token: str | None = None
    """Padding token; by default the tokenizer's pad token or, if there is none, its end-of-sequence token."""
    trust_remote_code: bool = False
    """Run Python code from the model folder."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and keep the model frozen; null trains all weights."""
    train_global_batch_size: PositiveInt | None = None
    """Rows per optimizer update, over all ranks; by default all rows of a `train` call, so one update per call."""
    train_micro_batch_size: PositiveInt = 32
    """Rows per training micro-batch when both dynamic batching and packing are off."""
    logprob_batch_size: PositiveInt = 64
    """Rows per scoring micro-batch when both dynamic batching and packing are off."""
    dtensor_cfg: DTensorConfig = DTensorConfig()
    """Parallelism over several ranks."""
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    """Batch rows of similar length, up to a token budget."""
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    """Concatenate rows without padding, up to a token budget."""
    share_prefixes: bool = True
    """Compute tokens that rows of a micro-batch have in common once, such as the prompt of a group, in training and
    scoring. Micro-batches with a token budget keep such rows together and count shared tokens once. No effect with
    context or sequence parallelism."""
    recompute_head: bool = False
    """Recompute logits in the backward pass: uses the least memory, but evaluates the head twice."""
    generation: GenerationConfig = GenerationConfig()
    """How completions are sampled; its temperature applies to scoring and training too."""

    @property
    def merges_for_generation(self) -> bool:
        """Whether a refit sends merged weights, because the engine takes no adapters."""
        return self.lora is not None and self.generation.engine != "builtin"

    @model_validator(mode="after")
    def _is_consistent(self) -> PolicyConfig:
        if self.dynamic_batching.enabled and self.sequence_packing.enabled:
            raise ValueError(
                "dynamic_batching.enabled and sequence_packing.enabled are both true; turn one of them off "
                "(packing needs no padding and is usually faster)"
            )
        parallel = self.dtensor_cfg
        if parallel.sequence_parallel and parallel.tensor_parallel_size == 1:
            raise ValueError(
                "dtensor_cfg.sequence_parallel=true has no effect with tensor_parallel_size=1; "
                "raise tensor_parallel_size, or set sequence_parallel=false"
            )
        for name, is_on in (
            (f"context_parallel_size={parallel.context_parallel_size}", parallel.context_parallel_size > 1),
            ("sequence_parallel=true", parallel.sequence_parallel),
        ):
            if is_on and self.sequence_packing.enabled:
                raise ValueError(
                    f"dtensor_cfg.{name} splits rows over ranks, which sequence packing does not support; "
                    "set sequence_packing.enabled=false (and dynamic_batching.enabled=true)"
                )
        if self.precision == "float64" and self.generation.engine == "vllm":
            raise ValueError("precision=float64 is not a precision of vLLM; set precision=float32")
        return self
