"""Settings of whole runs, and the batch sizes that follow from them."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar, Self

from pydantic import Field, PositiveInt, model_validator

from lucidrl.algorithms.config import (
    ControlValidationConfig,
    GRPOConfig,
    PPOConfig,
    SFTConfig,
    ValidationConfig,
)
from lucidrl.checkpoint.config import SFTCheckpointConfig
from lucidrl.collectors.config import TextCollectorConfig
from lucidrl.data.config import SETTINGS_OF_ROWS, DataConfig
from lucidrl.distributed.config import ClusterConfig
from lucidrl.envs.text.config import EnvConfig
from lucidrl.models.control.config import ControlPolicyConfig, CriticConfig
from lucidrl.models.policy.config import DynamicBatchingConfig, PolicyConfig, SequencePackingConfig
from lucidrl.recipes.base_config import Arithmetic, BaseRunConfig, NumThreads
from lucidrl.recipes.tracking import TextTrackingConfig
from lucidrl.rewards.config import Rewards, task_title, with_reward_env
from lucidrl.utils.config import Config
from lucidrl.utils.nsys import DRIVER, ENV, GENERATION, POLICY, worker_name


class TextRunConfig(BaseRunConfig):
    """Settings of every run of a language model."""

    policy: PolicyConfig = PolicyConfig()
    """The model to train."""
    cluster: ClusterConfig = ClusterConfig()
    """Worker processes and the Ray cluster."""
    env: EnvConfig = EnvConfig()
    """The environment: it scores completions, and has the prompts unless `data.file` is set."""
    data: DataConfig = DataConfig()
    """Prompts or examples: files, columns, filters and the split."""
    reward: Rewards = ()
    """Reward functions and verifiers that score completions of your data, instead of `env.name`: the import path of a
    function, `module:function`; a verifier such as `math`; an LLM judge, `judge`; a mapping with `name`, `weight`,
    `kwargs` and more; or a list of these."""
    validation: ValidationConfig = ValidationConfig()
    """Validation on held-out prompts."""
    tracking: TextTrackingConfig = TextTrackingConfig()
    """Metrics, samples and trackers."""
    python_inputs: dict[str, str] = Field(default_factory=dict)
    """Description of the objects that a Python program passed to its trainer, such as rows or reward functions. The
    trainer writes this setting, and only a trainer can resume such a run."""

    _reward_env = model_validator(mode="before")(with_reward_env)

    @property
    def worker_names(self) -> list[str]:
        generation = self.policy.generation
        num_generators = generation.num_workers if generation.placement == "separate" else 0
        return [
            *(worker_name(POLICY, rank) for rank in range(self.cluster.num_workers)),
            *(worker_name(GENERATION, number) for number in range(num_generators)),
            *(worker_name(ENV, number) for number in range(self.env.num_workers if self.env.is_isolated else 0)),
            DRIVER,
        ]

    @abstractmethod
    def _row_factors(self) -> Arithmetic:
        """Return the settings whose product is the number of rows per step."""

    @property
    def rows_per_step(self) -> int:
        """Samples that a training step trains on."""
        return math.prod(value for _, value, _ in self._row_factors())

    @property
    def title(self) -> str:
        return f"{self.policy.model_name} on {task_title(self)}"

    @property
    def num_epochs(self) -> int:
        """Optimizer epochs over the rows of a training step."""
        return 1

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per training step."""
        rows = self.rows_per_step
        return self.num_epochs * (rows // (self.policy.train_global_batch_size or rows))

    @property
    def token_batching(self) -> tuple[str, SequencePackingConfig | DynamicBatchingConfig] | None:
        """(Key, settings) of the enabled batching by tokens; None if micro-batches have a fixed number of rows."""
        for name in ("sequence_packing", "dynamic_batching"):
            batching = getattr(self.policy, name)
            if batching.enabled:
                return f"policy.{name}", batching
        return None

    def arithmetic(self) -> Arithmetic:
        policy, ranks = self.policy, self.cluster.num_workers
        rows = self.rows_per_step * self.num_epochs // self.updates_per_step
        epochs = "grpo.num_epochs x " if self.num_epochs > 1 else ""
        table = [
            *self._row_factors(),
            ("rows per step", self.rows_per_step, "product of the above"),
            ("rows per optimizer step", rows, "policy.train_global_batch_size"),
            (
                "optimizer steps per step",
                self.updates_per_step,
                f"{epochs}rows per step / rows per optimizer step",
            ),
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

    @property
    def has_rows(self) -> bool:
        """Whether the run reads rows of a file or a Python program, instead of the prompts of the environment."""
        return self.data.file is not None or "dataset" in self.python_inputs

    @model_validator(mode="after")
    def _settings_of_rows_have_rows(self) -> Self:
        if self.has_rows:
            return self
        if self.data.validation_file is not None:
            raise ValueError(
                f"data.validation_file={self.data.validation_file} needs training rows too; set data.file=..."
            )
        if unused := self._set_in_data(*SETTINGS_OF_ROWS):
            raise ValueError(
                f"{unused} would have no effect, because the prompts come from the environment {self.env.name}; set "
                "data.file=... too, or remove the setting"
            )
        return self

    def _set_in_data(self, *names: str) -> str:
        """Name those of these settings of `data` that are set; empty if none is."""
        values = {f"data.{name}": getattr(self.data, name) for name in names}
        return " and ".join(f"{key}={value}" for key, value in values.items() if value not in (None, {}))

    @model_validator(mode="after")
    def _rows_divide(self) -> Self:
        rows, global_batch = self.rows_per_step, self.policy.train_global_batch_size
        if global_batch is not None and rows % global_batch:
            factors = " x ".join(f"{setting}={value}" for _, value, setting in self._row_factors())
            raise ValueError(
                f"{rows} rows per step ({factors}) do not split into "
                f"policy.train_global_batch_size={global_batch}; make the rows a multiple of it, or leave it unset for "
                "one optimizer step per training step"
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

    @model_validator(mode="after")
    def _can_generate(self) -> GRPORunConfig:
        if self.policy.dtensor_cfg.sequence_parallel and self.policy.generation.placement == "policy":
            raise ValueError(
                "policy.dtensor_cfg.sequence_parallel=true splits rows by tokens, but generation adds one token at a "
                "time; turn it off, or set policy.generation.placement=separate"
            )
        return self

    @model_validator(mode="after")
    def _reads_no_completions(self) -> GRPORunConfig:
        if unused := self._set_in_data("completion"):
            raise ValueError(
                f"{unused} would have no effect, because GRPO samples its completions; remove the setting, or train "
                "on the column with `lucidrl sft`"
            )
        return self

    @property
    def num_epochs(self) -> int:
        return self.grpo.num_epochs

    def _row_factors(self) -> Arithmetic:
        return [
            ("prompts per step", self.collector.prompts_per_step, "collector.prompts_per_step"),
            ("samples per prompt", self.collector.samples_per_prompt, "collector.samples_per_prompt"),
        ]


class SFTRunConfig(TextRunConfig):
    """`lucidrl sft`"""

    algorithm = "sft"
    run_class = "lucidrl.recipes.language.SFTRun"
    checkpoint: SFTCheckpointConfig = SFTCheckpointConfig()
    """When checkpoints are written and which are kept."""
    sft: SFTConfig = SFTConfig()
    """The algorithm."""
    scores_completions: ClassVar[bool] = False
    """Whether settings that only scoring reads are allowed."""

    @model_validator(mode="after")
    def _scores_no_completions(self) -> SFTRunConfig:
        if self.scores_completions:
            return self
        if self.reward:
            names = ", ".join(reward.name for reward in self.reward)
            raise ValueError(
                f"reward={names} would have no effect, because SFT learns written examples and scores nothing; remove "
                "the setting, or train with `lucidrl grpo`"
            )
        if unused := self._set_in_data("answer"):
            raise ValueError(
                f"{unused} would have no effect, because only rewards read it; remove the setting, or name the column "
                "to learn with data.completion=..."
            )
        return self

    @model_validator(mode="after")
    def _file_needs_no_generation(self) -> SFTRunConfig:
        generation, num_workers = self.policy.generation, self.env.num_workers
        unused = [f"env.num_workers={num_workers}"] if num_workers > 1 else []
        if generation.placement == "separate":
            unused.append("policy.generation.placement=separate")
        if self.has_rows and unused and not self.scores_completions:
            source, title = ("data.file", f"={self.data.title}") if self.data.file is not None else ("dataset", "")
            raise ValueError(
                f"{' and '.join(unused)} would start workers that generate or score completions, but a run on "
                f"{source}{title} needs none; remove the setting, or {source}"
            )
        return self

    def _row_factors(self) -> Arithmetic:
        return [("examples per step", self.sft.examples_per_step, "sft.examples_per_step")]


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
