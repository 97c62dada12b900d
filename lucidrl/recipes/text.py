"""The recipes for language models."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from lucidrl.models.policy.config import EMBEDDED_MODELS
from lucidrl.recipes.configs import GRPORunConfig, SFTRunConfig, TextRunConfig, default_grpo_preset
from lucidrl.recipes.preflight import preflight
from lucidrl.recipes.recipe import Recipe
from lucidrl.recipes.wiring import run_grpo, run_sft

P = ParamSpec("P")
R = TypeVar("R")


def silence_progress_bars() -> None:
    """Loading and saving a model is not worth a bar among our own lines."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def _quietly(function: Callable[P, R]) -> Callable[P, R]:
    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        silence_progress_bars()
        return function(*args, **kwargs)

    return call


def _ask(config: TextRunConfig, folder: Path) -> list[list[str]]:
    question = "12+30=" if config.policy.model_name in EMBEDDED_MODELS else "your question"
    return [["lucidrl", "generate", str(folder), question]]


GRPO_RECIPE = Recipe(
    name="grpo",
    schema=GRPORunConfig,
    default_preset=default_grpo_preset,
    preflight=_quietly(preflight),
    run=_quietly(run_grpo),
    validated_on="held-out",
    next_commands=_ask,
)
SFT_RECIPE = Recipe(
    name="sft",
    schema=SFTRunConfig,
    default_preset=lambda overrides: None,
    preflight=_quietly(preflight),
    run=_quietly(run_sft),
    validated_on="held-out",
    next_commands=_ask,
)
