"""What a worker is, and what every way of running workers offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Worker(Protocol):
    """Any class whose instances can end; its other methods are what a group calls."""

    def shutdown(self) -> None:
        """Release what the worker holds, process groups included."""


class Arguments(NamedTuple):
    """Of one call."""

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}


class Launcher(Protocol):
    """Workers that were started, one a rank."""

    is_recording: bool
    """Whether workers were told to record, and so may have something to write when they end."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def run(self, method: str, calls: Sequence[Arguments], timeout_s: float) -> list[Any]:
        """Call the method on every rank with its own arguments; the results, by rank."""

    def shutdown(self) -> None:
        """End all workers; may be called twice."""
