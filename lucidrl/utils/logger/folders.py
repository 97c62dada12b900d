"""Run folders, file names that stay inside them, and files that are never left half-written."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from lucidrl.errors import ConfigError

_EXPERIMENT = re.compile(r"exp_([0-9]{1,9})")  # longer numbers are not ours


def get_next_experiment_dir(base_log_dir: str) -> str:
    """Create and return the next free `exp_001`, `exp_002`, … of a folder; concurrent callers get different ones."""
    base = Path(base_log_dir)
    base.mkdir(parents=True, exist_ok=True)
    taken = [int(match[1]) for path in base.iterdir() if (match := _EXPERIMENT.fullmatch(path.name))]
    number = max(taken, default=0)
    while True:
        number += 1
        folder = base / f"exp_{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return str(folder)


def path_inside(folder: Path, filename: str) -> Path:
    """`folder / filename`; ConfigError if it is outside of `folder`, directly or by a link, or cannot be a file."""
    try:
        path = (folder / filename).resolve()
        root = folder.resolve()
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        raise ConfigError(f"file name {filename!r} cannot be used ({error}); use a plain relative name") from error
    if path == root or not path.is_relative_to(root):
        raise ConfigError(f"file name {filename!r} leaves the log folder {folder}; use a relative name without '..'")
    return path


@contextmanager
def whole_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file that replaces `path` when the block ends; if the block raises, `path` stays as it was."""
    # A random name: two loggers never write the same file, and it is short enough wherever `path` is.
    unfinished = path.with_name(f".{uuid.uuid4().hex}.unfinished")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_private_text(path: Path, text: str) -> None:
    """Replace a file, with mode 0600; it is written completely or not at all."""
    with whole_file(path, mode=0o600) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


class WholeRecords:
    """Appends records without buffering; a record that cannot be written entirely is removed again."""

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
