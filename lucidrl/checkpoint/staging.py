"""Folders that get their name only when they are complete.

A folder is written under a hidden name and renamed at the end. A process locks its hidden folders, so an unlocked
hidden folder was left by a killed process.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lucidrl.errors import CheckpointError

log = logging.getLogger(__name__)

_SAVING, _REMOVED, _REPLACED = _PREFIXES = (".saving-", ".removed-", ".replaced-")


def make_hidden_folder(target: Path) -> Path:
    """A new hidden folder beside `target`, for `put_in_place`."""
    return Path(tempfile.mkdtemp(prefix=f"{_SAVING}{target.name}-", dir=target.parent))


def is_hidden(folder: Path) -> bool:
    """Whether the folder was never put in place, or was removed or replaced."""
    return folder.name.startswith(_PREFIXES)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Context manager: lock a folder until the context or the process ends; yields whether this process has the lock.

    It yields False if another process has the lock, or if the file system has no locks. Without locks, saving works
    too, but all hidden folders count as used.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = True
        except OSError:
            is_ours = False
        yield is_ours
    finally:
        os.close(descriptor)


def put_in_place(folder: Path, target: Path) -> None:
    """Rename a complete hidden folder to `target`, durably; an earlier `target` stays complete until then."""
    _sync_tree(folder)
    # A temporary folder is private; a finished one is as readable as its parent, and never writable for others.
    folder.chmod(stat.S_IMODE(target.parent.stat().st_mode) & 0o755)
    if target.is_symlink() or target.is_file():
        target.unlink()  # an earlier checkpoint is a folder
    if not target.exists():
        folder.rename(target)
        _sync(target.parent)
        return
    # No system call replaces a non-empty folder, so rename the old one first; after a crash, the next start undoes it.
    aside = target.parent / f"{_REPLACED}{target.name}-{uuid.uuid4().hex}"
    with locked(target):
        target.rename(aside)
        try:
            folder.rename(target)
        except BaseException:
            aside.rename(target)
            raise
        _sync(target.parent)
        shutil.rmtree(aside, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Hide a folder and delete it in a thread, which the process waits for when it exits.

    Deleting large files takes about as long as copying them. A process killed half-way leaves a hidden folder, not a
    damaged one.
    """
    try:
        hidden = folder.rename(folder.parent / f"{_REMOVED}{folder.name}-{uuid.uuid4().hex}")
    except OSError as error:
        log.warning("cannot remove the old checkpoint %s: %s", folder, error)
        return
    threading.Thread(target=shutil.rmtree, args=(hidden,), kwargs={"ignore_errors": True}, name="remover").start()


def clean_up_after_killed_processes(parent: Path, name: str | None = None) -> None:
    """Delete hidden folders that killed processes left in `parent`; restore folders that they were replacing.

    Args:
        name: handle only the hidden folders of the folder `name`; by default those of all folders.
    """
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        if not is_hidden(path) or not path.is_dir() or path.is_symlink():
            continue
        made = _name_of(path.name)
        if name not in (None, made):
            continue
        with suppress(FileNotFoundError), locked(path) as is_unused:  # another process may be removing it
            if not is_unused:
                log.info("leaving %s alone: another process may be using it", path)
            elif path.name.startswith(_REPLACED) and not (parent / made).exists():
                path.rename(parent / made)
            else:
                shutil.rmtree(path, ignore_errors=True)


def is_disk_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_full(target: Path, needed: str) -> CheckpointError:
    """The error for a folder that does not fit on the disk.

    Args:
        needed: the words of the error message that say how much space is needed, such as "800 bytes are needed in all".
    """
    named = Path(*(_name_of(part) if part.startswith(_PREFIXES) else part for part in target.parts))
    return CheckpointError(
        f"no space left to save {named}: {needed}, {shutil.disk_usage(target.parent).free} bytes are available; "
        "free some space or keep fewer checkpoints (earlier ones are unchanged)"
    )


def _name_of(hidden: str) -> str:
    """The name that a hidden folder has when it is in place."""
    return hidden.split("-", 1)[1].rpartition("-")[0]


def _sync_tree(folder: Path) -> None:
    """Flush files before folders, and inner folders before outer ones."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            _sync(Path(parent, name))
        _sync(Path(parent))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
