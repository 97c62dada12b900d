"""JSON lines: the metrics of a run, readable during the run and after a kill, and batches with one line per row.

Rows of tensors are written directly from their memory, which is many times faster than through Python numbers. Tensors
and arrays are recognised by their attributes, without importing torch or numpy.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from lucidrl.utils.logger.folders import WholeRecords, whole_file
from lucidrl.utils.logger.interface import Tracker
from lucidrl.utils.logger.values import PlainMetrics, WarnOnce, described, flatten_dict, jsonable, printable

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
        message = "metric %s of step %d was logged %s; all values are kept, the later line counts (warned once)"
        self._warn_once(how.split()[0], message, name, step, how)


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


_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
_WRITTEN_AS = {"float16": "float32", "float128": "float64"}


class _Column(NamedTuple):
    rows: Sequence[Any]
    width: int | None
    """T of a [B, T, …] tensor."""


def write_rows(batch: Mapping[str, Any], path: Path, warn_once: WarnOnce) -> None:
    """Replace a file by the lines of `batch`; it is written completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.writelines(row_lines(batch, warn_once))


def text_columns(samples: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Columns of strings and numbers for a table; `messages` become the columns `prompt` and `completion`.

    The completion begins with the first assistant message and includes later turns.
    """
    columns: dict[str, list[Any]] = {}
    for name, column in samples.items():
        if name == "messages":
            halves = [_prompt_and_completion(messages) for messages in column]
            columns |= {"prompt": [half[0] for half in halves], "completion": [half[1] for half in halves]}
        else:
            columns[name] = [value if isinstance(value, bool | int | float | str) else str(value) for value in column]
    return columns


def _prompt_and_completion(messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Prompt and completion as text; if one has several messages, each begins with its role."""
    start = next((index for index, message in enumerate(messages) if message["role"] == "assistant"), len(messages))

    def text(part: Sequence[Mapping[str, Any]]) -> str:
        contents = [str(message["content"]) for message in part]
        if len(part) <= 1:
            return "".join(contents)
        return "\n".join(f"{message['role']}: {content}" for message, content in zip(part, contents, strict=True))

    return text(messages[:start]), text(messages[start:])


def row_lines(batch: Mapping[str, Any], warn_once: WarnOnce) -> Iterator[bytes]:
    """One JSON line per row, with its fields and its index as `idx`.

    Token-aligned tensors (as wide as `input_ids`, else as the widest [B, T] column) are cut to the row's
    `input_lengths`, if the batch has them. B is the row count of most columns; columns with another row count, and
    unreadable ones, are skipped with a warning. Non-finite numbers become null; other values that JSON cannot
    represent, such as complex numbers, become strings.
    """
    columns = _columns(batch, warn_once)
    num_rows = _agreed_num_rows(columns)
    for name in [name for name, column in columns.items() if len(column.rows) != num_rows]:
        del columns[name]
        warn_once(name, "column %s is not logged: it does not have %d rows like the others", name, num_rows)
    width = _token_width(columns)
    lengths_column = columns.get("input_lengths")
    lengths = [_length(value) for value in lengths_column.rows] if lengths_column else [None] * num_rows
    for index in range(num_rows):
        fields = {
            name: column.rows[index][: lengths[index]] if column.width == width else column.rows[index]
            for name, column in columns.items()
        }
        yield _line({**fields, "idx": index}, warn_once)


def _columns(batch: Mapping[str, Any], warn_once: WarnOnce) -> dict[str, _Column]:
    """The readable columns."""
    columns = {}
    for name, column in ((printable(str(key)), value) for key, value in batch.items()):
        try:
            columns[name] = _read(column)
        except Exception as error:  # sparse, nested and quantized tensors raise different errors
            warn_once(name, "column %s is not logged: %s", name, described(error))
    return columns


def _read(column: Any) -> _Column:
    if isinstance(column, Exception):  # the reason why it could not be copied
        raise column
    if isinstance(column, list | tuple):
        return _Column(column, width=None)
    if not hasattr(column, "tolist") or not column.ndim:
        raise TypeError(f"a {type(column).__name__} has no rows")
    return _Column(_writable(column), column.shape[1] if column.ndim > 1 else None)


def _agreed_num_rows(columns: Mapping[str, _Column]) -> int:
    """The row count of most columns; in a tie that of `input_ids`, else of `input_lengths`, else the first."""
    votes = Counter(len(column.rows) for column in columns.values())
    named = [len(columns[name].rows) for name in ("input_lengths", "input_ids") if name in columns]
    return max(votes, key=lambda count: (votes[count], named.index(count) if count in named else -1), default=0)


def _token_width(columns: Mapping[str, _Column]) -> int:
    if "input_ids" in columns and columns["input_ids"].width is not None:
        return columns["input_ids"].width
    return max((column.width or 0 for column in columns.values()), default=0)


def _line(fields: dict[str, Any], warn_once: WarnOnce) -> bytes:
    try:
        return orjson.dumps(fields, default=_writable, option=_OPTIONS)
    except orjson.JSONEncodeError:  # lone surrogates, numbers beyond 64 bits, keys that are not text
        written = {name: _field(name, value, warn_once) for name, value in fields.items()}
        return orjson.dumps(written, option=orjson.OPT_APPEND_NEWLINE)


def _field(name: str, value: Any, warn_once: WarnOnce) -> Any:
    """`value` as JSON, or the error as text."""
    try:
        return orjson.Fragment(orjson.dumps(jsonable(value)))
    except Exception as error:
        warn_once(name, "column %s has a field that cannot be logged: %s", name, described(error))
        return printable(f"<cannot be logged: {described(error)}>")


def _length(value: Any) -> int | None:
    """Number of tokens of a row without padding; None, which keeps all tokens, for an invalid length."""
    number = value.tolist() if hasattr(value, "tolist") else value
    return max(int(number), 0) if isinstance(number, int | float) and math.isfinite(number) else None


def _writable(value: Any) -> Any:
    """`value` in a form that orjson writes; tensors and arrays of numbers become arrays."""
    if hasattr(value, "detach"):
        is_short_float = value.is_floating_point() and value.element_size() < 4  # bfloat16 is unknown to numpy
        value = (value.float() if is_short_float else value).numpy(force=True)
    if not (hasattr(value, "__array_interface__") and value.ndim and value.dtype.kind in "biuf"):
        return jsonable(value)
    return value.astype(_WRITTEN_AS.get(value.dtype.name, value.dtype), order="C", copy=False)
