"""The run's own record: one JSON object a line, readable while the run goes on and after it was killed."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

import orjson

from lucidrl.utils.logger.flatten import flatten_dict
from lucidrl.utils.logger.interface import LoggerInterface
from lucidrl.utils.logger.values import WarnOnce, jsonable, plain_metrics

log = logging.getLogger(__name__)

_OWN_FIELDS = ("step", "time")
_CHUNK_BYTES = 65536


class JsonlLogger(LoggerInterface):
    """Appends `{"step": …, "time": unix seconds, "<prefix>/<name>": value, …}` to a file, one line a call.

    NaN and infinities become null, with `"<name>.nonfinite"` saying which; inside lists they are null only.
    Hyperparameters go to `hyperparams.json` beside the file. A line left unfinished by a killed process is removed
    when the file is opened again. Lines may come from several threads.
    """

    def __init__(self, path: Path) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _remove_torn_line(self._path)
        self._file = self._path.open("ab")
        self._lock = threading.Lock()
        self._warn_once = WarnOnce()

    def log_metrics(
        self,
        metrics: dict[str, Any],
        step: int,
        prefix: Optional[str] = "",  # noqa: UP045
        step_metric: Optional[str] = None,  # noqa: UP045
    ) -> None:
        record: dict[str, Any] = {"step": int(step), "time": time.time()}
        for name, value in plain_metrics(metrics, prefix, step_metric, self._warn_once).items():
            if name in _OWN_FIELDS:
                self._warn_once(name, "metric %s is not logged: every line has its own; give it a prefix", name)
                continue
            record[name] = value
            if isinstance(value, float) and not math.isfinite(value):
                record[f"{name}.nonfinite"] = str(value)
        line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)  # writes non-finite numbers as null
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        flat = jsonable(flatten_dict(params))
        path = self._path.with_name("hyperparams.json")
        path.write_bytes(orjson.dumps(flat, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))

    def finish(self) -> None:
        with self._lock:
            self._file.close()


def _remove_torn_line(path: Path) -> None:
    """Cut `path` after its last newline, reading backwards so that the size of the file does not matter."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size_bytes = keep_bytes = file.seek(0, os.SEEK_END)
        while keep_bytes:
            start = max(0, keep_bytes - _CHUNK_BYTES)
            file.seek(start)
            newline = file.read(keep_bytes - start).rfind(b"\n")
            keep_bytes = start + newline + 1
            if newline >= 0:
                break
        if keep_bytes < size_bytes:
            log.warning("removing an unfinished line of %d bytes from the end of %s", size_bytes - keep_bytes, path)
            file.truncate(keep_bytes)
