"""The arguments of trainers; convert them to settings (`key=value`) and to objects that settings cannot hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from pydantic import BaseModel

from lucidrl.data.interfaces import Rows
from lucidrl.errors import ConfigError, DataError
from lucidrl.recipes.callbacks import Callback
from lucidrl.recipes.configs import BaseRunConfig
from lucidrl.recipes.inputs import PythonInputs
from lucidrl.utils.config import merged_settings
from lucidrl.utils.suggestions import closest

Dataset = str | Path | Rows
"""A path or `hub:` id as in `data.file`, or rows: a list of dictionaries, a `datasets.Dataset`, or another sequence."""
Reward = str | Mapping[str, Any] | Callable[..., Any]
"""A function, or an entry of the setting `reward`: a name such as "math" or "my_rewards:exact", or a mapping."""
Tool = str | Mapping[str, Any] | Callable[..., Any]
"""A function, or an entry of the setting `tools`: a name such as "calculator" or "my_tools:search", or a mapping."""
Settings = BaseRunConfig | str | Path | Mapping[str, Any]
"""A config object, the path of a YAML file, or a nested mapping of settings."""


@dataclass(frozen=True)
class CommonArguments:
    """Arguments of every trainer that do not stand for one setting each."""

    config: Settings | None
    preset: str | None
    callbacks: Sequence[Callback]
    display: bool


class RunOptions(TypedDict, total=False):
    """Arguments of every trainer."""

    learning_rate: float
    """Learning rate of the optimizer (`policy.optimizer.kwargs.lr`)."""
    max_steps: int
    """Training steps of the run."""
    seed: int
    """Seed of the data order and of all sampling."""
    run_name: str
    """Folder of the run below `output` (`run.name`); default: the next free `exp_NNN` below `output/<algorithm>`."""
    output: str | Path
    """Parent folder of runs (`run.root`); default: `runs`."""


class GRPOOptions(RunOptions, total=False):
    """Arguments of `GRPOTrainer` and `DistillTrainer`."""

    teacher: str | Path
    """The teacher of `DistillTrainer`: a model folder or a run (`teacher.model_name`)."""
    validation_dataset: Dataset
    """Validation prompts; default: `data.validation_fraction` of `dataset`."""
    prompt: str
    """Column with the prompts (`data.prompt`)."""
    answer: str
    """Column with the reference answers (`data.answer`)."""
    tools: Sequence[Tool]
    """Functions that the model may call: functions, or entries of the setting `tools`."""


class SFTOptions(RunOptions, total=False):
    """Arguments of `SFTTrainer`."""

    validation_dataset: Dataset
    """Validation examples; default: `data.validation_fraction` of `dataset`."""
    prompt: str
    """Column with the prompts (`data.prompt`)."""
    completion: str
    """Column with the completions to learn (`data.completion`)."""
    tools: Sequence[Tool]
    """Functions that the model may call, which the prompts describe: functions, or entries of the setting `tools`."""


OTHER_NAMES = {
    "args": "config",
    "epochs": "max_steps",
    "eval_dataset": "validation_dataset",
    "lr": "learning_rate",
    "model_name": "model",
    "output_dir": "output",
    "reward": "rewards",
    "reward_funcs": "rewards",
    "steps": "max_steps",
    "train_dataset": "dataset",
}
"""Name of an argument in other libraries → name of the trainer's argument."""
_CLEAR_SIMILARITY = 0.75
_WORD = re.compile(r"[A-Za-z_/.][\w/.:-]*", re.ASCII)


def unknown_argument(name: str, trainer: str, known: Sequence[str], schema: type[BaseRunConfig]) -> str:
    """The error message for an argument that a trainer does not have; suggests the closest argument or setting."""
    paths: dict[str, list[tuple[str, ...]]] = {}
    for path in _setting_paths(schema):
        paths.setdefault(path[-1], []).append(path)
    other = OTHER_NAMES.get(name)
    meant = other if other in known else closest(name, known, _CLEAR_SIMILARITY)
    if meant is None and (setting := closest(name, paths, _CLEAR_SIMILARITY)):
        meant = " or ".join(f"config={_nested(path)}" for path in paths[setting])
    meant = meant or closest(name, known)
    hint = f"did you mean {meant}?" if meant else f"its arguments are {', '.join(known)}; pass all settings in config"
    return f"{trainer} has no argument {name}; {hint}"


def _nested(path: Sequence[str]) -> str:
    """The nested dictionary that sets this path, as Python code."""
    return f"{{{path[0]!r}: {_nested(path[1:])}}}" if path else "..."


def _setting_paths(schema: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for attribute, field in schema.model_fields.items():
        name = field.alias or attribute
        yield (*above, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _setting_paths(field.annotation, (*above, name))


def split_inputs(arguments: Mapping[str, Any]) -> tuple[PythonInputs, dict[str, Any]]:
    """Split the arguments into Python objects (rows, functions) and arguments that settings can hold.

    Raises:
        ConfigError, DataError: a value has the wrong type.
    """
    rest = {name: value for name, value in arguments.items() if value is not None}
    rows = {name: _rows(name, rest.pop(name)) for name in ("dataset", "validation_dataset") if _is_rows(rest.get(name))}
    functions = {name: _functions(name, rest) for name in ("rewards", "tools")}
    return PythonInputs(rows.get("dataset"), rows.get("validation_dataset"), **functions), rest


def _functions(name: str, arguments: dict[str, Any]) -> list[Callable[..., Any]]:
    """Return the functions of an argument that also takes names; leave only the names in `arguments`."""
    value = arguments.pop(name, [])
    entries = value if isinstance(value, list | tuple) else [value]
    for entry in entries:
        if not (callable(entry) or isinstance(entry, str | Mapping)):
            examples = {"rewards": "'math' or 'my_rewards:exact'", "tools": "'calculator' or 'my_tools:search'"}
            raise ConfigError(
                f"{name} has {entry!r}; pass functions, names such as {examples[name]}, or a list of these"
            )
    if named := [entry for entry in entries if not callable(entry)]:
        arguments[name] = named
    return [entry for entry in entries if callable(entry)]


def _is_rows(dataset: Any) -> bool:
    return dataset is not None and not isinstance(dataset, str | Path)


def _rows(name: str, rows: Any) -> Rows:
    """Return the rows; raise DataError unless they are a sequence of mappings."""
    kind = type(rows).__name__
    if isinstance(rows, Mapping):
        keys = ", ".join(map(repr, rows))
        raise DataError(
            f"{name} is a {kind}, not a sequence of rows; pass a list, or the rows under one of its keys: {keys}"
        )
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # a pandas DataFrame
        raise DataError(f"{name} is a {kind}, not a sequence of rows; pass {name}=table.to_dict('records')")
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise DataError(
            f"{name} is a {kind}, which has no length or no index; pass list({name}), or the path of a file"
        )
    if len(rows) == 0:
        raise DataError(f"{name} is empty; pass at least one row")
    if not isinstance(rows[0], Mapping):
        raise DataError(
            f"the first row of {name} is a {type(rows[0]).__name__}; pass dictionaries, or the path of a file"
        )
    return rows


def settings_of(arguments: Mapping[str, Any], keys: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the arguments as `key=value`; an argument that is None sets nothing.

    Args:
        keys: the settings that each argument sets.
    """
    return [
        f"{key}={_as_yaml(value, name)}" for name, value in arguments.items() if value is not None for key in keys[name]
    ]


def config_layer(
    config: BaseRunConfig | str | Path | Mapping[str, Any] | None, schema: type[BaseRunConfig], *, is_resumed: bool
) -> tuple[Path | dict[str, Any] | None, list[str]]:
    """Convert the argument `config` to (`config_file` of `new_settings`, overrides `key=value`); one of them is empty.

    For a new run, a mapping changes single settings of the default preset; a file or a config object replaces the
    default preset. For a resumed run, each of the three changes only the settings that it sets.
    """
    if config is None:
        return None, []
    if isinstance(config, BaseRunConfig):
        if not isinstance(config, schema):
            raise ConfigError(f"config is a {type(config).__name__}; pass a {schema.__name__}")
        layer: Path | dict[str, Any] = _fields_set(config, _unresolved(config))
    elif isinstance(config, str | Path):
        layer = Path(config)
    elif isinstance(config, Mapping):
        return None, _assignments(config)
    else:
        raise ConfigError(
            f"config is a {type(config).__name__}; pass a mapping, a {schema.__name__} or the path of a YAML file"
        )
    return (None, _assignments(merged_settings(layer, resolve=False))) if is_resumed else (layer, [])


def _unresolved(config: BaseRunConfig) -> dict[str, Any]:
    """Return all settings; references to environment variables stay unresolved."""
    from omegaconf import OmegaConf

    content: Any = OmegaConf.to_container(OmegaConf.create(config.to_yaml()), resolve=False)
    return content


def _fields_set(config: BaseModel, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in `content` that were passed explicitly when `config` was constructed, without defaults."""
    chosen = {}
    for name in config.model_fields_set:
        value = getattr(config, name)
        chosen[name] = _fields_set(value, content[name]) if isinstance(value, BaseModel) else content[name]
    return chosen


def _assignments(settings: Mapping[str, Any], above: str = "") -> list[str]:
    """Return nested settings as `a.b=value`; a mapping with keys that are not plain names becomes one value."""
    found = []
    for name, value in settings.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and value and all(re.fullmatch(r"\w+", str(inner)) for inner in value):
            found += _assignments(value, f"{key}.")
        else:
            found.append(f"{key}={_as_yaml(value, f'config: {key}')}")
    return found


def _as_yaml(value: Any, name: str) -> str:
    """Return a string that YAML parses to the same value: a plain word, or JSON with the escapes of YAML."""
    import yaml

    def plain(other: Any) -> Any:
        if isinstance(other, Path):
            return str(other)
        if isinstance(other, BaseModel):
            return other.model_dump(mode="json")
        raise ConfigError(f"{name}={other!r} is a {type(other).__name__}; pass a string, number, list or mapping")

    if isinstance(value, str) and _WORD.fullmatch(value) and yaml.safe_load(value) == value:
        return value  # unquoted, because `default_preset` compares the string
    text = json.dumps(value, default=plain, ensure_ascii=False)
    return re.sub(r"[^\x20-\x7e]", lambda found: f"\\U{ord(found[0]):08x}", text)
