"""Saves, finds, verifies and prunes the checkpoints of a run.

A checkpoint is a folder `step_N` with whatever its writer put there, `state.json` and `manifest.json`. It is written
under a hidden name and renamed when complete, so a `step_N` folder is either whole or was damaged afterwards. A hidden
folder in use is locked by its process: what is found unlocked at a start was left by a killed one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lucidrl.checkpoint.manifest import verify_manifest, write_manifest
from lucidrl.checkpoint.tensors import flatten_state, unflatten_state
from lucidrl.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

STATE_NAME = "state.json"
_STEP = re.compile(r"step_(0|[1-9][0-9]*)")
_SAVING, _REMOVED, _REPLACED = ".saving-", ".removed-", ".replaced-"


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint; its files are read from `path`."""

    step: int
    path: Path
    state: dict[str, Any]
    """What the caller of `saving` gave, such as the position in the data."""
    metrics: dict[str, float]


class CheckpointManager:
    """The checkpoints below one folder.

    Args:
        root: folder of the checkpoints; it is made by the first save.
        keep_last: how many of the newest are kept.
        metric: name of the metric whose best checkpoint is kept as well.
        mode: whether the largest or the smallest value is best.

    Example:
        >>> with manager.saving(step, state={"epoch": 1}, metrics={"reward": 0.7}) as folder:
        ...     save_tensors(folder / "model.safetensors", weights)
    """

    def __init__(
        self, root: Path, keep_last: int = 3, metric: str | None = None, mode: Literal["max", "min"] = "max"
    ) -> None:
        if keep_last < 1:
            raise ConfigError(f"keep_last={keep_last} would keep no checkpoint; set it to 1 or more")
        if mode not in ("max", "min"):
            raise ConfigError(f"mode={mode!r} is not known; use 'max' or 'min'")
        self.root = Path(root)
        self._keep_last = keep_last
        self.metric = metric
        self._sign = 1 if mode == "max" else -1
        self._clean_up_after_killed_processes()

    @contextmanager
    def saving(
        self, step: int, state: Mapping[str, Any] | None = None, metrics: Mapping[str, float] | None = None
    ) -> Iterator[Path]:
        """Give a new folder to fill; leaving the block commits it as `step_N`, an exception discards it.

        An existing checkpoint of that step is replaced, and stays whole until the new one is. Old ones are pruned
        after the commit.

        Args:
            step: step that the checkpoint belongs to, 0 or more.
            state: plain values (no tensors) to keep beside the files; taken when the block is entered.
            metrics: numbers of that step; the one named by `metric` ranks the checkpoint.

        Raises:
            CheckpointError: if the state cannot be written as JSON or the disk is full.
        """
        record = _encode_record(step, state or {}, metrics or {})
        self.root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{_SAVING}step_{step}-", dir=self.root))
        try:
            with _locked(folder):
                yield folder
                (folder / STATE_NAME).write_text(record)
                write_manifest(folder)
                _sync_tree(folder)
                # A temporary folder is private; a checkpoint is as readable as the folder that holds it.
                folder.chmod(stat.S_IMODE(self.root.stat().st_mode))
                self._commit(folder, self.root / f"step_{step}")
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._disk_full(step) from error
            raise
        self._prune(just_saved=step)

    def latest(self) -> Checkpoint | None:
        """The newest valid checkpoint, or None; damaged ones are skipped with a warning."""
        return self._first_valid(reversed(self._folders().values()))

    def best(self) -> Checkpoint | None:
        """The valid checkpoint with the best metric, or None; of equal ones the newest, never a NaN."""
        return self._first_valid(self.root / f"step_{step}" for step in self._ranked(self._metrics_by_step()))

    def load(self, which: Path | str | int) -> Checkpoint:
        """Verify and open the checkpoint of a step of this run, or the one at a path.

        Raises:
            CheckpointError: if there is none, or if a file of it is missing, changed or unexpected.
        """
        folder = self.root / f"step_{which}" if isinstance(which, int) else Path(which)
        if not folder.is_dir():
            known = ", ".join(str(step) for step in self._folders()) or "none"
            raise CheckpointError(f"there is no checkpoint {folder}; steps saved in {self.root}: {known}")
        verify_manifest(folder)
        return _read_record(folder)

    def _first_valid(self, folders: Iterator[Path]) -> Checkpoint | None:
        for folder in folders:
            try:
                return self.load(folder)
            except (CheckpointError, OSError) as error:
                log.warning("skipping a checkpoint: %s", error)
        return None

    def _folders(self) -> dict[int, Path]:
        """The step folders, oldest first; whatever else lies in the root is not ours."""
        if not self.root.is_dir():
            return {}
        named = ((_STEP.fullmatch(path.name), path) for path in self.root.iterdir())
        found = {int(match[1]): path for match, path in named if match and path.is_dir() and not path.is_symlink()}
        return dict(sorted(found.items()))

    def _metrics_by_step(self) -> dict[int, dict[str, float]]:
        """Metrics of every checkpoint with a readable record; the tensors are not looked at."""
        metrics = {}
        for step, folder in self._folders().items():
            try:
                metrics[step] = _read_record(folder).metrics
            except CheckpointError as error:
                log.warning("ignoring a checkpoint: %s", error)
        return metrics

    def _ranked(self, metrics_by_step: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Steps that have the metric, best first."""
        if self.metric is None:
            return []
        values = {step: metrics.get(self.metric, math.nan) for step, metrics in metrics_by_step.items()}
        comparable = {step: self._sign * value for step, value in values.items() if not math.isnan(value)}
        return sorted(comparable, key=lambda step: (comparable[step], step), reverse=True)

    def _prune(self, just_saved: int) -> None:
        metrics_by_step = self._metrics_by_step()
        keep = {just_saved, *list(metrics_by_step)[-self._keep_last :], *self._ranked(metrics_by_step)[:1]}
        for step in metrics_by_step.keys() - keep:
            self._remove(self.root / f"step_{step}")

    def _commit(self, folder: Path, target: Path) -> None:
        if not target.exists():
            folder.rename(target)
            _sync(self.root)
            return
        # No call replaces a full folder in one go: step aside, and let the next start undo it if we die in between.
        aside = self.root / f"{_REPLACED}{target.name}-{uuid.uuid4().hex}"
        with _locked(target):
            target.rename(aside)
            try:
                folder.rename(target)
            except BaseException:
                aside.rename(target)
                raise
            _sync(self.root)
            shutil.rmtree(aside, ignore_errors=True)

    def _remove(self, folder: Path) -> None:
        """Delete a checkpoint; a process killed half-way leaves a hidden folder, not a damaged checkpoint."""
        try:
            shutil.rmtree(folder.rename(self.root / f"{_REMOVED}{folder.name}-{uuid.uuid4().hex}"))
        except OSError as error:
            log.warning("cannot remove the old checkpoint %s: %s", folder, error)

    def _clean_up_after_killed_processes(self) -> None:
        if not self.root.is_dir():
            return
        for path in sorted(self.root.iterdir()):
            if not path.name.startswith((_SAVING, _REMOVED, _REPLACED)) or not path.is_dir() or path.is_symlink():
                continue
            with _locked(path) as unused:
                if not unused:
                    log.info("leaving %s alone: another process may be using it", path)
                    continue
                target = self.root / path.name.removeprefix(_REPLACED).rpartition("-")[0]
                if path.name.startswith(_REPLACED) and not target.exists():
                    path.rename(target)
                else:
                    shutil.rmtree(path, ignore_errors=True)

    def _disk_full(self, step: int) -> CheckpointError:
        free_bytes = shutil.disk_usage(self.root).free
        newest = next(reversed(self._folders().values()), None)
        needed = f"the newest checkpoint takes {_size_bytes(newest)} bytes" if newest else "the size needed is unknown"
        return CheckpointError(
            f"no space left to save step {step} in {self.root}: {free_bytes} bytes are free, {needed}; "
            "free some space or lower keep_last (earlier checkpoints are untouched)"
        )


def _encode_record(step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
    if step < 0:
        raise CheckpointError(f"step={step} cannot name a checkpoint; steps are 0 or more")
    numbers = {name: float(value) for name, value in metrics.items()}
    tensors, record = flatten_state({"step": step, "metrics": numbers, "state": dict(state)})
    if tensors:
        raise CheckpointError(f"{next(iter(tensors))} is a tensor; write it to a file of the folder with save_tensors")
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def _read_record(folder: Path) -> Checkpoint:
    try:
        record = unflatten_state({}, json.loads((folder / STATE_NAME).read_text()))
        metrics = {name: float(value) for name, value in dict(record["metrics"]).items()}
        return Checkpoint(step=int(record["step"]), path=folder, state=dict(record["state"]), metrics=metrics)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {folder} cannot be used: {STATE_NAME}: {error!r}; use another one"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder; the lock ends with the process, however that ends. False if another has it.

    Also False where the file system has no such locks: saving goes on, and nothing found there is taken for unused.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(descriptor)


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _sync_tree(folder: Path) -> None:
    """Make files before folders, and inner folders before outer ones, durable."""
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
