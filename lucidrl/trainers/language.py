"""Trainers of language models and reward models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Unpack

from lucidrl.recipes.arguments import (
    Dataset,
    DPOOptions,
    GRPOOptions,
    PreferenceOptions,
    Reward,
    Settings,
    SFTOptions,
)
from lucidrl.recipes.callbacks import Callback
from lucidrl.recipes.configs import DistillRunConfig, GRPORunConfig, SFTRunConfig, TextRunConfig
from lucidrl.recipes.preference_configs import DPORunConfig, RewardModelRunConfig
from lucidrl.trainers.base import TEXT_SETTINGS, CommonArguments, LanguageTrainer, TextTrainer, Trainer


class GRPOTrainer(TextTrainer):
    """Trains a language model with GRPO; the same as `lucidrl grpo`.

    Args:
        model: a Hugging Face folder, or `embedded`.
        rewards: functions that score completions, names of rewards, or a list of both; default: the environment
            `env.name` scores them.
        dataset: prompts as a file or as rows; default: the prompts of the environment.
        config: other settings, as a nested mapping, a `GRPORunConfig` or the path of a YAML file. A mapping changes
            single settings; a config object or file replaces the default preset.
        preset: name of the preset to start from. `config` overrides the preset; other arguments override both.
        callbacks: called during the run.
        display: show the run on the terminal or in the notebook; with False it is only logged.
        options: see `GRPOOptions`.

    Raises:
        ConfigError: an argument or a setting is wrong; the message lists all errors.

    Example:
        >>> trainer = GRPOTrainer("path/to/model", rewards=[exact], dataset="train.parquet", prompt="question")
        >>> trainer.train()
        >>> trainer.save("out")
    """

    _schema: ClassVar[type[TextRunConfig]] = GRPORunConfig
    _settings: ClassVar = {
        **TEXT_SETTINGS,
        "rewards": ["reward"],
        "answer": ["data.answer"],
        "max_steps": ["grpo.max_steps"],
    }

    def __init__(
        self,
        model: str | Path | None = None,
        rewards: Reward | Sequence[Reward] | None = None,
        dataset: Dataset | None = None,
        *,
        config: Settings | None = None,
        preset: str | None = None,
        callbacks: Sequence[Callback] = (),
        display: bool = True,
        **options: Unpack[GRPOOptions],
    ) -> None:
        arguments = {"model": model, "rewards": rewards, "dataset": dataset, **options}
        super().__init__(arguments, CommonArguments(config, preset, callbacks, display))


class DistillTrainer(GRPOTrainer):
    """`lucidrl distill`: trains a model on its samples with a `teacher`; other arguments are those of `GRPOTrainer`."""

    _schema = DistillRunConfig
    _settings: ClassVar = GRPOTrainer._settings | {
        "teacher": ["teacher.model_name"],
        "max_steps": ["distill.max_steps"],
    }


class SFTTrainer(TextTrainer):
    """Fine-tunes a language model on written examples; the same as `lucidrl sft`.

    Args:
        model: a Hugging Face folder, or `embedded`.
        dataset: examples as a file or as rows; default: the prompts of the environment with their answers.
        config: see `GRPOTrainer`, with `SFTRunConfig`.
        preset: see `GRPOTrainer`.
        callbacks: see `GRPOTrainer`.
        display: see `GRPOTrainer`.
        options: see `SFTOptions`.
    """

    _schema = SFTRunConfig
    _settings: ClassVar = {**TEXT_SETTINGS, "completion": ["data.completion"], "max_steps": ["sft.max_steps"]}

    def __init__(
        self,
        model: str | Path | None = None,
        dataset: Dataset | None = None,
        *,
        config: Settings | None = None,
        preset: str | None = None,
        callbacks: Sequence[Callback] = (),
        display: bool = True,
        **options: Unpack[SFTOptions],
    ) -> None:
        arguments = {"model": model, "dataset": dataset, **options}
        super().__init__(arguments, CommonArguments(config, preset, callbacks, display))


PREFERENCE_SETTINGS = {**TEXT_SETTINGS, "chosen": ["data.chosen"], "rejected": ["data.rejected"]}


class DPOTrainer(LanguageTrainer):
    """Trains a language model on preferences with DPO, IPO or KTO; the same as `lucidrl dpo`.

    Args:
        model: a Hugging Face folder, or `embedded`; also the reference policy.
        dataset: preferences as a file or as rows with `prompt`, `chosen` and `rejected`.
        config: see `GRPOTrainer`, with `DPORunConfig`.
        preset: see `GRPOTrainer`.
        callbacks: see `GRPOTrainer`.
        display: see `GRPOTrainer`.
        options: see `DPOOptions`.

    Example:
        >>> trainer = DPOTrainer("path/to/model", dataset="preferences.jsonl", beta=0.1)
        >>> trainer.train()
        >>> trainer.save("out")
    """

    _schema = DPORunConfig
    _settings: ClassVar = {
        **PREFERENCE_SETTINGS,
        "loss": ["dpo.loss"],
        "beta": ["dpo.beta"],
        "reference": ["dpo.reference"],
        "max_steps": ["dpo.max_steps"],
    }

    def __init__(
        self,
        model: str | Path | None = None,
        dataset: Dataset | None = None,
        *,
        config: Settings | None = None,
        preset: str | None = None,
        callbacks: Sequence[Callback] = (),
        display: bool = True,
        **options: Unpack[DPOOptions],
    ) -> None:
        arguments = {"model": model, "dataset": dataset, **options}
        super().__init__(arguments, CommonArguments(config, preset, callbacks, display))


class RewardModelTrainer(Trainer):
    """Trains a reward model on preferences; the same as `lucidrl reward-model`.

    Args:
        model: a Hugging Face folder of a language model or reward model, or `embedded`.
        dataset: preferences as a file or as rows with `prompt`, `chosen` and `rejected`.
        config: see `GRPOTrainer`, with `RewardModelRunConfig`.
        preset: see `GRPOTrainer`.
        callbacks: see `GRPOTrainer`.
        display: see `GRPOTrainer`.
        options: see `PreferenceOptions`.
    """

    _schema = RewardModelRunConfig
    _settings: ClassVar = {**PREFERENCE_SETTINGS, "max_steps": ["reward_model.max_steps"]}

    def __init__(
        self,
        model: str | Path | None = None,
        dataset: Dataset | None = None,
        *,
        config: Settings | None = None,
        preset: str | None = None,
        callbacks: Sequence[Callback] = (),
        display: bool = True,
        **options: Unpack[PreferenceOptions],
    ) -> None:
        arguments = {"model": model, "dataset": dataset, **options}
        super().__init__(arguments, CommonArguments(config, preset, callbacks, display))
