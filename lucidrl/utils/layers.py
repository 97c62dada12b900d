"""Merge layers of settings: files, mappings and `key=value` overrides; remember where each setting came from."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lucidrl.errors import ConfigError

_log = logging.getLogger(__name__)

RENAMED = {
    "env.deadline_s": "env.timeout_s",
    "env.prompts_file": "data.file",
    "env.validation_fraction": "data.validation_fraction",
    "data.num_examples": "data.limit",
}
"""Old names of settings. A layer that uses one still works, with a warning."""
EXCLUSIVE = (("sft", "max_steps", "epochs"),)
"""(Section, key, key): two keys for the same thing. A layer that sets one key removes the other from earlier layers."""
NAMED = ("reward",)
"""Settings that may be a name alone; further overrides then extend the mapping with this name."""
_TEXT = re.compile(r"\s*(\d+\s*:\s*\d*\s*|\*.*|\{[{%].*|[^\[{\"'].*\{[{%].*)", re.DOTALL)
"""Command-line values that YAML misreads: 3:5 as 185 (base 60), 3: as a mapping, `*policy*` as a reference, and a jinja
template as a mapping."""


@dataclass(frozen=True)
class Source:
    """A layer of settings, and the alias by which it set a key."""

    kind: Literal["preset", "file", "command line", "run", "Python", "variant"]
    name: str = ""
    """Name of the preset, file or variant."""
    alias: str = ""
    """Name that the layer used instead of the key."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip() + (f" (as {self.alias})" if self.alias else "")


class Origins(dict[str, Source]):
    """Sources of the settings by dotted key; a key without an entry has its default value.

    All `Origins` compare equal, so that configs with equal values are equal wherever the values come from.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origins)

    def of(self, key: str) -> Source | None:
        """Return the source of a key, or of the list or mapping that contains it; None for a default."""
        parts = key.split(".")
        paths = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((self[path] for path in paths if path in self), None)

    def has_any_of(self, section: str) -> bool:
        """Whether the section, or a key in it, was set."""
        return any(key == section or key.startswith(f"{section}.") for key in self)


COMMAND_LINE = Source("command line")


@dataclass(frozen=True)
class Merged:
    """Merged settings, and where each came from."""

    content: dict[str, Any]
    origins: Origins


def merge_layers(
    layers: Iterable[tuple[Source, Path | dict[str, Any]]],
    overrides: Sequence[str] = (),
    resolve: bool = True,
    aliases: Mapping[str, tuple[str, ...]] | None = None,
) -> Merged:
    """Merge the layers (later ones win), then the overrides.

    Args:
        resolve: replace `${...}` by values.
        aliases: top-level names, and the keys that each of them sets.

    Raises:
        ConfigError: for an unreadable file, a malformed override, or a key that one layer sets twice.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    merged: Any = OmegaConf.create({})
    origins = Origins()
    try:
        read = [
            (source, OmegaConf.to_container(_read_yaml(layer), resolve=False) if isinstance(layer, Path) else layer)
            for source, layer in layers
        ]
        for source, layer in [*read, (COMMAND_LINE, OmegaConf.to_container(_read_overrides(overrides), resolve=False))]:
            settings: Any = deepcopy(layer)
            _use_current_names(settings)
            alias_of = _use_keys_for(aliases or {}, settings, source)
            current = OmegaConf.create(settings)
            _remove_conflicts(merged, current)
            _remove_replaced(merged, current)
            merged = OmegaConf.merge(merged, current)
            origins.update({key: replace(source, alias=alias_of.get(key, "")) for key in _leaves(settings)})
        content: Any = OmegaConf.to_container(merged, resolve=resolve)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the configuration cannot be merged: {error}") from error
    kept = set(_leaves(content))
    return Merged(content, Origins({key: source for key, source in origins.items() if key in kept}))


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
        section = key.partition(".")[0]
        if section in NAMED and section != key and isinstance(content.get(section), str):
            content = OmegaConf.merge(content, {section: {"name": content[section]}})
        if _TEXT.fullmatch(value):
            text = f"{key}={json.dumps(value)}"
        try:
            content = OmegaConf.merge(content, OmegaConf.from_dotlist([text]))
        except yaml.YAMLError as error:
            raise ConfigError(f"override {text!r} is not valid YAML; quote the value: {key}='\"...\"'") from error
    return content


def _use_current_names(content: dict[str, Any]) -> None:
    """Replace old names before layers are merged, so that a later layer wins whichever name it uses."""
    for old, new in RENAMED.items():
        *parents, name = old.split(".")
        section: Any = content
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if isinstance(section, dict) and name in section:
            value = section.pop(name)
            if value is not None:
                _log.warning("the setting %s is now called %s; rename it", old, new)
            # Version 0.1.0 wrote data.validation_fraction even for runs without data.file, which did not use it.
            is_unused = old == "env.validation_fraction" and (content.get("data") or {}).get("file") is None
            if is_unused or new not in _leaves(content):
                _set(content, new, value, old)


def _use_keys_for(aliases: Mapping[str, tuple[str, ...]], content: dict[str, Any], source: Source) -> dict[str, str]:
    """Replace aliases by their keys; return the alias of each key that had one.

    Raises:
        ConfigError: the layer sets a key twice.
    """
    written = {key: key for key in _leaves(content)}
    alias_of: dict[str, str] = {}
    # An alias of several keys does not set those that the layer sets one by one.
    for alias in sorted((name for name in content if name in aliases), key=lambda name: len(aliases[name])):
        value = content.pop(alias)
        keys = [key for key in aliases[alias] if key not in written]
        if not keys:
            other = written[aliases[alias][0]]
            raise ConfigError(f"{alias} and {other} are the same setting, and the {source} sets both; remove one")
        for key in keys:
            written[key] = alias_of[key] = alias
            _set(content, key, value, alias)
    return alias_of


def _set(content: dict[str, Any], key: str, value: Any, alias: str) -> None:
    *parents, name = key.split(".")
    for parent in parents:
        if not isinstance(content.setdefault(parent, {}), dict):
            raise ConfigError(
                f"{alias} sets {key}, but {parent}={content[parent]!r} is not a mapping; remove one of the two"
            )
        content = content[parent]
    content[name] = value


def _leaves(content: Any, above: str = "") -> Iterator[str]:
    """Dotted keys of all values; a list is one value."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}"


def _remove_replaced(base: Any, layer: Any) -> None:
    """For each pair of keys in `EXCLUSIVE`: if `layer` sets one key, remove the other one from `base`.

    The two keys of a pair cannot be set together.
    """
    from omegaconf import OmegaConf

    for section, *keys in EXCLUSIVE:
        before, now = base.get(section), layer.get(section)
        if OmegaConf.is_dict(before) and OmegaConf.is_dict(now):
            is_set = [key for key in keys if now.get(key) is not None]
            for key in keys if len(is_set) == 1 else ():
                if key not in is_set and key in before and key not in now:
                    del before[key]


def _remove_conflicts(base: Any, layer: Any) -> None:
    """Remove from `base` what cannot be merged: lists where `layer` has a mapping (or the reverse), the `kwargs` of
    another `name`, and the environment if `layer` sets `reward`."""
    from omegaconf import OmegaConf

    if not (OmegaConf.is_dict(base) and OmegaConf.is_dict(layer)):
        return
    if "kwargs" in base and "name" in base and layer.get("name", base.name) != base.name:
        del base["kwargs"]
    if "reward" in layer and OmegaConf.is_dict(base.get("env")):  # a reward replaces the environment
        for key in ("name", "kwargs"):
            base["env"].pop(key, None)
    if "scheduler" in layer and "scheduler_milestones" in base:
        del base["scheduler_milestones"]  # they belong to the schedulers that the layer replaces
    for key in layer.keys() & base.keys():
        if OmegaConf.is_config(base[key]) and OmegaConf.is_list(base[key]) != OmegaConf.is_list(layer[key]):
            del base[key]
        else:
            _remove_conflicts(base[key], layer[key])
