"""Settings that all runs of language models share, and the batch sizes that follow from them."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Self

from pydantic import Field, model_validator

from lucidrl.algorithms.config import ValidationConfig
from lucidrl.data.config import SETTINGS_OF_ROWS, DataConfig
from lucidrl.distributed.config import ClusterConfig
from lucidrl.envs.text.config import EnvConfig
from lucidrl.models.policy.config import DynamicBatchingConfig, PolicyConfig, SequencePackingConfig
from lucidrl.recipes.base_config import Arithmetic, BaseRunConfig
from lucidrl.recipes.tracking import TextTrackingConfig
from lucidrl.rewards.config import Rewards, task_title, with_reward_env
from lucidrl.tools.config import DEFAULT_MAX_TURNS, Tools, ToolUseConfig
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
    tools: Tools = ()
    """Functions that the model may call before it answers: `calculator`, `python`, the import path of your function,
    `module:function`; a mapping with `name`, `timeout_s` and more; or a list of these. GRPO needs `reward` too."""
    tool_use: ToolUseConfig = ToolUseConfig()
    """How tool calls are executed, and what becomes of calls that fail."""
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

    @property
    def has_tools(self) -> bool:
        """Whether the model may call tools, of the settings or of a Python program."""
        return bool(self.tools) or "tools" in self.python_inputs

    @property
    def max_turns(self) -> int:
        """Most completions per sample."""
        return DEFAULT_MAX_TURNS if self.has_tools else 1

    @model_validator(mode="after")
    def _tool_use_has_tools(self) -> Self:
        if self.tool_use != ToolUseConfig() and not self.has_tools:
            raise ValueError("tool_use would have no effect without tools; set tools=..., or remove tool_use")
        return self

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
        epochs = f"{self.algorithm}.num_epochs x " if self.num_epochs > 1 else ""
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
