"""A batch as JSON lines, one a row.

Rows of tensors are written straight from their memory, which is many times faster than by way of Python numbers.
Tensors and arrays are recognised by what they offer, so this module imports neither torch nor numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from lucidrl.utils.logger.values import WarnOnce, jsonable, printable

_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
_WRITTEN_AS = {"float16": "float32", "float128": "float64"}


def write_rows(batch: Mapping[str, Any], path: Path, warn_once: WarnOnce) -> None:
    """Write the lines of `batch` to a file; it appears complete or not at all, and replaces what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.writelines(row_lines(batch, warn_once))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def row_lines(batch: Mapping[str, Any], warn_once: WarnOnce) -> Iterator[bytes]:
    """One line for each row, with its fields and its number as `idx`.

    Token-aligned tensors (as wide as `input_ids`, or as the widest [B, T] column where there is none) are cut to the
    row's `input_lengths`, if the batch has them. Columns without B rows are left out with a warning. Numbers that are
    not finite are written as null, and what JSON does not know (a complex number) as text.
    """
    columns = {printable(str(name)): column for name, column in batch.items()}
    num_rows = next((count for count in map(_num_rows, columns.values()) if count is not None), 0)
    for name in [name for name, column in columns.items() if _num_rows(column) != num_rows]:
        del columns[name]
        warn_once(name, "column %s is not logged: it does not have %d rows as the others", name, num_rows)
    width = _token_width(columns)
    token_aligned = {name for name, column in columns.items() if _width(column) == width}
    rows_by_name = {name: _rows(column) for name, column in columns.items()}
    lengths = [_length(value) for value in rows_by_name.get("input_lengths", [None] * num_rows)]
    for index in range(num_rows):
        fields = {
            name: rows[index][: lengths[index]] if name in token_aligned else rows[index]
            for name, rows in rows_by_name.items()
        }
        yield _line({**fields, "idx": index})


def _line(fields: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(fields, default=_writable, option=_OPTIONS)
    except orjson.JSONEncodeError:  # lone surrogates, numbers beyond 64 bits, keys that are no text: rare, but data
        return orjson.dumps(jsonable(fields), option=orjson.OPT_APPEND_NEWLINE)


def _num_rows(column: Any) -> int | None:
    if hasattr(column, "tolist"):
        return column.shape[0] if column.ndim else None
    return len(column) if isinstance(column, list | tuple) else None


def _width(column: Any) -> int | None:
    """T of a [B, T, …] tensor."""
    return column.shape[1] if hasattr(column, "tolist") and column.ndim >= 2 else None


def _token_width(columns: Mapping[str, Any]) -> int:
    named = _width(columns.get("input_ids"))
    return named if named is not None else max((_width(column) or 0 for column in columns.values()), default=0)


def _rows(column: Any) -> Sequence[Any]:
    return _writable(column) if hasattr(column, "tolist") else column


def _length(value: Any) -> int | None:
    """How many tokens of a row are real; None, which keeps all, where that is no number."""
    number = value.tolist() if hasattr(value, "tolist") else value
    return max(int(number), 0) if isinstance(number, int | float) and math.isfinite(number) else None


def _writable(value: Any) -> Any:
    """What orjson writes for `value`: for tensors and arrays of numbers an array, whose rows are views."""
    if hasattr(value, "detach"):
        is_short_float = value.is_floating_point() and value.element_size() < 4  # bfloat16 is unknown to numpy
        value = (value.float() if is_short_float else value).numpy(force=True)
    if not (hasattr(value, "__array_interface__") and value.ndim and value.dtype.kind in "biuf"):
        return jsonable(value)
    return value.astype(_WRITTEN_AS.get(value.dtype.name, value.dtype), order="C", copy=False)
