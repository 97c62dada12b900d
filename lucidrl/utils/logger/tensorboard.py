"""TensorBoard event files, in tensorboard's own record format (neither tensorflow nor torch is needed)."""

# The classes of protocol buffers are made at run time, where no type checker sees them.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import io
import itertools
import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from lucidrl.errors import ConfigError
from lucidrl.utils.logger.config import TensorboardConfig, validated
from lucidrl.utils.logger.figures import png_of
from lucidrl.utils.logger.flatten import flatten_dict
from lucidrl.utils.logger.histograms import finite_histogram
from lucidrl.utils.logger.interface import LoggerInterface
from lucidrl.utils.logger.redact import redacted
from lucidrl.utils.logger.values import Scalar, WarnOnce, plain_metrics, printable
from lucidrl.utils.logger.whole_records import WholeRecords

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

_file_numbers = itertools.count()


class TensorboardLogger(LoggerInterface):
    """Writes scalars, histograms (of lists), hyperparameters (as a table) and figures.

    Args:
        cfg: its `log_dir` is used where no other is given.
        log_dir: folder of the event files.
    """

    def __init__(self, cfg: TensorboardConfig, log_dir: Optional[str] = None) -> None:  # noqa: UP045
        cfg = validated(TensorboardConfig, cfg)
        folder = log_dir or cfg.get("log_dir")
        if folder is None:
            raise ConfigError("TensorboardConfig: log_dir is required for a logger on its own; add it")
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._file = WholeRecords(Path(folder) / _event_file_name())
        self._warn_once = WarnOnce()
        self._append(file_version="brain.Event:2")

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
        self._append(step=int(step), summary=summary)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2

        rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in flatten_dict(redacted(params)).items()]
        table = "\n".join(["| name | value |", "| --- | --- |", *rows])
        text = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[table.encode()])
        text.tensor_shape.dim.add(size=1)
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        summary = summary_pb2.Summary()
        summary.value.add(tag="hyperparams", tensor=text, metadata=summary_pb2.SummaryMetadata(plugin_data=plugin))
        self._append(step=0, summary=summary)

    def log_plot(self, figure: Any, step: int, name: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        png = png_of(figure)
        width, height = struct.unpack(">II", png[16:24])  # the first chunk of every PNG begins with its size
        summary = Summary()
        summary.value.add(
            tag=name, image=Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
        )
        self._append(step=int(step), summary=summary)

    def finish(self) -> None:
        self._file.close()

    def _append(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._file.append(record.getvalue())


def _event_file_name() -> str:
    """As tensorboard recognises them and reads them in order; unique on a file system that several hosts share."""
    return f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"


def _add_histogram(summary: Summary, name: str, values: list[Scalar]) -> None:
    """Add a histogram of the finite values, if there are any."""
    found = finite_histogram(values)
    if found is None:
        return
    counts, edges = found
    finite = [value for value in values if math.isfinite(value)]
    histogram = summary.value.add(tag=name).histo
    histogram.min, histogram.max, histogram.num = min(finite), max(finite), len(finite)
    # Products and plain sums, which become infinite where powers and exact sums would raise.
    histogram.sum, histogram.sum_squares = sum(map(float, finite)), sum(float(value) * value for value in finite)
    # The first bucket of the format begins at minus infinity: an empty one keeps the plot within the data.
    histogram.bucket_limit.extend(edges)
    histogram.bucket.extend([0, *counts])


def _cell(value: Any) -> str:
    text = printable(str(value)).replace("\\", "\\\\").replace("|", "\\|")
    return text.replace("\n", "<br>")
