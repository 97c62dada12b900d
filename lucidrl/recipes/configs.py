"""Settings of whole runs, one class per command."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, PositiveInt, model_validator

from lucidrl.algorithms.config import (
    ControlValidationConfig,
    DistillConfig,
    ExampleStepsConfig,
    GRPOConfig,
    PPOConfig,
    SFTConfig,
    TeacherConfig,
)
from lucidrl.checkpoint.config import SFTCheckpointConfig
from lucidrl.collectors.config import TextCollectorConfig
from lucidrl.data.config import PREFERENCE_COLUMNS
from lucidrl.models.control.config import ControlPolicyConfig, CriticConfig
from lucidrl.recipes.base_config import Arithmetic, BaseRunConfig, NumThreads, command_of
from lucidrl.recipes.text_config import TextRunConfig
from lucidrl.tools.config import DEFAULT_MAX_TURNS, ToolUseConfig
from lucidrl.utils.config import Config
from lucidrl.utils.nsys import TEACHER, worker_name

__all__ = [
    "BaseRunConfig",
    "DistillRunConfig",
    "EvaluatedSFTConfig",
    "ExampleRunConfig",
    "GRPORunConfig",
    "PPORunConfig",
    "RolloutRunConfig",
    "SFTRunConfig",
    "TextRunConfig",
]


def _has_tools(content: Mapping[str, Any]) -> bool:
    python_inputs = content.get("python_inputs", {})
    return bool(content.get("tools")) or (isinstance(python_inputs, Mapping) and "tools" in python_inputs)


class RolloutRunConfig(TextRunConfig, ABC):
    """Settings of runs that train on samples of the policy."""

    collector: TextCollectorConfig = TextCollectorConfig()
    """Samples per step."""

    @property
    def update(self) -> GRPOConfig:
        """The algorithm's section: how the policy is updated from its samples."""
        section: GRPOConfig = getattr(self, self.algorithm)
        return section

    @property
    def max_turns(self) -> int:
        return self.collector.max_turns

    @model_validator(mode="before")
    @classmethod
    def _tools_take_turns(cls, content: Any) -> Any:
        """Set `collector.max_turns` for a run with tools, unless it is set."""
        if not isinstance(content, Mapping) or not _has_tools(content):
            return content
        collector = content.get("collector", {})
        if not isinstance(collector, Mapping):
            return content
        return {**content, "collector": {"max_turns": DEFAULT_MAX_TURNS, **collector}}

    @model_validator(mode="after")
    def _tools_can_be_used(self) -> Self:
        if not self.has_tools:
            return self
        if not self.reward and "rewards" not in self.python_inputs:
            names = ", ".join(tool.name for tool in self.tools)
            raise ValueError(
                f"tools={names} needs a reward for the final completion; set reward=... and data.file=..., such as "
                "reward=numeric data.file=problems.jsonl"
            )
        if self.collector.max_turns == 1:
            raise ValueError(
                "collector.max_turns=1 leaves no turn after a tool call; set it to 2 or more, or remove tools"
            )
        return self

    @model_validator(mode="after")
    def _can_generate(self) -> Self:
        if self.policy.dtensor_cfg.sequence_parallel and self.policy.generation.placement == "policy":
            raise ValueError(
                "policy.dtensor_cfg.sequence_parallel=true splits rows by tokens, but generation adds one token at a "
                "time; turn it off, or set policy.generation.placement=separate"
            )
        return self

    @model_validator(mode="after")
    def _sleeps_between_steps(self) -> Self:
        staleness = self.update.async_.max_staleness
        if staleness > 0 and self.policy.generation.sleep:
            raise ValueError(
                "policy.generation.sleep=true frees GPU memory between generation and refit, but with "
                f"{self.algorithm}.async.max_staleness={staleness} generation never stops; remove sleep, or set "
                "max_staleness=0"
            )
        return self

    @model_validator(mode="after")
    def _can_overlap(self) -> Self:
        staleness = self.update.async_.max_staleness
        asked = f"{self.algorithm}.async.max_staleness={staleness}"
        if staleness == 0:
            return self
        if self.policy.generation.placement == "policy":
            raise ValueError(
                f"{asked} samples while the policy trains, but with policy.generation.placement=policy the same "
                "processes do both; set policy.generation.placement=separate"
            )
        if self.collector.refill_rounds > 0:
            raise ValueError(
                f"{asked} and collector.refill_rounds={self.collector.refill_rounds} exclude each other, because the "
                "groups of a step are drawn long before their rewards are known; set refill_rounds=0, and "
                f"{self.algorithm}.drop_groups_without_signal=true"
            )
        return self

    @model_validator(mode="after")
    def _reads_no_completions(self) -> Self:
        if unused := self._set_in_data("completion", *PREFERENCE_COLUMNS):
            raise ValueError(
                f"{unused} would have no effect, because the policy samples its completions; remove the setting, or "
                "train on the column with `lucidrl sft` or `lucidrl dpo`"
            )
        return self

    @property
    def num_epochs(self) -> int:
        return self.update.num_epochs

    def _row_factors(self) -> Arithmetic:
        return [
            ("prompts per step", self.collector.prompts_per_step, "collector.prompts_per_step"),
            ("samples per prompt", self.collector.samples_per_prompt, "collector.samples_per_prompt"),
        ]


class GRPORunConfig(RolloutRunConfig):
    """`lucidrl grpo`"""

    algorithm = "grpo"
    run_class = "lucidrl.recipes.language.GRPORun"
    trainer = "GRPOTrainer"
    grpo: GRPOConfig = GRPOConfig()
    """The algorithm."""


class DistillRunConfig(RolloutRunConfig):
    """`lucidrl distill`"""

    algorithm = "distill"
    run_class = "lucidrl.recipes.distill.DistillRun"
    trainer = "DistillTrainer"
    distill: DistillConfig = DistillConfig()
    """The algorithm."""
    teacher: TeacherConfig = TeacherConfig()
    """The model that scores the samples of the policy, the student."""

    @property
    def title(self) -> str:
        return f"{super().title}, teacher {self.teacher.model_name}"

    @property
    def worker_names(self) -> list[str]:
        separate = self.teacher.num_workers if self.teacher.placement == "separate" else 0
        return [*super().worker_names, *(worker_name(TEACHER, rank) for rank in range(separate))]


class ExampleRunConfig(TextRunConfig, ABC):
    """Settings of runs that train on written rows."""

    checkpoint: SFTCheckpointConfig = SFTCheckpointConfig()
    """When checkpoints are written and which are kept."""
    scores_completions: ClassVar[bool] = False
    """Whether settings that only scoring reads are allowed."""

    @property
    def steps(self) -> ExampleStepsConfig:
        """The algorithm's section."""
        section: ExampleStepsConfig = getattr(self, self.algorithm)
        return section

    @model_validator(mode="after")
    def _scores_no_completions(self) -> Self:
        if self.scores_completions:
            return self
        command = f"`lucidrl {command_of(self.algorithm)}` learns written completions"
        if self.reward:
            names = ", ".join(reward.name for reward in self.reward)
            raise ValueError(
                f"reward={names} would have no effect, because {command} and scores nothing; remove the setting, or "
                "train with `lucidrl grpo`"
            )
        if self.tool_use != ToolUseConfig():
            raise ValueError(
                f"tool_use would have no effect, because {command} and executes no calls; remove the setting"
            )
        if unused := self._set_in_data("answer"):
            raise ValueError(
                f"{unused} would have no effect, because only rewards read it; remove the setting, or name the column "
                f"to learn with data.{self.learned_column}=..."
            )
        return self

    learned_column: ClassVar[str] = "completion"
    """The setting that names the column to learn."""

    def _workers_without_use(self) -> str:
        """Name settings that would start workers to generate or score completions; empty if there are none."""
        generation, num_workers = self.policy.generation, self.env.num_workers
        unused = [f"env.num_workers={num_workers}"] if num_workers > 1 else []
        if generation.placement == "separate":
            unused.append("policy.generation.placement=separate")
        return " and ".join(unused)

    def _row_factors(self) -> Arithmetic:
        return [("examples per step", self.steps.examples_per_step, f"{self.algorithm}.examples_per_step")]


class SFTRunConfig(ExampleRunConfig):
    """`lucidrl sft`"""

    algorithm = "sft"
    run_class = "lucidrl.recipes.language.SFTRun"
    trainer = "SFTTrainer"
    sft: SFTConfig = SFTConfig()
    """The algorithm."""

    @model_validator(mode="after")
    def _file_needs_no_generation(self) -> Self:
        if self.has_rows and (unused := self._workers_without_use()) and not self.scores_completions:
            source, title = ("data.file", f"={self.data.title}") if self.data.file is not None else ("dataset", "")
            raise ValueError(
                f"{unused} would start workers that generate or score completions, but a run on {source}{title} needs "
                f"none; remove the setting, or {source}"
            )
        return self

    @model_validator(mode="after")
    def _reads_no_preferences(self) -> Self:
        if unused := self._set_in_data(*PREFERENCE_COLUMNS):
            raise ValueError(
                f"{unused} would have no effect, because SFT learns one completion per row; name its column with "
                "data.completion=..., or train with `lucidrl dpo`"
            )
        return self


class EvaluatedSFTConfig(SFTRunConfig):
    """Settings of an SFT run whose model is evaluated: completions are generated and scored."""

    scores_completions = True


class ControlEnvConfig(Config):
    """The task."""

    name: str = "CartPole-v1"
    """Id of a gymnasium environment; `module:Id` first imports the module that registers it."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `gymnasium.make`."""
    num_envs: PositiveInt = 8
    """Number of environments; they step in this process, one after the other."""


class FrameCollectorConfig(Config):
    """Frames per step."""

    frames_per_batch: PositiveInt = 2048
    """Frames (environment steps) per training step, summed over all environments."""


class PPORunConfig(BaseRunConfig):
    """`lucidrl ppo`"""

    algorithm = "ppo"
    run_class = "lucidrl.recipes.control.PPORun"
    trainer = "PPOTrainer"
    validated_on = "greedy"
    num_threads: NumThreads | None = 1
    """CPU threads of torch; null lets torch decide. Small networks are fastest with one thread. The number changes
    results in the last bits."""
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
            (
                "optimizer steps per step",
                num_updates,
                "ppo.num_epochs x frames per step / ppo.minibatch_frames",
            ),
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
