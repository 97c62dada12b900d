"""TensorBoard event files, in tensorboard's own record format (neither tensorflow nor torch is needed)."""

# Protocol buffer classes are created at run time, unseen by type checkers.
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
from lucidrl.utils.logger.folders import WholeRecords
from lucidrl.utils.logger.interface import Tracker
from lucidrl.utils.logger.values import PlainMetrics, Scalar, finite_histogram, flatten_dict, printable

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

_file_numbers = itertools.count()


class TensorboardLogger(Tracker):
    """Writes scalars, histograms (of lists), hyperparameters (as a table and for the HParams page) and figures.

    Args:
        cfg: see `TensorboardConfig`.
        log_dir: folder of the event files; by default that of `cfg`.
    """

    def __init__(self, cfg: TensorboardConfig, log_dir: Optional[str] = None) -> None:  # noqa: UP045
        cfg = validated(TensorboardConfig, cfg)
        folder = log_dir or cfg.get("log_dir")
        if folder is None:
            raise ConfigError("TensorboardLogger has no folder for its files; set TensorboardConfig.log_dir")
        Path(folder).mkdir(parents=True, exist_ok=True)
        # A name that tensorboard recognises and sorts, unique on a shared file system.
        source = f"{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"
        self._file = WholeRecords(Path(folder) / f"events.out.tfevents.{int(time.time()):010d}.{source}")
        super().__init__()
        self._append(file_version="brain.Event:2")

    def _write_metrics(self, metrics: PlainMetrics, step: int, step_metric: str | None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary()
        for name, value in metrics.items():
            if isinstance(value, list):
                _add_histogram(summary, name, value)
            else:
                summary.value.add(tag=name, simple_value=value)
        self._append(step=step, summary=summary)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.hparams import metadata

        flat = flatten_dict(params)
        rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in flat.items()]
        table = "\n".join(["| name | value |", "| --- | --- |", *rows])
        text = TensorProto(dtype=DT_STRING, string_val=[table.encode()])
        text.tensor_shape.dim.add(size=1)
        summary = Summary()
        plugin = SummaryMetadata.PluginData(plugin_name="text")
        summary.value.add(tag="hyperparams", tensor=text, metadata=SummaryMetadata(plugin_data=plugin))
        session = metadata.create_summary_metadata(_session_start(flat))
        summary.value.add(tag=metadata.SESSION_START_INFO_TAG, tensor=metadata.NULL_TENSOR, metadata=session)
        self._append(step=0, summary=summary)

    def _write_png(self, png: bytes, step: int, name: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        width, height = struct.unpack(">II", png[16:24])  # the first chunk of every PNG begins with its size
        summary = Summary()
        summary.value.add(
            tag=name, image=Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
        )
        self._append(step=step, summary=summary)

    def finish(self) -> None:
        self._file.close()

    def _append(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._file.append(record.getvalue())


def _add_histogram(summary: Summary, name: str, values: list[Scalar]) -> None:
    """Add a histogram of the finite values, if any."""
    found = finite_histogram(values)
    if found is None:
        return
    counts, edges = found
    finite = [value for value in values if math.isfinite(value)]
    histogram = summary.value.add(tag=name).histo
    histogram.min, histogram.max, histogram.num = min(finite), max(finite), len(finite)
    # Products and plain sums overflow to infinity; powers and exact sums would raise.
    histogram.sum, histogram.sum_squares = sum(map(float, finite)), sum(float(value) * value for value in finite)
    # The first bucket of the format begins at minus infinity: an empty one keeps the plot within the data.
    histogram.bucket_limit.extend(edges)
    histogram.bucket.extend([0, *counts])


def _session_start(flat: Mapping[str, Any]) -> HParamsPluginData:
    """The hyperparameters for TensorBoard's HParams page."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    data = HParamsPluginData()
    data.session_start_info.start_time_secs = time.time()
    for name, value in flat.items():
        entry = data.session_start_info.hparams[printable(name)]
        if isinstance(value, bool):
            entry.bool_value = value
        elif isinstance(value, int | float):
            entry.number_value = value
        else:
            entry.string_value = printable(str(value))
    return data


def _cell(value: Any) -> str:
    text = printable(str(value)).replace("\\", "\\\\").replace("|", "\\|")
    return text.replace("\n", "<br>")
