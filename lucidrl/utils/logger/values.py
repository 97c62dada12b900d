"""Conversion of metrics to flat names and plain Python values.

Recognises tensors and arrays by their attributes, without importing torch or numpy.
"""

from __future__ import annotations

import itertools
import logging
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger(__name__)

Scalar: TypeAlias = bool | int | float
_MOST_DEPTH = 50
_NUM_BINS = 64
_MOST_NAME_BYTES = 240  # leaves room for a suffix where files and trackers take 250
_ODD_NAME = re.compile(r"[^ -~]|(?:^|/)\.{0,2}(?:/|$)")
_PLAIN = frozenset({bool, int, float, str, type(None)})


class WarnOnce:
    """Logs one warning per subject."""

    def __init__(self) -> None:
        self._counts: dict[str, Iterator[int]] = {}

    def __call__(self, subject: str, message: str, *args: Any) -> None:
        # Both calls are atomic: of several threads, one logs.
        if next(self._counts.setdefault(subject, itertools.count())) == 0:
            log.warning(message, *args)


def described(error: BaseException, form: Callable[[BaseException], str] = repr) -> str:
    """`form` of an error, by default `repr`; the class name of the error if `form` raises or is empty."""
    try:
        return form(error) or type(error).__name__
    except Exception:
        return type(error).__name__


class PlainMetrics(dict[str, Scalar | list[Scalar]]):
    """Metrics with full names and plain values."""


def plain_metrics(
    metrics: Mapping[str, Any], prefix: str | None, step_metric: str | None, warn_once: WarnOnce
) -> PlainMetrics:
    """Flatten `metrics` with "/" and convert every value; leave out what is not a number, with one warning each."""
    if isinstance(metrics, PlainMetrics) and not prefix:
        return metrics
    plain = PlainMetrics()
    for inner_name, value in _leaves(metrics, ""):
        given_name = f"{prefix}/{inner_name}" if prefix and inner_name != step_metric else inner_name
        name = metric_name(given_name)
        if name in plain:
            warn_once(f"{name} twice", "metric %s occurs twice in one call; the last value is logged", name)
        try:
            plain[name] = value if type(value) is float else _plain_value(value)
        except Exception as error:  # reading a tensor may raise anything, as on a lost device
            warn_once(name, "metric %s is not logged: %s", name, described(error, str))
        else:
            if name != given_name:
                warn_once(f"{name} renamed", "metric %.100r is logged as %s", given_name, name)
    return plain


def frozen(value: Any, depth: int = 0) -> Any:
    """A deep copy of `value` with detached CPU tensors; an exception replaces a value that cannot be copied."""
    if type(value) in _PLAIN:
        return value
    if depth > _MOST_DEPTH:
        return ValueError(f"it is nested more than {_MOST_DEPTH} levels deep")
    if isinstance(value, Mapping):
        return {key: item if type(item) in _PLAIN else frozen(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [item if type(item) in _PLAIN else frozen(item, depth + 1) for item in value]
    try:
        if hasattr(value, "detach"):
            return value.detach().to("cpu", copy=True) if value.ndim else value.detach().item()
        return value.copy() if hasattr(value, "tolist") else value
    except Exception as error:
        return error


def metric_name(name: str) -> str:
    """`name` in a form that every back end accepts, as a path or as a key.

    Characters that are not printable, and the parts "." and ".." between slashes, become "_"; empty parts are left out.
    A name of more than 240 bytes is cut, and ends with a checksum of the whole.
    """
    if not _ODD_NAME.search(name) and len(name) <= _MOST_NAME_BYTES:
        return name
    text = "".join(char if char.isprintable() else "_" for char in name)
    text = "/".join("_" if part in (".", "..") else part for part in text.split("/") if part) or "_"
    if len(text.encode()) > _MOST_NAME_BYTES:
        checksum = f"_{zlib.crc32(name.encode('utf-8', 'replace')):08x}"
        text = text.encode()[: _MOST_NAME_BYTES - len(checksum)].decode("utf-8", "ignore").rstrip("/") + checksum
    return text


def flatten_dict(d: Mapping[str, Any], sep: str = ".") -> dict[str, Any]:
    """Flatten nested mappings and lists; list items are named by their index, empty containers are kept.

    If several values get the same name, the later ones become `name#2`, `name#3`, ...

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
            names = itertools.chain([name], (f"{name}#{count}" for count in itertools.count(2)))
            flat[next(free for free in names if free not in flat)] = value
            return
        for key, item in items:
            visit(f"{name}{sep}{key}", item)

    for key, value in d.items():
        visit(str(key), value)
    return flat


def finite_histogram(values: Sequence[Scalar]) -> tuple[np.ndarray, np.ndarray] | None:
    """Counts and bin edges of the finite values, or None if there are none."""
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    array = array[np.isfinite(array)]
    if not array.size:
        return None
    low, high = float(array.min()), float(array.max())
    if low == high:
        margin = max(0.5, abs(low) * 2**-20)  # visible beside a large number too
        low, high = max(low - margin, -sys.float_info.max), min(high + margin, sys.float_info.max)
    unit = 2 if max(-low, high) > sys.float_info.max / 2 else 1  # sums and differences of halves cannot overflow
    # Explicit edges, because numpy refuses to choose them for values that are nearly equal.
    edges = unit * np.linspace(low / unit, high / unit, _NUM_BINS + 1)
    edges[0], edges[-1] = low, high  # half of the smallest number is 0
    return np.histogram(array, bins=edges)


def printable(text: str) -> str:
    """`text` without lone surrogates, which UTF-8 cannot encode."""
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
    if hasattr(value, "tolist") and type(plain := value.tolist()) is not type(value):  # false for a long double
        return jsonable(plain)
    return printable(str(value))


def _plain_value(value: Any) -> Scalar | list[Scalar]:
    if getattr(value, "ndim", None) == 1 and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_to_scalar(item) for item in value]
    return _to_scalar(value)


def _to_scalar(value: Any) -> Scalar:
    """A number, 0-d tensor or numpy scalar as a Python number of at most 64 bits."""
    if isinstance(value, Exception):
        raise value
    number = value.tolist() if getattr(value, "ndim", None) == 0 and hasattr(value, "tolist") else value
    if not isinstance(number, bool | int | float):
        raise TypeError(f"a {type(value).__name__} is neither a number nor a list of numbers")
    if isinstance(number, bool):
        return number
    # Plain types: not every back end can write subclasses.
    return int(number) if isinstance(number, int) and _fits_64_bits(number) else float(number)


def _fits_64_bits(number: int) -> bool:
    return -(2**63) <= number < 2**63


def _leaves(metrics: Mapping[str, Any], start: str) -> Iterator[tuple[str, Any]]:
    for key, value in metrics.items():
        name = start + _key_name(key)
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}/")
        else:
            yield name, value


def _key_name(key: Any) -> str:
    try:
        return str(key)
    except Exception:
        return f"<{type(key).__name__}>"
