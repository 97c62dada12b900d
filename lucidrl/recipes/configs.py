"""Settings of whole runs, and the batch arithmetic between their parts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PositiveInt, PrivateAttr, model_validator

from lucidrl.algorithms.config import (
    ControlValidationConfig,
    GRPOConfig,
    PPOConfig,
    SFTConfig,
    ValidationConfig,
    ValidationSchedule,
)
from lucidrl.checkpoint.config import CheckpointConfig, SFTCheckpointConfig
from lucidrl.collectors.config import TextCollectorConfig
from lucidrl.distributed.config import ClusterConfig
from lucidrl.envs.text.config import EnvConfig
from lucidrl.models.control.config import ControlPolicyConfig, CriticConfig
from lucidrl.models.policy.config import EMBEDDED_MODELS, DynamicBatchingConfig, PolicyConfig, SequencePackingConfig
from lucidrl.recipes.profile import ProfileConfig
from lucidrl.recipes.tracking import TextTrackingConfig, TrackingConfig
from lucidrl.utils.config import Config, dump_yaml
from lucidrl.utils.nsys import DRIVER, GENERATION, POLICY, worker_name

NumThreads = Annotated[int, Field(ge=1, le=1024)]
"""The upper bound catches typos: no machine has more cores."""


class RunConfig(Config):
    """Where a run writes its files."""

    root: Path = Path("runs")
    """Parent folder of all runs."""
    name: str | None = None
    """Folder of this run below `root`; default: the next free `exp_NNN` below `root/<algorithm>`."""


Arithmetic = list[tuple[str, Any, str]]
"""Rows of (quantity, value, settings that it comes from)."""


class BaseRunConfig(Config, ABC):
    """Settings of every run, and the facts about its algorithm that the command line uses."""

    algorithm: ClassVar[str]
    """Name of the command and of the algorithm's section of settings."""
    run_class: ClassVar[str]
    """Dotted path of its `TrainingRun`; imported at use, because the imports take seconds."""
    validated_on: ClassVar[str] = "held-out"
    """Label of validation results."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the prompt order, of all sampling, and of the weights of an untrained model."""
    num_threads: NumThreads | None = None
    """CPU threads of torch in this process; default: torch decides. Results depend on it in the last bits."""
    run: RunConfig = RunConfig()
    """Where the run writes its files."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written and which are kept."""
    tracking: TrackingConfig = TrackingConfig()
    """Metrics, samples and trackers."""
    validation: ValidationSchedule = ValidationSchedule()
    """When the policy is validated."""
    profile: ProfileConfig = ProfileConfig()
    """Which steps are profiled."""
    _references: dict[str, Any] | None = PrivateAttr(default=None)
    """Settings that refer to environment variables, as they were written."""

    def with_references(self, references: dict[str, Any] | None) -> Self:
        """Return a copy whose `to_yaml` writes these references instead of their values."""
        copy = self.model_copy()
        copy._references = references
        return copy

    def to_yaml(self) -> str:
        """Return all settings as YAML; loading it gives an equal config."""
        return dump_yaml(self, self._references)

    @property
    def worker_names(self) -> list[str]:
        """Names of the run's processes in profiles."""
        return [worker_name(POLICY, 0), DRIVER]

    @classmethod
    def default_preset(cls, overrides: Mapping[str, str]) -> str | None:
        """Return the preset for a run without --preset and --config; `overrides` maps keys to unparsed values."""
        return None

    @property
    def max_steps(self) -> int:
        """Training steps of the run."""
        steps: int = getattr(self, self.algorithm).max_steps
        return steps

    @property
    @abstractmethod
    def title(self) -> str:
        """Model and data of the run, for people."""

    @abstractmethod
    def arithmetic(self) -> Arithmetic:
        """Return the batch sizes and where they come from."""


class TextRunConfig(BaseRunConfig):
    """Settings of every run of a language model."""

    policy: PolicyConfig = PolicyConfig()
    """The model to train."""
    cluster: ClusterConfig = ClusterConfig()
    """Worker processes and the Ray cluster."""
    env: EnvConfig = EnvConfig()
    """The environment: prompts and rewards."""
    validation: ValidationConfig = ValidationConfig()
    """Validation on held-out prompts."""
    tracking: TextTrackingConfig = TextTrackingConfig()
    """Metrics, samples and trackers."""
    python_inputs: dict[str, str] = Field(default_factory=dict)
    """What a Python program passed to its trainer as objects instead of settings, such as rows or reward functions; the
    trainer writes this, and only a trainer can resume such a run."""

    @property
    def worker_names(self) -> list[str]:
        generation = self.policy.generation
        num_generators = generation.num_workers if generation.placement == "separate" else 0
        return [
            *(worker_name(POLICY, rank) for rank in range(self.cluster.num_workers)),
            *(worker_name(GENERATION, number) for number in range(num_generators)),
            DRIVER,
        ]

    @abstractmethod
    def _row_factors(self) -> Arithmetic:
        """Return the settings whose product is the number of rows per step."""

    @property
    def rows_per_step(self) -> int:
        """Samples that a step trains on."""
        return math.prod(value for _, value, _ in self._row_factors())

    @property
    def title(self) -> str:
        return f"{self.policy.model_name} on {self.env.name}"

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per step."""
        return self.rows_per_step // (self.policy.train_global_batch_size or self.rows_per_step)

    @property
    def token_batching(self) -> tuple[str, SequencePackingConfig | DynamicBatchingConfig] | None:
        """The enabled batching by tokens, after its key; None if micro-batches have a fixed number of rows."""
        for name in ("sequence_packing", "dynamic_batching"):
            batching = getattr(self.policy, name)
            if batching.enabled:
                return f"policy.{name}", batching
        return None

    def arithmetic(self) -> Arithmetic:
        policy, ranks = self.policy, self.cluster.num_workers
        rows = self.rows_per_step // self.updates_per_step
        table = [
            *self._row_factors(),
            ("rows per step", self.rows_per_step, "product of the above"),
            ("rows per optimizer step", rows, "policy.train_global_batch_size"),
            ("optimizer steps per step", self.updates_per_step, "rows per step / rows per optimizer step"),
        ]
        if self.token_batching is None:
            table.append(("rows per micro-batch", policy.train_micro_batch_size, "policy.train_micro_batch_size"))
        else:
            name, batching = self.token_batching
            table.append(("tokens per micro-batch", f"up to {batching.train_mb_tokens}", f"{name}.train_mb_tokens"))
        if ranks > 1:
            shared = policy.dtensor_cfg.context_parallel_size * policy.dtensor_cfg.tensor_parallel_size
            table.append(("ranks", ranks, "cluster.num_workers"))
            table.append(("data-parallel ranks", ranks // shared, "ranks / (context x tensor parallel size)"))
        return table

    @model_validator(mode="after")
    def _rows_divide(self) -> Self:
        rows, global_batch = self.rows_per_step, self.policy.train_global_batch_size
        if global_batch is not None and rows % global_batch:
            factors = " x ".join(f"{setting}={value}" for _, value, setting in self._row_factors())
            raise ValueError(
                f"{rows} rows per step ({factors}) do not split into "
                f"policy.train_global_batch_size={global_batch}; make the rows a multiple of it, or leave it unset for "
                "one optimizer step per step"
            )
        return self


class GRPORunConfig(TextRunConfig):
    """`lucidrl grpo`"""

    algorithm = "grpo"
    run_class = "lucidrl.recipes.language.GRPORun"
    grpo: GRPOConfig = GRPOConfig()
    """The algorithm."""
    collector: TextCollectorConfig = TextCollectorConfig()
    """Samples per step."""

    @classmethod
    def default_preset(cls, overrides: Mapping[str, str]) -> str:
        """`demo` is tuned for the embedded model, `chat` (with a lower learning rate) for any other."""
        return "demo" if overrides.get("policy.model_name", "embedded") in EMBEDDED_MODELS else "chat"

    @model_validator(mode="after")
    def _can_generate(self) -> GRPORunConfig:
        if self.policy.dtensor_cfg.sequence_parallel and self.policy.generation.placement == "policy":
            raise ValueError(
                "policy.dtensor_cfg.sequence_parallel=true splits rows by tokens, but generation adds one token at a "
                "time; turn it off, or set policy.generation.placement=separate"
            )
        return self

    def _row_factors(self) -> Arithmetic:
        return [
            ("prompts per step", self.collector.prompts_per_step, "collector.prompts_per_step"),
            ("samples per prompt", self.collector.samples_per_prompt, "collector.samples_per_prompt"),
        ]


class SFTDataConfig(Config):
    """Where the examples come from."""

    file: Path | None = None
    """JSONL file; each line is {"messages": [...]} that ends with an assistant message, or {"prompt": "...",
    "completion": "..."}. Default: the environment's prompts, each completed with the `answer` of its info."""
    validation_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Fraction of the file's examples held out for validation."""
    num_examples: PositiveInt | None = None
    """Train on this many examples only, the same ones in every run; default: on all."""


class SFTRunConfig(TextRunConfig):
    """`lucidrl sft`"""

    algorithm = "sft"
    run_class = "lucidrl.recipes.language.SFTRun"
    checkpoint: SFTCheckpointConfig = SFTCheckpointConfig()
    """When checkpoints are written and which are kept."""
    sft: SFTConfig = SFTConfig()
    """The algorithm."""
    data: SFTDataConfig = SFTDataConfig()
    """Examples to train on."""

    @property
    def title(self) -> str:
        return f"{self.policy.model_name} on {self.data.file or self.env.name}"

    @model_validator(mode="after")
    def _file_needs_no_generation(self) -> SFTRunConfig:
        generation, num_workers = self.policy.generation, self.env.num_workers
        unused = [f"env.num_workers={num_workers}"] if num_workers > 1 else []
        if generation.placement == "separate":
            unused.append("policy.generation.placement=separate")
        if self.data.file is not None and unused:
            raise ValueError(
                f"{' and '.join(unused)} would start workers that generate or score completions, but a run on "
                f"data.file={self.data.file} needs none; remove one of the two"
            )
        return self

    def _row_factors(self) -> Arithmetic:
        return [("examples per step", self.sft.examples_per_step, "sft.examples_per_step")]


class ControlEnvConfig(Config):
    """The task."""

    name: str = "CartPole-v1"
    """Id of a gymnasium environment; `module:Id` first imports the module that registers it."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `gymnasium.make`."""
    num_envs: PositiveInt = 8
    """Environments stepped together in this process, one after the other."""


class FrameCollectorConfig(Config):
    """Frames per step."""

    frames_per_batch: PositiveInt = 2048
    """Frames per step, over all environments."""


class PPORunConfig(BaseRunConfig):
    """`lucidrl ppo`"""

    algorithm = "ppo"
    run_class = "lucidrl.recipes.control.PPORun"
    validated_on = "greedy"
    num_threads: NumThreads | None = 1
    """CPU threads of torch; null lets torch decide. Small networks are fastest with one. Results depend on it in the
    last bits."""
    ppo: PPOConfig = PPOConfig()
    """The algorithm."""
    policy: ControlPolicyConfig = ControlPolicyConfig()
    """The policy network."""
    critic: CriticConfig = CriticConfig()
    """The value network."""
    env: ControlEnvConfig = ControlEnvConfig()
    """The task."""
    collector: FrameCollectorConfig = FrameCollectorConfig()
    """Frames per step."""
    validation: ControlValidationConfig = ControlValidationConfig()
    """Validation on episodes with greedy actions."""

    @classmethod
    def default_preset(cls, overrides: Mapping[str, str]) -> str | None:
        """`cartpole` is for CartPole; another env starts from the defaults."""
        return "cartpole" if overrides.get("env.name", "CartPole-v1") == "CartPole-v1" else None

    @property
    def title(self) -> str:
        return f"policy and critic on {self.env.name}"

    def arithmetic(self) -> Arithmetic:
        frames, minibatch = self.collector.frames_per_batch, self.ppo.minibatch_frames
        num_updates = self.ppo.num_epochs * frames // minibatch
        return [
            ("frames per step", frames, "collector.frames_per_batch"),
            ("frames per env", frames // self.env.num_envs, "frames per step / env.num_envs"),
            ("frames per optimizer step", minibatch, "ppo.minibatch_frames"),
            ("optimizer steps per step", num_updates, "ppo.num_epochs x frames per step / ppo.minibatch_frames"),
            ("frames per run", frames * self.ppo.max_steps, "frames per step x ppo.max_steps"),
        ]

    @model_validator(mode="after")
    def _frames_divide(self) -> PPORunConfig:
        frames = self.collector.frames_per_batch
        for key, count in (("env.num_envs", self.env.num_envs), ("ppo.minibatch_frames", self.ppo.minibatch_frames)):
            if frames % count:
                raise ValueError(
                    f"collector.frames_per_batch={frames} is not a multiple of {key}={count}; change one of them"
                )
        return self
