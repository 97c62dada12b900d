"""The run's own record: one JSON object per line, readable during the run and after a kill."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import orjson

from lucidrl.utils.logger.folders import WholeRecords, whole_file
from lucidrl.utils.logger.interface import Tracker
from lucidrl.utils.logger.values import PlainMetrics, flatten_dict, jsonable

log = logging.getLogger(__name__)

_OWN_FIELDS = ("step", "time")
_CHUNK_BYTES = 65536
_UNSAFE = re.compile(r"[^\w.-]+")


class JsonlLogger(Tracker):
    """Appends `{"step": …, "time": unix seconds, "<prefix>/<name>": value, …}` to a file, one line per call.

    A line with a step metric has no `step`. NaN and infinities become null, with the value in `"<name>.nonfinite"`
    (not inside lists). Hyperparameters go to `hyperparams.json` beside the file, figures to the folder `plots`. Opening
    the file removes an unfinished last line of a killed process.
    """

    def __init__(self, path: Path) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _remove_torn_line(self._path)
        self._file = WholeRecords(self._path)
        super().__init__()
        self._last_step_of: dict[str, int] = {}

    def _write_metrics(self, metrics: PlainMetrics, step: int, step_metric: str | None) -> None:
        # Metrics with a separate axis, such as seconds, must not be mistaken for those of a training step.
        record: dict[str, Any] = {} if step_metric in metrics else {"step": step}
        record["time"] = time.time()
        for name, value in metrics.items():
            if step <= (last := self._last_step_of.get(name, -math.inf)):
                self._warn_of_order(name, step, last)
            self._last_step_of[name] = step
            if name in _OWN_FIELDS:
                self._warn_once(name, "metric %s is not logged: the name is reserved; use a prefix", name)
                continue
            record[name] = value
            if isinstance(value, float) and not math.isfinite(value):
                record[f"{name}.nonfinite"] = str(value)
        # Non-finite numbers are written as null.
        self._file.append(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        """Replace `hyperparams.json`; log the changes of a resumed run."""
        flat = jsonable(flatten_dict(params))
        path = self._path.with_name("hyperparams.json")
        _log_changes(path, flat)
        with whole_file(path) as file:
            file.write(orjson.dumps(flat, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))

    def _write_png(self, png: bytes, step: int, name: str) -> None:
        *folders, stem = (_UNSAFE.sub("_", part).strip(".") or "_" for part in name.split("/"))
        folder = self._path.with_name("plots").joinpath(*folders)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{stem}_{step}.png").write_bytes(png)

    def finish(self) -> None:
        self._file.close()

    def _warn_of_order(self, name: str, step: int, last: float) -> None:
        how = "twice" if step == last else f"after step {last}"
        message = "metric %s came %s for step %d; all values are kept, the later line counts (logged once)"
        self._warn_once(how.split()[0], message, name, how, step)


def _log_changes(path: Path, now: dict[str, Any]) -> None:
    """Warn about hyperparameters that differ from those in the file."""
    try:
        before = dict(orjson.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):  # no file, or not one of ours
        return
    changes = [
        f"{name}: {before.get(name, 'unset')} -> {now.get(name, 'unset')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name, "unset") != now.get(name, "unset")
    ]
    if changes:
        log.warning("settings changed since the run was last started: %s", "; ".join(changes))


def _remove_torn_line(path: Path) -> None:
    """Cut `path` after its last newline; reads from the end, because the file may be large."""
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
