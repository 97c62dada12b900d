"""Rows of CSV files, read from disk when they are used; a quoted field may hold line breaks."""

from __future__ import annotations

import csv
import os
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from lucidrl.data.json_rows import LONGEST_ROW_BYTES, refuse_other_kinds
from lucidrl.errors import DataError


class CsvFile:
    """A CSV file whose first record names the columns; all values are strings. The index takes 8 bytes per row."""

    def __init__(self, path: Path, delimiter: str = ",") -> None:
        self.name = str(path)
        self._path, self._delimiter = path, delimiter
        self._file = path.open("rb")
        refuse_other_kinds(path, "CSV", self._file.read(16))
        self._file.seek(0)
        self._starts = array("q")
        self._columns: list[str] = []
        lines = _Lines(self._file, path)
        records = self._records(lines)
        while True:
            start = lines.offset
            record = self._next(records)
            if record is None:
                break
            if lines.offset - start > LONGEST_ROW_BYTES:
                problem = f"has more than {LONGEST_ROW_BYTES} bytes"
                raise DataError(f"{self._place_of_next()}: {problem}; split the row, or close the quotes in it")
            if not record:
                continue
            if self._columns:
                self._starts.append(start)
            else:
                self._columns = self._checked_header(record)
        self._starts.append(lines.offset)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def row(self, index: int) -> dict[str, str]:
        start, end = self._starts[index], self._starts[index + 1]
        content = os.pread(self._file.fileno(), end - start, start).decode()
        record = self._next(self._records(f"{line}\n" for line in content.split("\n")))
        assert record is not None
        if len(record) != len(self._columns):
            raise DataError(
                f"{self.place(index)}: has {len(record)} fields, but the header has {len(self._columns)} "
                f"({', '.join(self._columns)}); fix the row, or quote fields that hold {self._delimiter!r}"
            )
        return dict(zip(self._columns, record, strict=True))

    def place(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"

    def row_id(self, index: int) -> str:
        return f"{self._path.stem}:{index + 1}"

    def _records(self, lines: Iterable[str]) -> Iterator[list[str]]:
        return csv.reader(lines, delimiter=self._delimiter, strict=True)

    def _next(self, records: Iterator[list[str]]) -> list[str] | None:
        try:
            with _long_fields():
                return next(records, None)
        except csv.Error as error:
            raise DataError(f"{self._place_of_next()}: is not valid CSV ({error}); fix the row") from error

    def _place_of_next(self) -> str:
        return self.place(len(self._starts)) if self._columns else f"{self.name}, header"

    def _checked_header(self, columns: list[str]) -> list[str]:
        name, count = Counter(columns).most_common(1)[0]
        if count > 1:
            raise DataError(f"{self.name}, header: has the column {name!r} {count} times; rename one of them")
        if not all(columns):
            raise DataError(f"{self.name}, header: has a column without a name; the first line must name every column")
        return columns


class _Lines:
    """Decoded lines of a file, and the number of bytes read so far."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self.offset = 0
        self._number = 0

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline(LONGEST_ROW_BYTES + 1):
            self._number += 1
            self.offset += len(line)
            if len(line) > LONGEST_ROW_BYTES:
                raise DataError(
                    f"{self._path}, line {self._number} is longer than {LONGEST_ROW_BYTES} bytes; shorten it"
                )
            try:
                yield line.decode("utf-8-sig" if self._number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{self._path}, line {self._number} is not valid UTF-8 ({error}); save the file as UTF-8"
                ) from error


@contextmanager
def _long_fields() -> Iterator[None]:
    """Allow fields as long as the longest row; the csv module has one limit for the whole process, restored after."""
    before = csv.field_size_limit(LONGEST_ROW_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)
