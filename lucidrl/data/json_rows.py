"""Rows of JSON files, read from disk when they are used: one object per line, or an array of objects."""

from __future__ import annotations

import json
import mmap
import os
import re
from array import array
from pathlib import Path
from typing import Any

import orjson

from lucidrl.errors import DataError

LONGEST_ROW_BYTES = 8 << 20
"""Far above any context length: a longer row is a mistake, or the file has another format."""
OTHER_KINDS = {
    b"PAR1": "a Parquet file; rename it to .parquet",
    b"ARROW1": "an Arrow file; rename it to .arrow",
    b"\x1f\x8b": "compressed with gzip; unpack it with gunzip",
    b"\x28\xb5\x2f\xfd": "compressed with Zstandard; unpack it with unzstd",
    b"PK\x03\x04": "a ZIP archive; unpack it",
}
"""First bytes of files in other formats, with the name of the format and the remedy."""
_MOST_DIGITS = 20
"""Digits of the largest integer of 64 bits; the smallest has as many characters."""
_BOM = b"\xef\xbb\xbf"
_TOKENS = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{}\[\]]', re.DOTALL)


class JsonLines:
    """A file with one JSON object per line; blank lines are skipped. The index takes 8 bytes per row."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._file = path.open("rb")
        refuse_other_kinds(path, "JSON lines", self._file.read(16))
        self._file.seek(0)
        self._starts = array("q")
        self._numbers: array[int] | None = None  # line numbers; None while line n is row n
        offset = number = 0
        while line := self._file.readline(LONGEST_ROW_BYTES + 1):
            number += 1
            if len(line) > LONGEST_ROW_BYTES:
                raise DataError(
                    f"{path}:{number}: the line is longer than {LONGEST_ROW_BYTES} bytes; write one JSON object per "
                    "line, and split longer ones"
                )
            if line.strip():
                if self._numbers is None and number != len(self._starts) + 1:
                    self._numbers = array("q", range(1, len(self._starts) + 1))
                if self._numbers is not None:
                    self._numbers.append(number)
                self._starts.append(offset)
            offset += len(line)
        self._starts.append(offset)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def content(self, index: int) -> bytes:
        """The bytes of the row's line, without the line break."""
        start, end = self._starts[index], self._starts[index + 1]
        found = os.pread(self._file.fileno(), end - start, start)
        return found.partition(b"\n")[0].rstrip(b"\r")  # blank lines may follow

    def row(self, index: int) -> dict[str, Any]:
        content = self.content(index)
        if index == 0:
            content = content.removeprefix(_BOM)
        return parsed(content, self.place(index), "write one JSON object per line")

    def place(self, index: int) -> str:
        return f"{self._path}:{self._line(index)}"

    def row_id(self, index: int) -> str:
        return f"{self._path.stem}:{self._line(index)}"

    def _line(self, index: int) -> int:
        return index + 1 if self._numbers is None else self._numbers[index]


class JsonArray:
    """A file with one array of JSON objects. The index takes 16 bytes per row."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._starts, self._ends = array("q"), array("q")
        with path.open("rb") as file:
            refuse_other_kinds(path, "JSON", file.read(16))
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._find_rows()

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> dict[str, Any]:
        content = self._content[self._starts[index] : self._ends[index]]
        return parsed(content, self.place(index), "write an array of objects")

    def place(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"

    def row_id(self, index: int) -> str:
        return f"{self._path.stem}:{index + 1}"

    def _find_rows(self) -> None:
        depth, end = 0, 0
        for token in _TOKENS.finditer(self._content):
            kind = self._content[token.start()]
            if depth <= 1 and kind in b'{["':
                self._check_element(depth, end, token)
                if depth == 1:
                    self._starts.append(token.start())
            if kind in b"{[":
                depth += 1
            elif kind in b"}]":
                if depth == 1 and (rest := self._content[end : token.start()].strip()):
                    self._refuse_element(repr(rest[:40].decode(errors="replace")))
                depth -= 1
                if depth == 1:
                    self._ends.append(token.end())
                    self._check_size()
            if depth <= 1:
                end = token.end()
        if depth or self._content[end:].strip():
            raise DataError(
                f"{self.name} is not valid JSON: the file does not end where its array ends; write one array of objects"
            )

    def _check_element(self, depth: int, end: int, token: re.Match[bytes]) -> None:
        """Raise DataError unless the token begins the file's only array or an object in it."""
        before = self._content[end : token.start()].strip()
        kind = token[0][:1]
        expected = b"[" if depth == 0 else b"{"
        separator = b"," if depth == 1 and self._starts else b""
        if depth == 0 and end:
            raise DataError(f"{self.name} holds more than one JSON value; write an array of objects, or name it .jsonl")
        if kind != expected or before.removeprefix(_BOM) != separator:
            found = {b'"': "a string", b"[": "a list", b"{": "an object"}[kind]
            found = repr(before[:40].decode(errors="replace")) if before not in (b"", b",", _BOM) else found
            self._refuse_element(found)

    def _refuse_element(self, found: str) -> None:
        raise DataError(f"{self.place(len(self._starts))}: holds {found}; write an array of objects")

    def _check_size(self) -> None:
        if (size := self._ends[-1] - self._starts[-1]) > LONGEST_ROW_BYTES:
            raise DataError(
                f"{self.place(len(self._ends) - 1)}: has {size} bytes, more than {LONGEST_ROW_BYTES}; split the row"
            )


def open_json(path: Path) -> JsonLines | JsonArray:
    """Open a `.json` file: an array of objects, or one object per line if the file does not begin with `[`."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(_BOM).lstrip()
    return JsonArray(path) if start.startswith(b"[") else JsonLines(path)


def refuse_other_kinds(path: Path, kind: str, start: bytes) -> None:
    """Raise DataError if the first bytes of a file show another format."""
    for magic, other in OTHER_KINDS.items():
        if start.startswith(magic):
            raise DataError(f"{path} must hold {kind}, but is {other}")


def parsed(content: bytes, place: str, remedy: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        DataError: the content is not a JSON object, an object in it has a key twice, or an integer has more than 64
            bits.
    """
    try:
        record = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{place}: not valid JSON ({error}); {remedy}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: holds a {type(record).__name__}; {remedy}")

    def without_duplicates(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DataError(f"{place}: has the key {key!r} twice in one object; remove one of them")
            seen.add(key)

    def within_64_bits(digits: str) -> None:
        if len(digits) > _MOST_DIGITS or not -(2**63) <= int(digits) < 2**64:
            shown = digits if len(digits) <= 40 else f"{digits[:40]}..."
            raise DataError(
                f"{place}: the integer {shown} has more than 64 bits, so it would be rounded; write it as a string"
            )

    # Only to find duplicate keys, of which orjson silently keeps the last, and integers that it rounds.
    try:
        json.loads(content, object_pairs_hook=without_duplicates, parse_int=within_64_bits)
    except RecursionError as error:
        raise DataError(f"{place}: is nested too deeply; write flatter objects") from error
    return record
