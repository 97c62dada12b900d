"""Metric values and names as the back ends want them: flat, plain Python, free of torch and numpy.

Tensors and arrays are recognised by what they offer, so this module imports neither package.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

log = logging.getLogger(__name__)

Scalar: TypeAlias = bool | int | float
_MOST_DEPTH = 50
_PLAIN = frozenset({bool, int, float, str, type(None)})


class WarnOnce:
    """Logs one warning for each subject, so that a bad metric does not fill the log."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, subject: str, message: str, *args: Any) -> None:
        if subject not in self._seen:
            self._seen.add(subject)
            log.warning(message, *args)


def described(error: BaseException) -> str:
    """`repr(error)`, of an error that may not even be able to say what it is."""
    try:
        return repr(error)
    except Exception:
        return type(error).__name__


def message_of(error: BaseException) -> str:
    """What an error says or, if it says nothing, what it is."""
    try:
        return str(error) or repr(error)
    except Exception:
        return type(error).__name__


class PlainMetrics(dict[str, Scalar | list[Scalar]]):
    """Metrics with full names and plain values."""


class MetricsRecord:
    """The metrics of one call, safe from later changes; named and converted once, by the first back end that asks.

    Taking them is all that the training loop pays for; the rest happens in the back ends' threads.
    """

    def __init__(self, metrics: Mapping[str, Any], prefix: str | None, step_metric: str | None) -> None:
        if not isinstance(metrics, Mapping):
            raise TypeError(f"a {type(metrics).__name__} is no mapping of names to values")
        self._metrics = frozen(metrics)
        self._prefix, self._step_metric = prefix, step_metric
        self._own: dict[str, Scalar] = {}
        self._lock = threading.Lock()
        self._plain: PlainMetrics | None = None

    def add(self, metrics: dict[str, Scalar]) -> None:
        """Add metrics that have full names and plain values."""
        self._own.update(metrics)

    def plain(self, warn_once: WarnOnce) -> PlainMetrics:
        with self._lock:
            if self._plain is None:
                self._plain = plain_metrics(self._metrics, self._prefix, self._step_metric, warn_once)
                self._plain.update(self._own)
            return self._plain


def plain_metrics(
    metrics: Mapping[str, Any], prefix: str | None, step_metric: str | None, warn_once: WarnOnce
) -> PlainMetrics:
    """Flatten `metrics` with "/" and convert every value; those that are no numbers are left out with one warning."""
    if isinstance(metrics, PlainMetrics) and not prefix:
        return metrics
    plain = PlainMetrics()
    for inner_name, value in _leaves(metrics, ""):
        name = f"{prefix}/{inner_name}" if prefix and inner_name != step_metric else inner_name
        if name in plain:
            warn_once(f"{name} twice", "metric %s comes twice in one call; the last value is logged", name)
        try:
            plain[name] = value if type(value) is float else _plain_value(value)
        except Exception as error:  # also what reading a tensor may raise, such as on a device that is gone
            warn_once(name, "metric %s is not logged: %s", name, message_of(error))
    return plain


def frozen(value: Any, depth: int = 0) -> Any:
    """A copy of `value` that later changes do not reach; tensors are on the CPU and free of gradients.

    What cannot be copied becomes the error that says why, and so does what lies deeper than anybody nests on purpose.
    """
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
    if hasattr(value, "tolist") and type(plain := value.tolist()) is not type(value):  # as of a long double
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
    # By type, so that no subclass comes through, which not every back end writes.
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
        return printable(str(key))
    except Exception:
        return f"<{type(key).__name__}>"
