"""Frees disk space of checkpoints without damaging them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lucidrl.checkpoint.manager import STATE_NAME, CheckpointManager
from lucidrl.checkpoint.manifest import listed_files


def remove_part(manager: CheckpointManager, folder: Path, part: str) -> None:
    """Replace a checkpoint by one without the folder `part`, such as `optimizer`; no run can resume from the new one.

    The other files are hard links, or copies if the file system has no links. If the process is killed, one of the two
    checkpoints is complete.

    Raises:
        CheckpointError: if the checkpoint is damaged; it is not changed.
    """
    checkpoint = manager.load(folder)
    pending = manager.begin(checkpoint.step, checkpoint.state, checkpoint.metrics, weights_only=True)
    try:
        digests = {}
        for name, digest in listed_files(folder).items():
            if name.parts[0] != part and str(name) != STATE_NAME:
                target = pending.folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                _link_or_copy(folder / name, target)
                digests[target] = digest
    except BaseException:
        pending.discard()
        raise
    pending.commit(digests)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no links
        shutil.copy2(source, target)
