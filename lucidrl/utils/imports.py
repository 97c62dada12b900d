"""Objects and modules that configs name; packages that not everybody has; names that are imported at use."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
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


def import_user_module(module_name: str) -> ModuleType:
    """A module that a config names as `module:Name`; looked up in the working directory too.

    Raises:
        ConfigError: if there is none, if it needs another that is not installed, or if it fails when imported.
    """
    # Installed commands, unlike `python -m`, do not look in the working directory; later imports of the module may.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"module {module_name} needs {error.name}, which is not installed") from error
        raise ConfigError(
            f"there is no module {module_name} in {os.getcwd()} or among the installed packages; "
            "write the environment's name as module:Name"
        ) from error
    except (Exception, SystemExit) as error:  # of a script without `if __name__ == "__main__":`
        raise ConfigError(f"module {module_name} fails when imported, with {type(error).__name__}: {error}") from error


def require_package(package: str, reason: str, extra: str | None = None) -> None:
    """Refuse what needs an optional package that is not installed; nothing is imported.

    Args:
        package: name to import.
        reason: what asks for it, such as a setting and its value.
        extra: our extra that installs it; by default of the same name.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f'{reason} needs the package {package}; pip install "lucidrl[{extra or package}]"')


def names_imported_at_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for a package whose names live in heavy modules, of which each is imported when it is asked for.

    Args:
        homes: the module of each name.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return get
