"""The folder of a Ray that is started for a run: removed with it or, if its program was killed, by the next one.

A lock on the folder says that its program lives. It ends with the process, however that ends, and holds across
containers, where process ids say nothing.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from lucidrl.errors import WorkerError

# Ray's sockets are below it, and their paths must be short: not where TMPDIR may lead.
_PARENT = Path("/tmp")
_PREFIX = "lucid-ray-"
_MOST_ATTEMPTS = 10


class OwnFolder:
    """A new folder, locked by this process; what programs of this user that were killed have left is removed first.

    Raises:
        WorkerError: if no folder can be made, or the file system has no locks.
    """

    def __init__(self) -> None:
        for left in _PARENT.glob(f"{_PREFIX}*"):
            descriptor = _locked(left)
            if descriptor is not None:
                _remove(left, descriptor)
        self.path, self._descriptor = _new()

    def remove(self) -> None:
        _remove(self.path, self._descriptor)


def is_own_folder(path: str) -> bool:
    """Whether a folder is one of these, of whichever program."""
    return Path(path).parent == _PARENT and Path(path).name.startswith(_PREFIX)


def _new() -> tuple[Path, int]:
    for _ in range(_MOST_ATTEMPTS):
        try:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_PARENT))
        except OSError as error:
            raise WorkerError(
                f"a Ray that is started for a run has its folder in {_PARENT}, where none can be made ({error}); see "
                "to the disk, or start a Ray yourself and set cluster.address=auto"
            ) from error
        descriptor = _locked(path)
        if descriptor is not None:
            return path, descriptor
        # Another program came between the two, took it for a folder that was left, and removes it.
    raise WorkerError(
        f"folders in {_PARENT} cannot be locked, as that of a Ray that is started for a run has to be; start a Ray "
        "yourself and set cluster.address=auto"
    )


def _locked(path: Path) -> int | None:
    """Lock the folder; None if it is somebody else's, locked, or gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_uid == os.getuid() and os.path.samestat(os.fstat(descriptor), path.lstat()):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _remove(path: Path, descriptor: int) -> None:
    """Remove a folder that this process holds, and let it go."""
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)
