"""What a logging back end must offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Optional


class LoggerInterface(ABC):
    """A back end that records metrics and hyperparameters; two methods make a complete one."""

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
            step: step they belong to.
            prefix: names become `prefix/name`.
            step_metric: name of the metric to plot against instead of the step; it gets no prefix.
        """

    @abstractmethod
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record the (nested) configuration of the run."""

    def log_plot(self, figure: Any, step: int, name: str) -> None:  # noqa: B027 - optional by design
        """Record a matplotlib figure; a back end without pictures ignores it."""

    def finish(self) -> None:  # noqa: B027 - optional by design
        """Write what is pending and close; may be called twice."""
