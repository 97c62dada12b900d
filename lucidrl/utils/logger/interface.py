"""The interface of logging back ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Optional


class LoggerInterface(ABC):
    """A back end for metrics and hyperparameters; only two methods are required."""

    @abstractmethod
    def log_metrics(
        self,
        metrics: dict[str, Any],
        step: int,
        prefix: Optional[str] = "",  # noqa: UP045 - the documented signature
        step_metric: Optional[str] = None,  # noqa: UP045
    ) -> None:
        """Record the metrics of one step.

        Args:
            metrics: numbers, 0-d tensors, lists or 1-d tensors of numbers, or nested dictionaries of these.
            step: step of the metrics.
            prefix: names become `prefix/name`.
            step_metric: name of the metric to plot against instead of the step; it gets no prefix.
        """

    @abstractmethod
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record the (nested) configuration of the run."""

    def log_plot(self, figure: Any, step: int, name: str) -> None:  # noqa: B027 - optional by design
        """Record a matplotlib figure; a back end without images ignores it."""

    def log_table(self, columns: Mapping[str, Sequence[Any]], step: int, name: str) -> None:  # noqa: B027
        """Record a table of equally long columns of texts and numbers; a back end without tables ignores it."""

    def finish(self) -> None:  # noqa: B027 - optional by design
        """Write pending records and close; may be called twice."""
