"""Settings of runs on preferences: `lucidrl dpo` and `lucidrl reward-model`."""

from __future__ import annotations

from abc import ABC
from typing import Self

from pydantic import model_validator

from lucidrl.algorithms.config import DPOConfig, RewardModelConfig
from lucidrl.recipes.base_config import Arithmetic, command_of
from lucidrl.recipes.configs import ExampleRunConfig


class PreferenceRunConfig(ExampleRunConfig, ABC):
    """Settings of runs that train on preferences between written completions."""

    learned_column = "chosen"

    @property
    def is_paired(self) -> bool:
        """Whether every row must have a chosen and a rejected completion."""
        return True

    @model_validator(mode="after")
    def _generates_nothing(self) -> Self:
        if (unused := self._workers_without_use()) and not self.scores_completions:
            raise ValueError(
                f"{unused} would start workers that generate or score completions, but `lucidrl "
                f"{command_of(self.algorithm)}` needs none; remove the setting"
            )
        return self

    @model_validator(mode="after")
    def _updates_once_per_step(self) -> Self:
        if (rows := self.policy.train_global_batch_size) is not None:
            raise ValueError(
                f"policy.train_global_batch_size={rows} does not apply, because every step is one optimizer step on "
                f"whole pairs; remove it, and set {self.algorithm}.examples_per_step=..."
            )
        return self

    @model_validator(mode="after")
    def _reads_pairs(self) -> Self:
        if self.is_paired and (unused := self._set_in_data("completion", "label")):
            raise ValueError(
                f"{unused} would have no effect, because the rows are pairs; name the columns with data.chosen=... and "
                "data.rejected=..., or learn from single completions with `lucidrl dpo dpo.loss=kto`"
            )
        return self

    def _row_factors(self) -> Arithmetic:
        rows = "rows per pair" if self.is_paired else "rows per pair (1 per single completion)"
        return [*super()._row_factors(), (rows, 2, "chosen and rejected")]


class DPORunConfig(PreferenceRunConfig):
    """`lucidrl dpo`"""

    algorithm = "dpo"
    run_class = "lucidrl.recipes.preferences.DPORun"
    trainer = "DPOTrainer"
    dpo: DPOConfig = DPOConfig()
    """The algorithm."""

    @property
    def is_paired(self) -> bool:
        return self.dpo.loss != "kto"


class RewardModelRunConfig(PreferenceRunConfig):
    """`lucidrl reward-model`"""

    algorithm = "reward_model"
    run_class = "lucidrl.recipes.preferences.RewardModelRun"
    trainer = "RewardModelTrainer"
    reward_model: RewardModelConfig = RewardModelConfig()
    """The algorithm."""

    @model_validator(mode="after")
    def _can_hold_a_score_head(self) -> Self:
        parallel = self.policy.dtensor_cfg
        for key in ("tensor_parallel_size", "context_parallel_size"):
            if (size := getattr(parallel, key)) > 1:
                raise ValueError(
                    f"policy.dtensor_cfg.{key}={size} does not apply to a reward model, which is data parallel only; "
                    "remove it, and set cluster.num_workers=..."
                )
        if self.policy.lora is not None:
            raise ValueError(
                "policy.lora does not apply to a reward model, whose new score head needs all its weights trained; "
                "set policy.lora=null"
            )
        return self
