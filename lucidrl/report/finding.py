"""Finds run folders, and reads their settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lucidrl.algorithms.config import ALGORITHM_NAMES
from lucidrl.checkpoint.config import CONFIG_NAME
from lucidrl.utils.run_folder import folders_in

T = TypeVar("T")

MOST_LEVELS = 4
"""How many levels below a named folder are searched for runs."""
_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # many times faster


def found_below(folder: Path, read: Callable[[Path], T | None], levels: int = MOST_LEVELS) -> Iterator[T]:
    """What `read` returns for a folder, or if that is None for the folders below it; follows no links."""
    if (found := read(folder)) is not None:
        yield found
    elif levels:
        for inside in folders_in(folder):
            yield from found_below(inside, read, levels - 1)


def run_settings(folder: Path) -> dict[str, Any] | None:
    """The settings of a run; None if the folder has none. A config.yaml alone may be of another program."""
    path = folder / CONFIG_NAME
    if os.path.islink(path) or not os.path.isfile(path):  # unlike a Path's methods, never raise
        return None
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), _YAML_LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
        return None
    if not isinstance(settings, dict) or "run" not in settings:
        return None
    sections = [settings.get(name) for name in ALGORITHM_NAMES]
    return settings if any(isinstance(section, dict) for section in sections) else None
