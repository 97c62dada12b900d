"""Configuration: YAML and `key=value` overrides in, frozen pydantic models out; errors name value, rule and key."""

from __future__ import annotations

import json
import logging
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from lucidrl.errors import ConfigError
from lucidrl.utils.suggestions import unknown_key

_log = logging.getLogger(__name__)


class Config(BaseModel):
    """Base of all configuration: immutable, refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


C = TypeVar("C", bound=Config)

RENAMED = {
    ("env", "deadline_s"): ("env", "timeout_s"),
    ("env", "prompts_file"): ("data", "file"),
    ("env", "validation_fraction"): ("data", "validation_fraction"),
    ("data", "num_examples"): ("data", "limit"),
}
"""Old names of settings. A layer that uses one still works, with a warning."""
_MAX_DEPTH = 10  # of nested configs, in case one contains itself
_TEXT = re.compile(r"\s*(\d+\s*:\s*\d*\s*|\*.*|\{[{%].*|[^\[{\"'].*\{[{%].*)", re.DOTALL)
"""Command-line values that YAML misreads: 3:5 as 185 (base 60), 3: as a mapping, `*policy*` as a reference, and a jinja
template as a mapping."""


def load_config(schema: type[C], *layers: Path | dict[str, Any], overrides: Sequence[str] = ()) -> C:
    """Merge the layers (files or mappings, later ones win), then the overrides, and validate.

    A layer that changes a `name` also drops the `kwargs` of the old one.

    Args:
        schema: the config class to build.
        layers: YAML files or plain mappings.
        overrides: dotted assignments such as `policy.max_grad_norm=1`; values are read as YAML.

    Raises:
        ConfigError: for an unreadable file, a malformed override or invalid values; it lists all of them.
    """
    return validate(schema, merged_settings(*layers, overrides=overrides))


def merged_settings(
    *layers: Path | dict[str, Any], overrides: Sequence[str] = (), resolve: bool = True
) -> dict[str, Any]:
    """Layers and overrides merged into one mapping, as `load_config` validates it; optionally keep `${...}`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    merged: Any = OmegaConf.create({})
    try:
        for layer in layers:
            merged = _merged(merged, _read_yaml(layer) if isinstance(layer, Path) else OmegaConf.create(layer))
        merged = _merged(merged, _read_overrides(overrides))
        content: Any = OmegaConf.to_container(merged, resolve=resolve)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the configuration cannot be merged: {error}") from error
    return content


def validate(schema: type[C], content: Any, at: str = "") -> C:
    """Build `schema` from a mapping, or return an instance unchanged; one ConfigError lists all problems.

    Args:
        at: key path of the mapping in the whole configuration, for messages.
    """
    if isinstance(content, schema):
        return content
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        lines = [complaint(problem, _all_paths(schema), f"{at}." if at else "") for problem in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def dump_yaml(config: Config, unresolved: Mapping[str, Any] | None = None) -> str:
    """The whole config as YAML; loading it gives an equal config.

    Args:
        unresolved: the settings of the config from `merged_settings(..., resolve=False)`. Where they hold a reference
            (`${oc.env:TOKEN}`), the YAML holds the reference instead of its value.
    """
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(_with_references(config.model_dump(mode="json"), unresolved)))


def _with_references(content: Any, unresolved: Any) -> Any:
    if isinstance(unresolved, str) and "${" in unresolved:
        return unresolved
    if isinstance(content, dict) and isinstance(unresolved, Mapping):
        return {key: _with_references(value, unresolved.get(key)) for key, value in content.items()}
    if isinstance(content, list) and isinstance(unresolved, Mapping) and len(content) == 1:  # a list of one, as written
        return [_with_references(content[0], unresolved)]
    if isinstance(content, list) and isinstance(unresolved, list) and len(content) == len(unresolved):
        return [_with_references(*pair) for pair in zip(content, unresolved, strict=True)]
    return content


def _read_yaml(path: Path) -> Any:
    import yaml
    from omegaconf import OmegaConf

    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist; pass the path of a YAML file to --config")
    try:
        content = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from error
    if not OmegaConf.is_dict(content):
        raise ConfigError(f"config file {path} holds a list or a bare value; its top level must be a mapping")
    return content


def _read_overrides(overrides: Sequence[str]) -> Any:
    import yaml
    from omegaconf import OmegaConf

    content: Any = OmegaConf.create({})
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip() or key.startswith("-"):
            raise ConfigError(f"override {text!r} is not of the form key=value, such as grpo.max_steps=50")
        if _TEXT.fullmatch(value):
            text = f"{key}={json.dumps(value)}"
        try:
            content = OmegaConf.merge(content, OmegaConf.from_dotlist([text]))
        except yaml.YAMLError as error:
            raise ConfigError(f"override {text!r} is not valid YAML; quote the value: {key}='\"...\"'") from error
    return content


def _merged(base: Any, layer: Any) -> Any:
    from omegaconf import OmegaConf

    layer = _with_current_names(layer)
    _remove_conflicts(base, layer)
    return OmegaConf.merge(base, layer)


def _with_current_names(layer: Any) -> Any:
    """Replace old names before layers are merged, so that a later layer wins by either name."""
    from omegaconf import OmegaConf

    content: Any = OmegaConf.to_container(layer, resolve=False)
    for (section, old), (new_section, new) in RENAMED.items():
        settings = content.get(section)
        if not isinstance(settings, dict) or old not in settings:
            continue
        value = settings.pop(old)
        if value is not None:
            _log.warning("the setting %s.%s is now called %s.%s; rename it", section, old, new_section, new)
        target = content.setdefault(new_section, {})
        # Version 0.1.0 wrote data.validation_fraction also for runs without data.file, which did not use it.
        is_unused = new == "validation_fraction" and target.get("file") is None
        target[new] = value if is_unused else target.get(new, value)
    return OmegaConf.create(content)


def _remove_conflicts(base: Any, layer: Any) -> None:
    """Remove from `base` what cannot be merged: lists where `layer` has a mapping (or the reverse), the `kwargs` of
    another `name`, and the environment if `layer` sets `reward`."""
    from omegaconf import OmegaConf

    if not (OmegaConf.is_dict(base) and OmegaConf.is_dict(layer)):
        return
    if "kwargs" in base and "name" in base and layer.get("name", base.name) != base.name:
        del base["kwargs"]
    if "reward" in layer and OmegaConf.is_dict(base.get("env")):  # it replaces the environment
        for key in ("name", "kwargs"):
            base["env"].pop(key, None)
    for key in layer.keys() & base.keys():
        if OmegaConf.is_config(base[key]) and OmegaConf.is_list(base[key]) != OmegaConf.is_list(layer[key]):
            del base[key]
        else:
            _remove_conflicts(base[key], layer[key])


def complaint(problem: Any, all_paths: Iterable[Sequence[str]], prefix: str = "") -> str:
    """The sentence for one of pydantic's errors.

    Args:
        all_paths: paths of all known keys, for suggestions.
        prefix: goes before every key.
    """
    path = [str(part) for part in problem["loc"]]
    key = prefix + ".".join(path) if path else prefix.rstrip(".") or "the configuration"
    if problem["type"] == "extra_forbidden":
        return unknown_key(path, all_paths, prefix)
    if problem["type"] == "missing":
        return f"{key} is required but not set; add {key}=..."
    rule = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return rule if not path else f"{key}: {rule}"
    return f"{key}={problem['input']!r} is not valid: {rule}"


def _all_paths(schema: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all fields, and of the keys in default mappings such as `kwargs`."""
    for name, field in schema.model_fields.items():
        path = (*above, name)
        yield path
        for nested in _models_in(field.annotation):
            if len(above) < _MAX_DEPTH:
                yield from _all_paths(nested, path)
        default = field.get_default(call_default_factory=True, validated_data={})
        if isinstance(default, Mapping):
            yield from ((*path, str(key)) for key in default)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        return [model for argument in typing.get_args(annotation) for model in _models_in(argument)]
    return []
