"""Metric values and names as the back ends want them: flat, plain Python, free of torch and numpy.

Tensors and arrays are recognised by what they offer, so this module imports neither package.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypeAlias

log = logging.getLogger(__name__)

Scalar: TypeAlias = bool | int | float


class WarnOnce:
    """Logs one warning for each subject, so that a bad metric does not fill the log."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, subject: str, message: str, *args: Any) -> None:
        if subject not in self._seen:
            self._seen.add(subject)
            log.warning(message, *args)


def plain_metrics(
    metrics: Mapping[str, Any], prefix: str | None, step_metric: str | None, warn_once: WarnOnce
) -> dict[str, Scalar | list[Scalar]]:
    """Flatten `metrics` with "/" and convert every value; those that are no numbers are left out with one warning."""
    plain: dict[str, Scalar | list[Scalar]] = {}
    for name, value in _flattened(metrics):
        full_name = name if not prefix or name == step_metric else f"{prefix}/{name}"
        try:
            plain[full_name] = _plain_value(value)
        except Exception as error:  # also what reading a tensor may raise, such as on a device that is gone
            warn_once(full_name, "metric %s is not logged: %s", full_name, error)
    return plain


def printable(text: str) -> str:
    """`text` with lone surrogates replaced, which cannot be written as UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def jsonable(value: Any) -> Any:
    """`value` in types that orjson writes: tensors as lists, numbers beyond 64 bits and other objects as text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return int(value) if _fits_64_bits(value) else str(value)
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(str(key)): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    return printable(str(value))


def _plain_value(value: Any) -> Scalar | list[Scalar]:
    if getattr(value, "ndim", None) == 1 and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_to_scalar(item) for item in value]
    return _to_scalar(value)


def _to_scalar(value: Any) -> Scalar:
    """A number, 0-d tensor or numpy scalar as a Python number of at most 64 bits."""
    number = value.tolist() if getattr(value, "ndim", None) == 0 and hasattr(value, "tolist") else value
    if not isinstance(number, bool | int | float):
        raise TypeError(f"a {type(value).__name__} is neither a number nor a list of numbers")
    return number if isinstance(number, float) or _fits_64_bits(number) else float(number)


def _fits_64_bits(number: int) -> bool:
    return -(2**63) <= number < 2**63


def _flattened(metrics: Mapping[str, Any]) -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in metrics.items():
        name = printable(str(key))
        if isinstance(value, Mapping):
            flat.extend((f"{name}/{inner}", item) for inner, item in _flattened(value))
        else:
            flat.append((name, value))
    return flat
