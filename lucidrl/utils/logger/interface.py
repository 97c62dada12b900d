"""The interface of logging back ends, the base of our trackers, and figures as PNG files."""

from __future__ import annotations

import io
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from lucidrl.utils.logger.redact import redacted
from lucidrl.utils.logger.values import PlainMetrics, WarnOnce, plain_metrics

# Drawing changes the figure, and several back ends may record the same one from different threads.
_drawing = threading.Lock()


class LoggerInterface(ABC):
    """A back end for metrics and hyperparameters; only two methods are required."""

    @abstractmethod
    def log_metrics(
        self, metrics: dict[str, Any], step: int, prefix: str | None = "", step_metric: str | None = None
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
        """Record a table of equally long columns of strings and numbers; a back end without tables ignores it."""

    def finish(self) -> None:  # noqa: B027 - optional by design
        """Write pending records and close; may be called twice."""


class Tracker(LoggerInterface):
    """Converts metrics to plain values, redacts hyperparameters and draws figures; a subclass writes them."""

    def __init__(self) -> None:
        self._warn_once = WarnOnce()

    def log_metrics(
        self, metrics: dict[str, Any], step: int, prefix: str | None = "", step_metric: str | None = None
    ) -> None:
        self._write_metrics(plain_metrics(metrics, prefix, step_metric, self._warn_once), int(step), step_metric)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._write_hyperparams(redacted(params))

    def log_plot(self, figure: Any, step: int, name: str) -> None:
        self._write_png(png_of(figure), int(step), name)

    @abstractmethod
    def _write_metrics(self, metrics: PlainMetrics, step: int, step_metric: str | None) -> None: ...

    @abstractmethod
    def _write_hyperparams(self, params: dict[str, Any]) -> None: ...

    @abstractmethod
    def _write_png(self, png: bytes, step: int, name: str) -> None: ...


class DrawnFigure:
    """A figure that is drawn as a PNG file once, for all back ends; everything else is delegated to the figure."""

    def __init__(self, figure: Any) -> None:
        self._figure = figure
        self._png = png_of(figure)

    def savefig(self, file: Any, **options: Any) -> None:
        if options == {"format": "png"}:
            file.write(self._png)
        else:
            self._figure.savefig(file, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._figure, name)


def png_of(figure: Any) -> bytes:
    """The PNG file of a matplotlib figure, or of any object with such a `savefig` method; thread-safe."""
    buffer = io.BytesIO()
    with _drawing:
        figure.savefig(buffer, format="png")
    return buffer.getvalue()
