"""Objects by import path, as configs name them."""

from __future__ import annotations

import importlib
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
