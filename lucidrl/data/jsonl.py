"""JSON lines: one object per line; errors name file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from lucidrl.errors import DataError

LONGEST_LINE_BYTES = 8 << 20
"""Far above any context length; a longer line is a mistake or a file of another kind."""
OTHER_KINDS = {
    b"PAR1": "a Parquet file; convert it with pandas.read_parquet(...).to_json(..., orient='records', lines=True)",
    b"ARROW1": "an Arrow file; convert it with pandas.read_feather(...).to_json(..., orient='records', lines=True)",
    b"\x1f\x8b": "compressed with gzip; unpack it with gunzip",
    b"\x28\xb5\x2f\xfd": "compressed with Zstandard; unpack it with unzstd",
    b"PK\x03\x04": "a ZIP archive; unpack it",
}
"""First bytes of other kinds of files, and how to convert them."""


@dataclass(frozen=True)
class JsonLine:
    """A line that is not blank."""

    place: str
    """File and line, for messages."""
    number: int
    """Counted from 1."""
    content: bytes
    """Without the line end."""
    record: dict[str, Any]


def read_json_lines(path: Path, kind: str) -> Iterator[JsonLine]:
    """The objects of a JSONL file in order.

    Args:
        kind: what the file holds, for messages: "prompt" or "example".

    Raises:
        DataError: naming file and line, for a missing file, one of another kind, a line that is too long or no JSON
            object, or a key that an object has twice.
    """
    if not path.is_file():
        raise DataError(f"{kind} file {path} does not exist; give the path of a JSONL file")
    with path.open("rb") as file:
        _refuse_other_kinds(path, kind, file.read(16))
        file.seek(0)
        number = 0
        while line := file.readline(LONGEST_LINE_BYTES + 1):
            number += 1
            place = f"{path}:{number}"
            if len(line) > LONGEST_LINE_BYTES:
                raise DataError(
                    f"{place}: the line is longer than {LONGEST_LINE_BYTES} bytes; write one JSON object per line, "
                    "and split longer ones"
                )
            if line.strip():
                content = line.rstrip(b"\r\n")
                yield JsonLine(place, number, content, _parse(content, place))


def _refuse_other_kinds(path: Path, kind: str, start: bytes) -> None:
    for magic, other in OTHER_KINDS.items():
        if start.startswith(magic):
            raise DataError(f"{kind} file {path} must be JSONL, one JSON object per line, but is {other}")


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{place}: not valid JSON ({error}); write one JSON object per line") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: holds a {type(record).__name__}; write one JSON object per line")

    def without_duplicates(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DataError(f"{place}: has the key {key!r} twice in one object; remove one of them")
            seen.add(key)

    # orjson silently keeps the last of equal keys.
    try:
        json.loads(line, object_pairs_hook=without_duplicates, parse_int=float)
    except RecursionError as error:
        raise DataError(f"{place}: is nested too deeply; write flatter objects") from error
    return record
