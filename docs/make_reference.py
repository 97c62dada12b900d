"""Write the generated pages: every setting from the config classes, every command from the command line itself.

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

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lucidrl.cli import app
from lucidrl.envs.text.arithmetic import ArithmeticConfig
from lucidrl.envs.text.guessing import GuessingConfig
from lucidrl.envs.text.word_problems import WordProblemsConfig
from lucidrl.models.policy.config import LoraConfig, ParameterGroupConfig, SchedulerConfig
from lucidrl.recipes.configs import (
    BaseRunConfig,
    DistillRunConfig,
    GRPORunConfig,
    PPORunConfig,
    RolloutRunConfig,
    SFTRunConfig,
    TextRunConfig,
)
from lucidrl.recipes.preference_configs import DPORunConfig, RewardModelRunConfig
from lucidrl.recipes.tracking import WandbTracking
from lucidrl.rewards.config import ModelRewardConfig
from lucidrl.tools.config import ToolConfig
from lucidrl.utils.logger.config import WandbConfig

SETTINGS_PAGE = Path(__file__).with_name("configuration-reference.md")
COMMANDS_PAGE = Path(__file__).with_name("command-line.md")
SETTINGS_INTRODUCTION = """\
# All settings

Generated from the config classes by `python docs/make_reference.py`; do not edit this page.
[configuration.md](configuration.md) explains how to set and merge them. Presets change some of these defaults;
`lucidrl check` prints the settings of a run.
"""
COMMANDS_INTRODUCTION = """\
# Command line

Generated from the command line by `python docs/make_reference.py`; do not edit this page. The exit status is 0 after
success, 2 after an error that you can fix, 130 after a second Ctrl-C, and 1 after any other error.
"""


@dataclass(frozen=True)
class Section:
    """A heading, and the config class whose keys are listed below it."""

    title: str
    schema: type[BaseModel]
    prefix: str = ""
    beside: type[BaseModel] | None = None
    """Omit the keys that are identical in this class."""


SECTIONS = (
    Section("Every run", BaseRunConfig),
    Section(
        "Runs of language models: `grpo`, `distill`, `sft`, `dpo` and `reward-model`",
        TextRunConfig,
        beside=BaseRunConfig,
    ),
    Section("`lucidrl grpo`", GRPORunConfig, beside=TextRunConfig),
    Section("`lucidrl distill`, which has `collector` too", DistillRunConfig, beside=RolloutRunConfig),
    Section("`lucidrl sft`", SFTRunConfig, beside=TextRunConfig),
    Section("`lucidrl dpo`", DPORunConfig, beside=TextRunConfig),
    Section("`lucidrl reward-model`", RewardModelRunConfig, beside=TextRunConfig),
    Section("Options of `reward=model:FOLDER`", ModelRewardConfig, prefix="reward.kwargs."),
    Section("`lucidrl ppo`", PPORunConfig, beside=BaseRunConfig),
    Section("`policy.lora`", LoraConfig, prefix="policy.lora."),
    Section("Each entry of `policy.optimizer.groups`", ParameterGroupConfig),
    Section("Each entry of `policy.scheduler`", SchedulerConfig),
    Section("Each entry of `tools`", ToolConfig),
    Section("Environment `arithmetic`", ArithmeticConfig, prefix="env.kwargs."),
    Section("Environment `guessing`", GuessingConfig, prefix="env.kwargs."),
    Section("Environment `word_problems`", WordProblemsConfig, prefix="env.kwargs."),
)


def reference() -> str:
    """The page of settings."""
    return "\n".join([SETTINGS_INTRODUCTION, *(_section(section) for section in SECTIONS), _wandb_section()])


def commands() -> str:
    """The page of commands."""
    group: Any = typer.main.get_command(app)
    return "\n".join([COMMANDS_INTRODUCTION, *(_command(name, command) for name, command in _commands(group))])


def _commands(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """All commands, those of groups by both names."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{above}{name} ")
        else:
            yield f"{above}{name}", command


def _command(name: str, command: Any) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    usage = " ".join(["lucidrl", name, "[OPTIONS]", *(argument.metavar for argument in arguments)])
    rows = [f"| `{argument.metavar}` | | {_one_line(argument.help)} |" for argument in arguments]
    for option in options:
        default = "" if option.default is None else _code(str(option.default))
        rows.append(f"| `{option.opts[0]}` | {default} | {_one_line(option.help)} |")
    lines = [f"## lucidrl {name}\n", f"```text\n{usage}\n```\n", inspect.cleandoc(command.help), ""]
    return "\n".join([*lines, "| argument | default | meaning |", "| --- | --- | --- |", *rows, ""])


def _section(section: Section) -> str:
    known = set(_rows(section.beside, section.prefix)) if section.beside is not None else set()
    rows = [row for row in _rows(section.schema, section.prefix) if row not in known]
    return "\n".join([f"## {section.title}\n", "| key | default | meaning |", "| --- | --- | --- |", *rows, ""])


def _wandb_section() -> str:
    """The settings of `WandbConfig` that `WandbTracking` passes on to `wandb.init`."""
    [definition] = ast.parse(inspect.getsource(WandbConfig)).body
    assert isinstance(definition, ast.ClassDef)
    rows = []
    for key, following in pairwise([*definition.body, None]):
        if not (isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name)):
            continue
        meaning = ast.literal_eval(following.value) if isinstance(following, ast.Expr) else "As for `wandb.init`."
        if key.target.id not in WandbTracking.model_fields:
            rows.append(f"| `tracking.wandb.{key.target.id}` | `null` | {_one_line(meaning)} |")
    title = "## Further arguments of `wandb.init`, in every run\n"
    return "\n".join([title, "| key | default | meaning |", "| --- | --- | --- |", *rows, ""])


def _rows(schema: type[BaseModel], prefix: str) -> list[str]:
    return [
        f"| `{prefix}{key}` | {_code(_default(field))} | {_one_line(field.description or '')} |"
        for key, field in _keys(schema)
    ]


def _keys(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted names of all settings; a nested config is replaced by its own settings."""
    for attribute, field in schema.model_fields.items():
        name, annotation = field.alias or attribute, field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _keys(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _default(field: FieldInfo) -> str:
    """The default value as YAML."""
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
    SETTINGS_PAGE.write_text(reference(), encoding="utf-8")
    COMMANDS_PAGE.write_text(commands(), encoding="utf-8")
