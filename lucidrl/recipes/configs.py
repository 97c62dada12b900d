"""Configuration of whole runs, and the arithmetic that must hold between their parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, PrivateAttr, model_validator

from lucidrl.algorithms.config import GRPOConfig, SFTConfig, ValidationConfig
from lucidrl.checkpoint.config import CheckpointConfig
from lucidrl.collectors.config import TextCollectorConfig
from lucidrl.distributed.config import ClusterConfig
from lucidrl.envs.text.config import EnvConfig
from lucidrl.errors import ConfigError
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.recipes.profile import ProfileConfig
from lucidrl.recipes.tracking import TextTrackingConfig, TrackingConfig
from lucidrl.utils.config import Config, dump_yaml
from lucidrl.utils.nsys import DRIVER, GENERATION, POLICY, worker_name

NumThreads = Annotated[int, Field(ge=1, le=1024)]
"""More threads than any machine has cores for are a mistake, and may be more than the system lets a process have."""

PRESETS = Path(str(files("lucidrl.recipes").joinpath("presets")))


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
    """What every run has."""

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

    @property
    @abstractmethod
    def max_steps(self) -> int:
        """Training steps of the run."""

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

    @property
    @abstractmethod
    def rows_per_step(self) -> int:
        """Conversations that a step trains on."""

    @property
    def title(self) -> str:
        return f"{self.policy.model_name} on {self.env.name}"

    def arithmetic(self) -> Arithmetic:
        policy, rows = self.policy, self.rows_per_step
        global_batch = policy.train_global_batch_size or rows
        return [
            *self._rows(),
            ("rows an optimizer step", global_batch, "policy.train_global_batch_size"),
            ("optimizer steps a step", rows // global_batch, "rows a step / rows an optimizer step"),
            self._micro_batch(),
            *self._ranks(),
        ]

    @abstractmethod
    def _rows(self) -> Arithmetic:
        """Where the rows of a step come from."""

    def _micro_batch(self) -> tuple[str, Any, str]:
        policy = self.policy
        for name, batching in (
            ("sequence_packing", policy.sequence_packing),
            ("dynamic_batching", policy.dynamic_batching),
        ):
            if batching.enabled:
                budget = f"up to {batching.train_mb_tokens}"
                return "tokens a micro-batch", budget, f"policy.{name}.train_mb_tokens"
        return "rows a micro-batch", str(policy.train_micro_batch_size), "policy.train_micro_batch_size"

    def _ranks(self) -> Arithmetic:
        ranks = self.cluster.num_workers
        if ranks == 1:
            return []
        parallel = self.policy.dtensor_cfg
        shared = parallel.context_parallel_size * parallel.tensor_parallel_size
        return [
            ("ranks", ranks, "cluster.num_workers"),
            ("ranks with rows of their own", ranks // shared, "ranks / (context x tensor parallel)"),
        ]


class GRPORunConfig(TextRunConfig):
    """`lucidrl grpo`"""

    grpo: GRPOConfig = GRPOConfig()
    """The algorithm."""
    collector: TextCollectorConfig = TextCollectorConfig()
    """How many conversations make a step."""

    @property
    def max_steps(self) -> int:
        return self.grpo.max_steps

    @property
    def rows_per_step(self) -> int:
        return self.collector.prompts_per_step * self.collector.samples_per_prompt

    @property
    def updates_per_step(self) -> int:
        return self.rows_per_step // (self.policy.train_global_batch_size or self.rows_per_step)

    @model_validator(mode="after")
    def _can_generate(self) -> GRPORunConfig:
        if self.policy.dtensor_cfg.sequence_parallel and self.policy.generation.placement == "policy":
            raise ValueError(
                "policy.dtensor_cfg.sequence_parallel=true shares the tokens of rows, but generation adds single ones; "
                "turn it off, or set policy.generation.placement=separate"
            )
        return self

    @model_validator(mode="after")
    def _rows_divide(self) -> GRPORunConfig:
        collector = self.collector
        _check_divides(
            self.rows_per_step,
            self.policy.train_global_batch_size,
            f"collector.prompts_per_step={collector.prompts_per_step} x "
            f"collector.samples_per_prompt={collector.samples_per_prompt} = {self.rows_per_step} rows",
        )
        return self

    def _rows(self) -> Arithmetic:
        return [
            ("prompts a step", self.collector.prompts_per_step, "collector.prompts_per_step"),
            ("samples a prompt", self.collector.samples_per_prompt, "collector.samples_per_prompt"),
            ("rows a step", self.rows_per_step, "prompts x samples"),
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

    checkpoint: SFTCheckpointConfig = SFTCheckpointConfig()
    """Checkpoints."""
    sft: SFTConfig = SFTConfig()
    """The algorithm."""
    data: SFTDataConfig = SFTDataConfig()
    """Conversations to learn from."""

    @property
    def max_steps(self) -> int:
        return self.sft.max_steps

    @property
    def title(self) -> str:
        return f"{self.policy.model_name} on {self.data.file or self.env.name}"

    @property
    def rows_per_step(self) -> int:
        return self.sft.examples_per_step

    @model_validator(mode="after")
    def _rows_divide(self) -> SFTRunConfig:
        rows = self.rows_per_step
        _check_divides(rows, self.policy.train_global_batch_size, f"sft.examples_per_step={rows} rows")
        return self

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

    def _rows(self) -> Arithmetic:
        return [("rows a step", self.rows_per_step, "sft.examples_per_step")]


def _check_divides(rows: int, global_batch: int | None, what: str) -> None:
    if global_batch is not None and rows % global_batch:
        raise ValueError(
            f"{what} do not split into policy.train_global_batch_size={global_batch}; "
            "make the rows of a step a multiple of it, or leave it unset for one optimizer step a step"
        )


def preset_path(name: str) -> Path:
    """The file of a preset.

    Raises:
        ConfigError: listing the presets there are.
    """
    known = {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}
    if name not in known:
        raise ConfigError(f"there is no preset {name!r}; the presets are {', '.join(known)}")
    return known[name]
