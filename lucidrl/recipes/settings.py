"""Merge presets, files and overrides into the settings of a run.

A value such as `${oc.env:TOKEN}` is resolved for the run, but `config.yaml` keeps the reference: the secret is not
written, and a resume reads the variable again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lucidrl.errors import ConfigError
from lucidrl.recipes.configs import BaseRunConfig, GRPORunConfig, PPORunConfig, SFTRunConfig
from lucidrl.recipes.folder import run_config_path
from lucidrl.utils.config import load_config, merged_settings
from lucidrl.utils.logger.redact import secret_like_keys

log = logging.getLogger(__name__)

ALGORITHMS: dict[str, type[BaseRunConfig]] = {
    schema.algorithm: schema for schema in (GRPORunConfig, SFTRunConfig, PPORunConfig)
}
PRESETS = Path(__file__).with_name("presets")

_KEY_REFERENCE = re.compile(r"\$\{\s*(\.*)([\w.\[\]-]+)\s*\}")


def new_settings(
    algorithm: str,
    config_file: Path | dict[str, Any] | None = None,
    preset: str | None = None,
    overrides: Sequence[str] = (),
) -> BaseRunConfig:
    """Return the settings of a new run: preset, then file (or its content), then overrides; later ones win.

    Raises:
        ConfigError: a file is unreadable, an override malformed or a value invalid; the message lists all of them.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"--algorithm={algorithm} is unknown; choose one of {', '.join(ALGORITHMS)}")
    schema = ALGORITHMS[algorithm]
    if preset is None and config_file is None:
        preset = schema.default_preset(dict(text.partition("=")[::2] for text in overrides))
    named = [preset_path(preset)] if preset is not None else []
    files = [config_file] if config_file is not None else []
    return _validated(schema, merged_settings(*named, *files, overrides=overrides, resolve=False))


def resumed_settings(algorithm: str, folder: Path, overrides: Sequence[str] = ()) -> BaseRunConfig:
    """Return the settings of a resumed run: its own, changed by overrides.

    Raises:
        ConfigError: the folder holds no run, or one of another algorithm.
    """
    settings = merged_settings(run_config_path(folder), overrides=overrides, resolve=False)
    found = [name for name in ALGORITHMS if name in settings]
    if found and algorithm not in found:
        raise ConfigError(
            f"{folder} holds a run of {found[0]}, not of {algorithm}; resume it with "
            f"lucidrl {found[0]} --resume {folder}"
        )
    return _validated(ALGORITHMS[algorithm], settings)


def preset_path(name: str) -> Path:
    """Return the file of a preset, or raise ConfigError with the names of all presets."""
    known = {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}
    if name not in known:
        raise ConfigError(f"there is no preset {name!r}; the presets are {', '.join(known)}")
    return known[name]


def _validated(schema: type[BaseRunConfig], settings: dict[str, Any]) -> BaseRunConfig:
    config = load_config(schema, settings)
    for key in secret_like_keys(settings):
        log.warning(
            "%s looks like a secret and is written to config.yaml, which only you can read; to keep it out, set an "
            "environment variable and write %s='${oc.env:NAME}'",
            key,
            key,
        )
    return config.with_references(environment_references(settings))


def environment_references(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return only the settings whose values depend on environment variables, unresolved; None if there are none."""

    def at(path: Sequence[str]) -> Any:
        node: Any = settings
        for part in path:
            node = node[int(part) if isinstance(node, list) else part]
        return node

    def left(node: Any, path: tuple[str, ...]) -> Any:
        if isinstance(node, dict):
            kept: Any = {key: left(item, (*path, str(key))) for key, item in node.items()}
            return kept if any(kept.values()) else None
        if isinstance(node, list):
            kept = [left(item, (*path, str(index))) for index, item in enumerate(node)]
            return kept if any(kept) else None
        return node if isinstance(node, str) and is_reference(node, path) else None

    def is_reference(text: str, path: tuple[str, ...]) -> bool:
        if "${oc.env:" in text or "\\${" in text:  # the second is no reference, but must stay escaped
            return True
        targets = [
            (*(path[: -len(dots)] if dots else ()), *re.findall(r"[^.\[\]]+", key))
            for dots, key in _KEY_REFERENCE.findall(text)
        ]
        return any(left(at(target), target) for target in targets)

    return left(settings, ())
