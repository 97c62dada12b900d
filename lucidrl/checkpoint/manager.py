"""Saves, finds, verifies and prunes the checkpoints of a run.

A checkpoint is a folder `step_N` with the files of its writer, `state.json` and `manifest.json`. The folder gets this
name only when it is complete, so a `step_N` folder is either complete or was damaged later.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lucidrl.checkpoint.manifest import MANIFEST_NAME, FileDigest, read_json, verify_manifest, write_manifest
from lucidrl.checkpoint.staging import (
    clean_up_after_killed_processes,
    disk_full,
    is_disk_full,
    is_hidden,
    locked,
    make_hidden_folder,
    put_in_place,
    remove_folder,
)
from lucidrl.checkpoint.tensors import flatten_state, unflatten_state
from lucidrl.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

STATE_NAME = "state.json"
_STEP = re.compile(r"step_(0|[1-9][0-9]*)")


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint; its files are read from `path`."""

    step: int
    path: Path
    state: dict[str, Any]
    """Plain values of the caller, such as the position in the data."""
    metrics: dict[str, float]
    weights_only: bool = False
    """Whether the checkpoint has no optimizer state, so that no run can resume from it."""


class PendingCheckpoint:
    """A checkpoint that is being written: a hidden folder to fill, then to commit or discard.

    Attributes:
        folder: the hidden folder.
        target: the folder of the committed checkpoint.
    """

    def __init__(self, step: int, root: Path, record: str, on_commit: Callable[[], None]) -> None:
        self.step = step
        self.target, self._record, self._on_commit = root / f"step_{step}", record, on_commit
        self.folder = make_hidden_folder(self.target)
        self._lock = ExitStack()
        self._lock.enter_context(locked(self.folder))

    def commit(self, digests: Mapping[Path, FileDigest] | None = None) -> None:
        """Turn the folder into a checkpoint, which survives a crash of the machine.

        Args:
            digests: digests of files that were hashed while they were written; all other files are read and hashed.
        """
        try:
            (self.folder / STATE_NAME).write_text(self._record)
            write_manifest(self.folder, digests)
            put_in_place(self.folder, self.target)
        except BaseException as error:
            self.discard()
            if is_disk_full(error):
                raise self.disk_full() from error
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"cannot put {self.target} in place: {error}; check its parent folder (earlier checkpoints are "
                    "unchanged)"
                ) from error
            raise
        self._lock.close()
        self._on_commit()

    def discard(self) -> None:
        """Remove the folder; earlier checkpoints are unchanged. May be called twice."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def disk_full(self) -> CheckpointError:
        """The error for a full disk."""
        steps = [path for path in self.target.parent.iterdir() if _STEP.fullmatch(path.name)]
        newest = max(steps, key=lambda path: int(path.name.removeprefix("step_")), default=None)
        if newest is None:
            return disk_full(self.target, "the bytes needed are not known")
        size_bytes = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
        return disk_full(self.target, f"the newest checkpoint, {newest.name}, takes {size_bytes} bytes")


class CheckpointManager:
    """The checkpoints below one folder.

    Args:
        root: folder of the checkpoints; the first save creates it.
        keep_last: number of newest checkpoints to keep.
        metric: name of the metric whose best checkpoint is also kept.
        mode: whether the largest or the smallest value is the best.

    Example:
        >>> with manager.saving(step, state={"epoch": 1}, metrics={"reward": 0.7}) as folder:
        ...     policy.save(folder)
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
        clean_up_after_killed_processes(self.root)

    def begin(
        self,
        step: int,
        state: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        *,
        weights_only: bool = False,
    ) -> PendingCheckpoint:
        """Create a folder that the caller fills and then commits as `step_N`.

        The commit replaces an existing checkpoint of that step, and prunes old checkpoints.

        Args:
            step: step that the checkpoint belongs to, 0 or more.
            state: plain values (no tensors) to save; copied now.
            metrics: metrics of that step; the manager's `metric` ranks the checkpoint.
            weights_only: whether the caller writes no optimizer state.

        Raises:
            CheckpointError: if the state cannot be written as JSON.
        """
        record = _encode_record(step, state or {}, metrics or {}, weights_only)
        self.root.mkdir(parents=True, exist_ok=True)
        return PendingCheckpoint(step, self.root, record, on_commit=lambda: self._prune(just_saved=step))

    @contextmanager
    def saving(
        self, step: int, state: Mapping[str, Any] | None = None, metrics: Mapping[str, float] | None = None
    ) -> Iterator[Path]:
        """`begin` as a context manager: a normal exit commits the checkpoint, an exception discards it.

        Raises:
            CheckpointError: as `begin`, and if the disk is full.
        """
        pending = self.begin(step, state, metrics)
        try:
            yield pending.folder
        except BaseException as error:
            pending.discard()
            if is_disk_full(error):
                raise pending.disk_full() from error
            raise
        pending.commit()

    def latest(self) -> Checkpoint | None:
        """The newest valid checkpoint, or None; skips damaged ones with a warning."""
        return self._first_valid(reversed(self._folders(with_links=True).values()))

    def to_resume(self) -> Checkpoint:
        """The newest valid checkpoint, to resume from.

        Raises:
            CheckpointError: if there is no valid checkpoint, or if the newest one has no optimizer state.
        """
        newest = self.latest()
        if newest is None:
            raise CheckpointError(f"{self.root} has no valid checkpoint to resume from; start a new run")
        if newest.weights_only:
            raise CheckpointError(
                f"{newest.path} has no optimizer state, so no run can resume from it: it was saved with "
                "checkpoint.weights_only=true, or `lucidrl clean --optimizer` removed the state; start a new run (for "
                f"a language model, from these weights with policy.model_name={newest.path / 'policy'})"
            )
        return newest

    def best(self) -> Checkpoint | None:
        """The valid checkpoint with the best metric, or None; of equal values the newest wins, and NaN never wins."""
        return self._first_valid(self.root / f"step_{step}" for step in self._ranked(self._metrics_by_step()))

    def valid(self) -> list[Checkpoint]:
        """All valid checkpoints, oldest first; skips damaged ones with a warning."""
        found = (self._first_valid(iter([folder])) for folder in self._folders().values())
        return [checkpoint for checkpoint in found if checkpoint is not None]

    def superseded(self) -> list[Path]:
        """Folders of checkpoints that are neither the newest nor the best, oldest first; verifies no files."""
        metrics_by_step = self._metrics_by_step()
        keep = {*list(metrics_by_step)[-1:], *self._ranked(metrics_by_step)[:1]}
        return [self.root / f"step_{step}" for step in metrics_by_step if step not in keep]

    def load(self, which: Path | str | int) -> Checkpoint:
        """Verify and open the checkpoint of a step of this run, or the one at a path.

        Raises:
            CheckpointError: if there is none, or if a file is missing, changed or unexpected; the message names the
                newest valid checkpoint.
        """
        folder = self.root / f"step_{which}" if isinstance(which, int) else Path(which)
        if not folder.is_dir():
            known = ", ".join(str(step) for step in self._folders()) or "none"
            raise CheckpointError(f"there is no checkpoint {folder}; steps saved in {self.root}: {known}")
        try:
            return _open_checkpoint(folder)
        except CheckpointError as error:
            newest = self.latest()
            valid = newest.path if newest is not None else "none"
            raise CheckpointError(f"{error} (newest valid checkpoint in {self.root}: {valid})") from error

    def _first_valid(self, folders: Iterator[Path]) -> Checkpoint | None:
        for folder in folders:
            try:
                return _open_checkpoint(folder)
            except (CheckpointError, OSError) as error:
                log.warning("skipping a checkpoint: %s", error)
        return None

    def _folders(self, *, with_links: bool = False) -> dict[int, Path]:
        """The step folders, oldest first; ignores other files.

        Args:
            with_links: include symbolic links named `step_N`; opening such a link raises.
        """
        if not self.root.is_dir():
            return {}
        named = ((_STEP.fullmatch(path.name), path) for path in self.root.iterdir())
        steps = {int(match[1]): path for match, path in named if match}
        return {
            step: path for step, path in sorted(steps.items()) if (with_links if path.is_symlink() else path.is_dir())
        }

    def _metrics_by_step(self) -> dict[int, dict[str, float]]:
        """Metrics of every checkpoint with a readable `state.json`; does not verify other files."""
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
            remove_folder(self.root / f"step_{step}")


def verify_part(folder: Path) -> None:
    """Verify a folder inside a checkpoint, such as `step_N/policy`; accepts folders outside of checkpoints.

    Raises:
        CheckpointError: if one of its files is missing, changed or unexpected.
    """
    checkpoint = folder.resolve().parent
    if (checkpoint / MANIFEST_NAME).is_file() and (checkpoint / STATE_NAME).is_file():
        verify_manifest(checkpoint, below=folder.resolve().name)


def _open_checkpoint(folder: Path) -> Checkpoint:
    if folder.is_symlink():
        raise _unusable(folder, "it is a symbolic link")
    if is_hidden(folder):
        raise _unusable(folder, "it was not committed")
    verify_manifest(folder)
    checkpoint = _read_record(folder)
    if _STEP.fullmatch(folder.name) and folder.name != f"step_{checkpoint.step}":
        raise _unusable(folder, f"its {STATE_NAME} belongs to step {checkpoint.step}")
    return checkpoint


def _encode_record(step: int, state: Mapping[str, Any], metrics: Mapping[str, float], weights_only: bool) -> str:
    if step < 0:
        raise CheckpointError(f"step={step} is negative; pass 0 or more")
    numbers = {name: float(value) for name, value in metrics.items()}
    content = {"step": step, "weights_only": weights_only, "metrics": numbers, "state": dict(state)}
    tensors, record = flatten_state(content)
    if tensors:
        raise CheckpointError(
            f"{next(iter(tensors))} is a tensor, but {STATE_NAME} holds only plain values; write it to another file"
        )
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def _read_record(folder: Path) -> Checkpoint:
    try:
        record = unflatten_state({}, read_json(folder, STATE_NAME))
        metrics = {name: float(value) for name, value in dict(record["metrics"]).items()}
        # Checkpoints of earlier releases lack the key and always have an optimizer.
        weights_only = bool(record.get("weights_only", False))
        return Checkpoint(int(record["step"]), folder, dict(record["state"]), metrics, weights_only)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _unusable(folder, f"{STATE_NAME}: {error!r}") from error


def _unusable(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {folder} cannot be used: {reason}; use another one")
