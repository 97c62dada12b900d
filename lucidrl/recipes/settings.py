"""From presets, files and overrides to the settings of a run: merged once, with references kept for `config.yaml`.

A value such as `${oc.env:TOKEN}` is resolved for the run, but written to its folder as a reference: the secret stays
where it belongs, and is looked up again at a resume.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lucidrl.recipes.configs import BaseRunConfig
from lucidrl.utils.config import load_config, merged_settings
from lucidrl.utils.logger.redact import secret_like_keys

log = logging.getLogger(__name__)

C = TypeVar("C", bound=BaseRunConfig)

_KEY_REFERENCE = re.compile(r"\$\{\s*(\.*)([\w.\[\]-]+)\s*\}")


def resolve_settings(
    schema: type[C],
    *layers: Path,
    overrides: Sequence[str] = (),
    check: Callable[[dict[str, Any]], None] = lambda settings: None,
) -> C:
    """Merge files and overrides, later ones win, and validate the result.

    Args:
        check: is given the merged settings before they are validated, and may raise.

    Raises:
        ConfigError: for an unreadable file, a malformed override or any invalid value; it lists all of them.
    """
    settings = merged_settings(*layers, overrides=overrides, resolve=False)
    check(settings)
    config = load_config(schema, settings)
    for key in secret_like_keys(settings):
        log.warning(
            "%s looks like a secret and is written to config.yaml, which only you can read; better set a variable and "
            "write %s='${oc.env:NAME}'",
            key,
            key,
        )
    return config.with_references(environment_references(settings))


def environment_references(settings: dict[str, Any]) -> dict[str, Any] | None:
    """The settings with only those texts left whose values depend on environment variables; None if there are none."""

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
        if "${oc.env:" in text or "\\${" in text:  # the second is no reference, but has to stay escaped
            return True
        targets = [
            (*(path[: -len(dots)] if dots else ()), *re.findall(r"[^.\[\]]+", key))
            for dots, key in _KEY_REFERENCE.findall(text)
        ]
        return any(left(at(target), target) for target in targets)

    return left(settings, ())
