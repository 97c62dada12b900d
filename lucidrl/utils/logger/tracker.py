"""The base of all trackers, and figures as PNG files."""

from __future__ import annotations

import io
import threading
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Optional

from lucidrl.utils.logger.interface import LoggerInterface
from lucidrl.utils.logger.redact import redacted
from lucidrl.utils.logger.values import PlainMetrics, WarnOnce, plain_metrics

# Drawing changes the figure, and several back ends may record the same one from different threads.
_drawing = threading.Lock()


class Tracker(LoggerInterface):
    """Converts metrics to plain values, redacts hyperparameters and draws figures; a subclass writes them."""

    def __init__(self) -> None:
        self._warn_once = WarnOnce()

    def log_metrics(
        self,
        metrics: dict[str, Any],
        step: int,
        prefix: Optional[str] = "",  # noqa: UP045 - the documented signature
        step_metric: Optional[str] = None,  # noqa: UP045
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
    """The PNG file of a matplotlib figure, or of any object with its `savefig`; thread-safe."""
    buffer = io.BytesIO()
    with _drawing:
        figure.savefig(buffer, format="png")
    return buffer.getvalue()
