"""ReplyCache: replies of the LLM judge on disk, one file per reply. Several processes may share a folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lucidrl.errors import ConfigError

_log = logging.getLogger(__name__)

_MOST_ENTRY_BYTES = 16 << 20
"""A larger file is not an entry of this cache."""
_TRIMS_PER_SIZE = 16
"""The cache is trimmed whenever this process has written this fraction of its size."""
_TRIMMED_TO = 0.9


@dataclass(frozen=True)
class Lookup:
    """What the cache has for a key."""

    reply: str | None
    """None if there is no intact entry."""
    is_damaged: bool = False
    """Whether there was an entry that cannot be read; it is removed."""


def default_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "lucidrl" / "judge"


class ReplyCache:
    """Replies by key, a hexadecimal hash of the request.

    Entries appear by a rename, so readers in other processes see whole entries only. A reply that cannot be written is
    not cached; the first such error is logged.

    Args:
        folder: created if missing, readable by the user alone.
        max_bytes: size to which the folder is trimmed now and then; the most recently used entries are kept.

    Raises:
        ConfigError: if the folder cannot be created or written.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._unwritten_error_logged = False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(
                f"the cache of the LLM judge cannot be written to {folder}: {error.strerror}; "
                "set reward.kwargs.cache_dir to another folder, or reward.kwargs.cache=false"
            ) from error
        self._bytes_since_trim = 0
        self._trim()

    def get(self, key: str) -> Lookup:
        path = self._path(key)
        try:
            with path.open("rb") as file:
                content = file.read(_MOST_ENTRY_BYTES)
            entry = json.loads(content)
            reply = entry["reply"]
            if _checksum(key, reply) != entry["sha256"]:
                raise ValueError("the checksum differs")
        except FileNotFoundError:
            return Lookup(None)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            with suppress(OSError):
                path.unlink()
            return Lookup(None, is_damaged=True)
        with suppress(OSError):
            os.utime(path)  # used now: trimming removes it last
        return Lookup(reply)

    def put(self, key: str, reply: str) -> None:
        content = json.dumps({"reply": reply, "sha256": _checksum(key, reply)}).encode()
        path = self._path(key)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            try:
                with open(handle, "wb") as file:
                    file.write(content)
                os.replace(temporary, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            if not self._unwritten_error_logged:
                self._unwritten_error_logged = True
                text = "replies of the LLM judge cannot be cached in %s: %s; later such errors are not logged"
                _log.warning(text, self._folder, error.strerror)
            return
        self._bytes_since_trim += len(content)
        if self._bytes_since_trim > self._max_bytes / _TRIMS_PER_SIZE:
            self._trim()

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"

    def _trim(self) -> None:
        """Remove the entries that were not used for the longest time, if the cache is too large."""
        self._bytes_since_trim = 0
        files = sorted(self._files())
        size_bytes = sum(size for _, size, _ in files)
        if size_bytes <= self._max_bytes:
            return
        for _, size, path in files:
            with suppress(OSError):  # another process may have removed it
                os.unlink(path)
            size_bytes -= size
            if size_bytes <= self._max_bytes * _TRIMMED_TO:
                break

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Time of last use, size and path of every entry."""
        for folder in self._folder.glob("[0-9a-f][0-9a-f]"):
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(OSError):
                        found = entry.stat(follow_symlinks=False)
                        yield found.st_mtime, max(found.st_size, found.st_blocks * 512), entry.path


def _checksum(key: str, reply: str) -> str:
    return hashlib.sha256(f"{key}\n{reply}".encode()).hexdigest()
