"""Write docs/configuration-reference.md from the config classes: every key with its default and its explanation.

python docs/make_reference.py
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lucidrl.envs.text.arithmetic import ArithmeticConfig
from lucidrl.envs.text.guessing import GuessingConfig
from lucidrl.models.policy.config import SchedulerConfig
from lucidrl.recipes.configs import BaseRunConfig, GRPORunConfig, PPORunConfig, SFTRunConfig, TextRunConfig
from lucidrl.recipes.tracking import WandbTracking
from lucidrl.utils.logger.config import WandbConfig

TARGET = Path(__file__).with_name("configuration-reference.md")
INTRODUCTION = """\
# All settings

Written by `python docs/make_reference.py` from the config classes; do not edit it by hand. How settings are given and
merged: [configuration.md](configuration.md). Presets change some of these defaults; `lucidrl check` prints what a run
would use.
"""


@dataclass(frozen=True)
class Section:
    """A heading, and the config class whose keys are listed below it."""

    title: str
    schema: type[BaseModel]
    prefix: str = ""
    beside: type[BaseModel] | None = None
    """Keys that are the same in this class are left out."""


SECTIONS = (
    Section("Every run", BaseRunConfig),
    Section("Runs of language models: `lucidrl grpo` and `lucidrl sft`", TextRunConfig, beside=BaseRunConfig),
    Section("`lucidrl grpo`", GRPORunConfig, beside=TextRunConfig),
    Section("`lucidrl sft`", SFTRunConfig, beside=TextRunConfig),
    Section("`lucidrl ppo`", PPORunConfig, beside=BaseRunConfig),
    Section("Each entry of `policy.scheduler`", SchedulerConfig),
    Section("Environment `arithmetic`", ArithmeticConfig, prefix="env.kwargs."),
    Section("Environment `guessing`", GuessingConfig, prefix="env.kwargs."),
)


def reference() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *(_section(section) for section in SECTIONS), _wandb_section()])


def _section(section: Section) -> str:
    known = set(_rows(section.beside, section.prefix)) if section.beside is not None else set()
    rows = [row for row in _rows(section.schema, section.prefix) if row not in known]
    return "\n".join([f"## {section.title}\n", "| key | default | meaning |", "| --- | --- | --- |", *rows, ""])


def _wandb_section() -> str:
    """Arguments of `wandb.init`, which `WandbTracking` accepts by the keys of `WandbConfig`."""
    [definition] = ast.parse(inspect.getsource(WandbConfig)).body
    assert isinstance(definition, ast.ClassDef)
    rows = [
        f"| `tracking.wandb.{key.target.id}` | `null` | {_one_line(ast.literal_eval(meaning.value))} |"
        for key, meaning in pairwise(definition.body)
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name) and isinstance(meaning, ast.Expr)
        if key.target.id not in WandbTracking.model_fields
    ]
    title = "## Further arguments of `wandb.init`, in every run\n"
    return "\n".join([title, "| key | default | meaning |", "| --- | --- | --- |", *rows, ""])


def _rows(schema: type[BaseModel], prefix: str) -> list[str]:
    return [
        f"| `{prefix}{key}` | {_code(_default(field))} | {_one_line(field.description or '')} |"
        for key, field in _keys(schema)
    ]


def _keys(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted names of all settings, those of nested configs in the place of the config itself."""
    for name, field in schema.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _keys(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _default(field: FieldInfo) -> str:
    """As it would be written in YAML."""
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value)).replace("'", '"')
    return str(value).replace("'", '"')


def _code(text: str) -> str:
    return f"`{text}`"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
