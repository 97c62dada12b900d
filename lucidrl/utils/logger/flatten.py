"""Nested hyperparameters as one flat dictionary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def flatten_dict(d: Mapping[str, Any], sep: str = ".") -> dict[str, Any]:
    """Flatten nested mappings and lists; list items are named by their index, empty containers are kept.

    Example:
        >>> flatten_dict({"a": [1, {"b": 2}]})
        {'a.0': 1, 'a.1.b': 2}
    """
    flat: dict[str, Any] = {}

    def visit(name: str, value: Any) -> None:
        items: Iterable[tuple[Any, Any]]
        if isinstance(value, Mapping) and value:
            items = value.items()
        elif isinstance(value, list | tuple) and value:
            items = enumerate(value)
        else:
            flat[name] = value
            return
        for key, item in items:
            visit(f"{name}{sep}{key}", item)

    for key, value in d.items():
        visit(str(key), value)
    return flat
