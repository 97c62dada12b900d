"""TensorBoard event files, written with tensorboard's own writer (neither tensorflow nor torch is needed)."""

# The classes of protocol buffers are made at run time, where no type checker sees them.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import io
import struct
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Optional

from lucidrl.utils.logger.config import TensorboardConfig, validated
from lucidrl.utils.logger.flatten import flatten_dict
from lucidrl.utils.logger.interface import LoggerInterface
from lucidrl.utils.logger.values import Scalar, WarnOnce, plain_metrics, printable

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

_FLUSH_INTERVAL_S = 5  # a killed run loses no more than this
_NUM_BINS = 30


class TensorboardLogger(LoggerInterface):
    """Writes scalars, histograms (of lists), hyperparameters (as a table) and figures.

    Args:
        cfg: its `log_dir` is used where no other is given.
        log_dir: folder of the event files.
    """

    def __init__(self, cfg: TensorboardConfig, log_dir: Optional[str] = None) -> None:  # noqa: UP045
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        cfg = validated(TensorboardConfig, cfg)
        self._writer = EventFileWriter(log_dir or cfg["log_dir"], flush_secs=_FLUSH_INTERVAL_S)
        self._warn_once = WarnOnce()

    def log_metrics(
        self,
        metrics: dict[str, Any],
        step: int,
        prefix: Optional[str] = "",  # noqa: UP045
        step_metric: Optional[str] = None,  # noqa: UP045
    ) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary()
        for name, value in plain_metrics(metrics, prefix, step_metric, self._warn_once).items():
            if isinstance(value, list):
                _add_histogram(summary, name, value)
            else:
                summary.value.add(tag=name, simple_value=value)
        self._write(summary, step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2

        rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in flatten_dict(params).items()]
        table = "\n".join(["| name | value |", "| --- | --- |", *rows])
        text = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[table.encode()])
        text.tensor_shape.dim.add(size=1)
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        summary = summary_pb2.Summary()
        summary.value.add(tag="hyperparams", tensor=text, metadata=summary_pb2.SummaryMetadata(plugin_data=plugin))
        self._write(summary, step=0)

    def log_plot(self, figure: Any, step: int, name: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        png = buffer.getvalue()
        width, height = struct.unpack(">II", png[16:24])  # the first chunk of every PNG begins with its size
        summary = Summary()
        summary.value.add(
            tag=name, image=Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
        )
        self._write(summary, step)

    def finish(self) -> None:
        self._writer.close()

    def _write(self, summary: Summary, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=int(step), summary=summary))


def _add_histogram(summary: Summary, name: str, values: list[Scalar]) -> None:
    """Add a histogram of the finite values, if there are any."""
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    array = array[np.isfinite(array)]
    if not array.size:
        return
    low, high = array.min(), array.max()
    # Explicit edges, because numpy refuses to choose them for values that are nearly equal.
    counts, edges = np.histogram(array, bins=np.linspace(low, high, _NUM_BINS + 1))
    histogram = summary.value.add(tag=name).histo
    histogram.min, histogram.max, histogram.num = low, high, array.size
    histogram.sum, histogram.sum_squares = array.sum(), np.square(array).sum()
    # The first bucket of the format begins at minus infinity: an empty one keeps the plot within the data.
    histogram.bucket_limit.extend(edges)
    histogram.bucket.extend([0, *counts])


def _cell(value: Any) -> str:
    text = printable(str(value)).replace("\\", "\\\\").replace("|", "\\|")
    return text.replace("\n", "<br>")
