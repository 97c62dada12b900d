"""A batch as JSON lines, one a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from lucidrl.utils.logger.values import WarnOnce, jsonable, printable


def row_lines(batch: Mapping[str, Any], warn_once: WarnOnce) -> Iterator[bytes]:
    """One line for each row, with its fields and its number as `idx`.

    Token-aligned tensors (as wide as `input_ids`, or as the widest [B, T] column where there is none) are cut to the
    row's `input_lengths`, if the batch has them. Columns without B rows are left out with a warning.
    """
    columns = {printable(str(name)): column for name, column in batch.items()}
    num_rows = next((count for count in map(_num_rows, columns.values()) if count is not None), 0)
    for name in [name for name, column in columns.items() if _num_rows(column) != num_rows]:
        del columns[name]
        warn_once(name, "column %s is not logged: it does not have %d rows as the others", name, num_rows)
    width = _token_width(columns)
    token_aligned = {name for name, column in columns.items() if _width(column) == width}
    rows_by_name = {name: _to_rows(column) for name, column in columns.items()}
    lengths = rows_by_name.get("input_lengths", [None] * num_rows)
    for index in range(num_rows):
        fields = {
            name: rows[index][: lengths[index]] if name in token_aligned else rows[index]
            for name, rows in rows_by_name.items()
        }
        # Non-finite numbers are written as null; what orjson does not know (a complex number) as text.
        yield orjson.dumps({**fields, "idx": index}, default=str, option=orjson.OPT_APPEND_NEWLINE)


def _num_rows(column: Any) -> int | None:
    if hasattr(column, "shape"):
        return column.shape[0] if len(column.shape) else None
    return len(column) if isinstance(column, list | tuple) else None


def _to_rows(column: Any) -> Sequence[Any]:
    """The rows as plain values; a tensor's are plain after `tolist`, which matters for its many numbers."""
    return column.tolist() if hasattr(column, "tolist") else jsonable(column)


def _width(column: Any) -> int | None:
    """T of a [B, T, …] tensor."""
    return column.shape[1] if len(getattr(column, "shape", ())) >= 2 else None


def _token_width(columns: Mapping[str, Any]) -> int:
    named = _width(columns.get("input_ids"))
    return named if named is not None else max((_width(column) or 0 for column in columns.values()), default=0)
