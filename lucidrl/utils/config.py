"""Configuration: YAML and `key=value` overrides in, frozen pydantic models out; errors name value, rule and key."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from lucidrl.errors import ConfigError
from lucidrl.utils.layers import Source, merge_layers
from lucidrl.utils.suggestions import NO_OTHER_NAMES, OtherNames, unknown_key


class Config(BaseModel):
    """Base of all configuration: immutable, refuses unknown keys.

    A setting whose name is a keyword of Python has an attribute with an underscore: `async` is `config.async_`.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
    )
    other_names: ClassVar[OtherNames] = NO_OTHER_NAMES
    """Aliases of the settings, and unknown names that errors explain."""


C = TypeVar("C", bound=Config)

_MAX_DEPTH = 10  # of nested configs, in case one contains itself


def load_config(schema: type[C], *layers: Path | dict[str, Any], overrides: Sequence[str] = ()) -> C:
    """Merge the layers (files or mappings, later ones win), then the overrides, and validate.

    A layer that changes a `name` also drops the `kwargs` of the old name.

    Args:
        schema: the config class to build.
        layers: YAML files or plain mappings.
        overrides: dotted assignments such as `policy.max_grad_norm=1`; values are read as YAML.

    Raises:
        ConfigError: for an unreadable file, a malformed override, or invalid values, all of which it lists.
    """
    return validate(schema, merged_settings(*layers, overrides=overrides, schema=schema))


def merged_settings(
    *layers: Path | dict[str, Any],
    overrides: Sequence[str] = (),
    resolve: bool = True,
    schema: type[Config] | None = None,
) -> dict[str, Any]:
    """Layers and overrides merged into the mapping that `load_config` validates; `resolve=False` keeps `${...}`.

    Args:
        schema: config class whose aliases are replaced by their keys; by default, no alias is replaced.
    """
    sourced = [(Source("file", str(layer)) if isinstance(layer, Path) else Source("Python"), layer) for layer in layers]
    aliases = None if schema is None else aliases_of(schema)
    return merge_layers(sourced, overrides, resolve, aliases).content


def aliases_of(schema: type[Config]) -> dict[str, tuple[str, ...]]:
    """Return the aliases of a schema's settings: name → the keys that it sets."""
    return schema.other_names.aliases_in(_all_paths(schema))


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
        paths, prefix = list(_all_paths(schema)), f"{at}." if at else ""
        lines = [complaint(problem, paths, prefix, schema.other_names) for problem in error.errors()]
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


def complaint(
    problem: Any,
    all_paths: Iterable[Sequence[str]],
    prefix: str = "",
    other_names: OtherNames = NO_OTHER_NAMES,
) -> str:
    """The sentence for one of pydantic's errors.

    Args:
        all_paths: paths of all known keys, for suggestions.
        prefix: goes before every key.
        other_names: names of the keys in other libraries, for suggestions.
    """
    path = [str(part) for part in problem["loc"]]
    key = prefix + ".".join(path) if path else prefix.rstrip(".") or "the configuration"
    if problem["type"] == "extra_forbidden":
        return unknown_key(path, all_paths, prefix, other_names)
    if problem["type"] == "missing":
        return f"{key} is required but not set; add {key}=..."
    rule = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return rule if not path else f"{key}: {rule}"
    return f"{key}={problem['input']!r} is not valid: {rule}"


def _all_paths(schema: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all fields, and of the keys in default mappings such as `kwargs`."""
    for name, field in schema.model_fields.items():
        path = (*above, field.alias or name)
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
