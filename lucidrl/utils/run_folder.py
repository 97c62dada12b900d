"""The run folder: names of its files, its lock, and its size on disk."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import orjson

from lucidrl.errors import ConfigError

log = logging.getLogger(__name__)

METRICS_NAME, WARNINGS_NAME, BREAKDOWN_NAME = "metrics.jsonl", "warnings.jsonl", "breakdown.json"
SAMPLES_NAME, TRACES_NAME, EVAL_NAME = "samples", "traces", "eval"
ENVIRONMENT_NAME, REPORT_NAME = "environment.json", "report.html"
LOGS_NAME, DRIVER_LOG_NAME = "logs", "driver.log"
LOCK_NAME = "run.lock"
"""Names in a run folder; `lucidrl.checkpoint.config` has those of settings and checkpoints."""
_MAX_LOCK_BYTES = 4096


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Lock the run folder for this process; the operating system releases the lock if the process is killed.

    `run.lock` names the process that holds the lock. A file without a lock was left by a killed process.

    Raises:
        ConfigError: another process holds the lock; the message names it.
    """
    path = folder / LOCK_NAME
    descriptor = _locked_file(path)
    try:
        if left := os.pread(descriptor, _MAX_LOCK_BYTES, 0):
            log.info("taking over %s from %s, which was killed", folder, _owner(left))
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _own_entry(), 0)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error}); check the disk, then start again") from error
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def is_occupied(folder: Path) -> bool:
    """Whether a process works in the run folder; changes nothing."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:  # a link, or a file of another user
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, or a file system without locks
        return True
    finally:
        os.close(descriptor)
    return False


def _locked_file(path: Path) -> int:
    """Create or open the file and lock it; closing the descriptor releases the lock."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error}); choose a writable run folder") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _owner(os.pread(descriptor, _MAX_LOCK_BYTES, 0))
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                problem = f"{path.parent} is in use by {owner}; wait until it exits, or start another run"
            else:
                problem = f"{path} cannot be locked ({error}); put run.root on a file system with locks"
            raise ConfigError(problem) from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # the previous holder has just removed the file


def _own_entry() -> bytes:
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    return orjson.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})


def _owner(entry: bytes) -> str:
    """Describe the process that wrote the entry of a lock file; a new lock file is empty for a moment."""
    try:
        found = orjson.loads(entry)
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "another process"


def size_bytes(path: Path) -> int:
    """Size in bytes of a file, or of all files below a folder; links count 0."""
    try:
        status = path.lstat()
    except OSError:  # a run in progress has just removed it
        return 0
    if stat.S_ISDIR(status.st_mode):
        return sum(size_bytes(Path(entry)) for entry in entries_in(path))
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def folders_in(folder: Path) -> list[Path]:
    """The folders in a folder, sorted by name, without links."""
    return [Path(entry) for entry in entries_in(folder) if entry.is_dir(follow_symlinks=False)]


def entries_in(folder: Path) -> list[os.DirEntry[str]]:
    """What a folder contains, sorted; nothing if it cannot be read or has just been removed."""
    if os.path.islink(folder) or not os.path.isdir(folder):  # unlike a Path's methods, never raise
        return []
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []
