"""A file that grows by whole records, also on a disk that fills up."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class WholeRecords:
    """Appends records; one that cannot be written entirely is taken back, so that no torn one lies between others.

    Nothing is buffered: what was appended survives the end of the process.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def append(self, record: bytes) -> None:
        """Write `record`, or raise OSError and leave the file as it was."""
        size_bytes = os.fstat(self._file.fileno()).st_size
        rest = memoryview(record)
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(size_bytes)
            raise

    def close(self) -> None:
        self._file.close()
