"""Objects by import path, as configs name them, and packages that not everybody has."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from lucidrl.errors import ConfigError


def import_object(path: str, key: str) -> Any:
    """The object at a dotted path such as `torch.optim.AdamW`.

    Raises:
        ConfigError: naming `key`, the config entry that gave the path.
    """
    module_name, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{key}={path!r} cannot be imported ({error}); give a path such as package.module.Name"
        ) from error


def require_package(package: str, reason: str, extra: str | None = None) -> None:
    """Refuse what needs an optional package that is not installed; nothing is imported.

    Args:
        package: name to import.
        reason: what asks for it, such as a setting and its value.
        extra: our extra that installs it; by default of the same name.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f'{reason} needs the package {package}; pip install "lucidrl[{extra or package}]"')
