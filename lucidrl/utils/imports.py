"""Imports by name: objects and modules named in configs, optional packages, and names imported at first use."""

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
        ConfigError: naming `key`, the setting with the path.
    """
    module_name, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{key}={path!r} cannot be imported ({error}); use a path such as package.module.Name"
        ) from error


def import_user_module(module_name: str, what: str = "the environment's name") -> ModuleType:
    """Import the module of a setting `module:Name`; searches the working directory too.

    Args:
        what: what the setting holds, for errors.

    Raises:
        ConfigError: if the module does not exist, needs a missing package, or raises.
    """
    # Installed commands, unlike `python -m`, do not search the working directory.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"module {module_name} needs {error.name}, which is not installed; install it") from error
        raise ConfigError(
            f"there is no module {module_name} in {os.getcwd()} or among the installed packages; "
            f"write {what} as module:Name"
        ) from error
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__":` may exit
        raise ConfigError(f"module {module_name} fails when imported, with {type(error).__name__}: {error}") from error


def require_package(package: str, reason: str, extra: str | None = None) -> None:
    """Raise ConfigError if an optional package is not installed, without importing it.

    Args:
        package: import name.
        reason: setting or feature that needs the package.
        extra: extra of lucidrl that installs the package; by default the extra of the same name.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f'{reason} needs the package {package}; pip install "lucidrl[{extra or package}]"')


def names_imported_at_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for a package that imports the heavy module of a name at first use.

    Args:
        homes: module of each name.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return get
