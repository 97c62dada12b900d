"""Configuration of whole runs, and the arithmetic that must hold between their parts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, PrivateAttr, model_validator

from lucidrl.algorithms.config import (
    ControlValidationConfig,
    GRPOConfig,
    PPOConfig,
    SFTConfig,
    ValidationConfig,
    ValidationSchedule,
)
from lucidrl.checkpoint.config import CheckpointConfig
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
"""More threads than any machine has cores for are a mistake, and may be more than the system lets a process have."""


class RunConfig(Config):
    """Where a run writes."""

    root: Path = Path("runs")
    """Folder of all runs."""
    name: str | None = None
    """Folder of this run below `root`; by default the next free `exp_NNN` below `root/<algorithm>`."""


class SFTCheckpointConfig(CheckpointConfig):
    """When checkpoints are written; the best one has the lowest held-out loss."""

    metric: str | None = "loss"
    """Validation metric whose best checkpoint is kept as well."""
    mode: Literal["max", "min"] = "min"
    """Whether more or less of it is better."""


Arithmetic = list[tuple[str, Any, str]]
"""Rows of (quantity, value, where it comes from)."""


class BaseRunConfig(Config, ABC):
    """What every run has, and what the command line knows about its algorithm."""

    algorithm: ClassVar[str]
    """Name of the command, and of the algorithm's settings."""
    run_class: ClassVar[str]
    """Its `TrainingRun`; imported at use, because a language model needs seconds of imports."""
    validated_on: ClassVar[str] = "held-out"
    """What validation results are of."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides the order of prompts, every random draw, and the weights of an untrained model."""
    num_threads: NumThreads | None = None
    """CPU threads of the computation; by default torch decides. Results depend on it in the last bits."""
    run: RunConfig = RunConfig()
    """Where the run writes."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    tracking: TrackingConfig = TrackingConfig()
    """Records."""
    validation: ValidationSchedule = ValidationSchedule()
    """When the policy is validated."""
    profile: ProfileConfig = ProfileConfig()
    """Traces of some steps."""
    _references: dict[str, Any] | None = PrivateAttr(default=None)
    """Texts with references to environment variables, in the place of the settings that have their values."""

    def with_references(self, references: dict[str, Any] | None) -> Self:
        """The same settings, which `to_yaml` writes with these texts in place of their values."""
        copy = self.model_copy()
        copy._references = references
        return copy

    def to_yaml(self) -> str:
        """All settings; loading that text again gives equal ones."""
        return dump_yaml(self, self._references)

    @property
    def worker_names(self) -> list[str]:
        """What profiling calls those who work on the run."""
        return [worker_name(POLICY, 0), DRIVER]

    @classmethod
    def default_preset(cls, overrides: Mapping[str, str]) -> str | None:
        """The preset of a run that names neither preset nor file; `overrides` has the values as they are written."""
        return None

    @property
    def max_steps(self) -> int:
        """Training steps of the run."""
        steps: int = getattr(self, self.algorithm).max_steps
        return steps

    @property
    @abstractmethod
    def title(self) -> str:
        """What is trained on what."""

    @abstractmethod
    def arithmetic(self) -> Arithmetic:
        """The resolved batch arithmetic."""


class TextRunConfig(BaseRunConfig):
    """What every run of a language model has."""

    policy: PolicyConfig = PolicyConfig()
    """The model that is trained."""
    cluster: ClusterConfig = ClusterConfig()
    """The processes that share the work."""
    env: EnvConfig = EnvConfig()
    """The environment that judges answers."""
    validation: ValidationConfig = ValidationConfig()
    """Held-out problems."""
    tracking: TextTrackingConfig = TextTrackingConfig()
    """Records."""

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
        """The settings whose product is the number of rows in a step."""

    @property
    def rows_per_step(self) -> int:
        """Rows that a step trains on."""
        return math.prod(value for _, value, _ in self._row_factors())

    @property
    def title(self) -> str:
        return f"{self.policy.model_name} on {self.env.name}"

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in a training step."""
        return self.rows_per_step // (self.policy.train_global_batch_size or self.rows_per_step)

    @property
    def token_batching(self) -> tuple[str, SequencePackingConfig | DynamicBatchingConfig] | None:
        """What cuts micro-batches by tokens, with its setting; None if they have a fixed number of rows."""
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
            ("rows a step", self.rows_per_step, "the product of the above"),
            ("rows an optimizer step", rows, "policy.train_global_batch_size"),
            ("optimizer steps a step", self.updates_per_step, "rows a step / rows an optimizer step"),
        ]
        if self.token_batching is None:
            table.append(("rows a micro-batch", policy.train_micro_batch_size, "policy.train_micro_batch_size"))
        else:
            name, batching = self.token_batching
            table.append(("tokens a micro-batch", f"up to {batching.train_mb_tokens}", f"{name}.train_mb_tokens"))
        if ranks > 1:
            shared = policy.dtensor_cfg.context_parallel_size * policy.dtensor_cfg.tensor_parallel_size
            table.append(("ranks", ranks, "cluster.num_workers"))
            table.append(("ranks with rows of their own", ranks // shared, "ranks / (context x tensor parallel)"))
        return table

    @model_validator(mode="after")
    def _rows_divide(self) -> Self:
        rows, global_batch = self.rows_per_step, self.policy.train_global_batch_size
        if global_batch is not None and rows % global_batch:
            factors = " x ".join(f"{setting}={value}" for _, value, setting in self._row_factors())
            raise ValueError(
                f"a step has {rows} rows ({factors}), which do not split into "
                f"policy.train_global_batch_size={global_batch}; make the rows a multiple of it, or leave it unset for "
                "one optimizer step a step"
            )
        return self


class GRPORunConfig(TextRunConfig):
    """`lucidrl grpo`"""

    algorithm = "grpo"
    run_class = "lucidrl.recipes.language.GRPORun"
    grpo: GRPOConfig = GRPOConfig()
    """The algorithm."""
    collector: TextCollectorConfig = TextCollectorConfig()
    """How many conversations make a step."""

    @classmethod
    def default_preset(cls, overrides: Mapping[str, str]) -> str:
        """The embedded model trains with `demo`, any other with `chat`: sizes apart, they differ in learning rate."""
        return "demo" if overrides.get("policy.model_name", "embedded") in EMBEDDED_MODELS else "chat"

    @model_validator(mode="after")
    def _can_generate(self) -> GRPORunConfig:
        if self.policy.dtensor_cfg.sequence_parallel and self.policy.generation.placement == "policy":
            raise ValueError(
                "policy.dtensor_cfg.sequence_parallel=true shares the tokens of rows, but generation adds single ones; "
                "turn it off, or set policy.generation.placement=separate"
            )
        return self

    def _row_factors(self) -> Arithmetic:
        return [
            ("prompts a step", self.collector.prompts_per_step, "collector.prompts_per_step"),
            ("samples a prompt", self.collector.samples_per_prompt, "collector.samples_per_prompt"),
        ]


class SFTDataConfig(Config):
    """Where the conversations come from."""

    file: Path | None = None
    """JSONL with {"messages": [...]} ending in an assistant message; by default the environment's prompts, each
    answered with the `answer` of its info."""
    validation_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of a file's conversations held out from training."""
    num_examples: PositiveInt | None = None
    """Learn from this many of the training conversations only, the same ones in every run; by default from all."""


class SFTRunConfig(TextRunConfig):
    """`lucidrl sft`"""

    algorithm = "sft"
    run_class = "lucidrl.recipes.language.SFTRun"
    checkpoint: SFTCheckpointConfig = SFTCheckpointConfig()
    """Checkpoints."""
    sft: SFTConfig = SFTConfig()
    """The algorithm."""
    data: SFTDataConfig = SFTDataConfig()
    """Conversations to learn from."""

    @property
    def title(self) -> str:
        return f"{self.policy.model_name} on {self.data.file or self.env.name}"

    @model_validator(mode="after")
    def _file_asks_nobody(self) -> SFTRunConfig:
        generation, num_workers = self.policy.generation, self.env.num_workers
        unused = [f"env.num_workers={num_workers}"] if num_workers > 1 else []
        if generation.placement == "separate":
            unused.append("policy.generation.placement=separate")
        if self.data.file is not None and unused:
            raise ValueError(
                f"{' and '.join(unused)} would start processes for answers, but a run that learns from "
                f"data.file={self.data.file} has none given and none judged; leave out either of them"
            )
        return self

    def _row_factors(self) -> Arithmetic:
        return [("examples a step", self.sft.examples_per_step, "sft.examples_per_step")]


class ControlEnvConfig(Config):
    """The task."""

    name: str = "CartPole-v1"
    """Id of an environment of gymnasium; `module:Id` imports the module that registers it."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `gymnasium.make`."""
    num_envs: PositiveInt = 8
    """Environments that are stepped together, one after the other in this process."""


class FrameCollectorConfig(Config):
    """How much is collected before each training step."""

    frames_per_batch: PositiveInt = 2048
    """Frames of a step, of all environments together."""


class PPORunConfig(BaseRunConfig):
    """`lucidrl ppo`"""

    algorithm = "ppo"
    run_class = "lucidrl.recipes.control.PPORun"
    validated_on = "greedy"
    num_threads: NumThreads | None = 1
    """CPU threads of the computation; null lets torch decide. More than one only wait for each other in small networks.
    Results depend on it in the last bits."""
    ppo: PPOConfig = PPOConfig()
    """The algorithm."""
    policy: ControlPolicyConfig = ControlPolicyConfig()
    """The network that decides."""
    critic: CriticConfig = CriticConfig()
    """The network that estimates what an observation is worth."""
    env: ControlEnvConfig = ControlEnvConfig()
    """The task."""
    collector: FrameCollectorConfig = FrameCollectorConfig()
    """How much is collected before each training step."""
    validation: ControlValidationConfig = ControlValidationConfig()
    """Episodes without exploration."""

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
            ("frames a step", frames, "collector.frames_per_batch"),
            ("frames of each env", frames // self.env.num_envs, "frames a step / env.num_envs"),
            ("frames an optimizer step", minibatch, "ppo.minibatch_frames"),
            ("optimizer steps a step", num_updates, "ppo.num_epochs x frames a step / frames an optimizer step"),
            ("frames of the run", frames * self.ppo.max_steps, "frames a step x ppo.max_steps"),
        ]

    @model_validator(mode="after")
    def _frames_divide(self) -> PPORunConfig:
        frames = self.collector.frames_per_batch
        for key, count in (("env.num_envs", self.env.num_envs), ("ppo.minibatch_frames", self.ppo.minibatch_frames)):
            if frames % count:
                raise ValueError(
                    f"collector.frames_per_batch={frames} does not split into {key}={count}; make it a multiple"
                )
        return self
