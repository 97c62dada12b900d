"""Lists the samples, checkpoints and warnings of a run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from lucidrl.checkpoint.config import CHECKPOINTS_NAME
from lucidrl.report.metrics_file import is_number, read_lines
from lucidrl.utils.run_folder import SAMPLES_NAME, WARNINGS_NAME, entries_in, folders_in

_STATE_NAME = "state.json"


@dataclass(frozen=True)
class SamplesFile:
    """A file of samples."""

    path: Path
    name: str
    """`step` for training samples, `validation` for held-out ones."""
    step: int


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint folder; its files are not verified."""

    step: int
    path: Path
    metrics: Mapping[str, float]
    """Validation metrics of its step; empty if there was no validation or `state.json` is unreadable."""


@dataclass(frozen=True)
class RunWarning:
    """A warning that the run recorded."""

    step: int
    name: str
    message: str
    time: float | None


def list_samples(folder: Path) -> list[SamplesFile]:
    """The files of samples in a run folder, sorted by step."""
    found = []
    for entry in entries_in(folder / SAMPLES_NAME):
        name, _, step = entry.name.removesuffix(".jsonl").rpartition("_")
        if entry.name.endswith(".jsonl") and step.isdecimal() and entry.is_file(follow_symlinks=False):
            found.append(SamplesFile(Path(entry), name, int(step)))
    return sorted(found, key=lambda file: (file.step, file.name))


def list_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """The checkpoints in a run folder, sorted by step."""
    steps = {step: path for path in folders_in(folder / CHECKPOINTS_NAME) if (step := _step_of(path)) >= 0}
    return [SavedCheckpoint(step, steps[step], _saved_metrics(steps[step])) for step in sorted(steps)]


def read_warnings(folder: Path) -> list[RunWarning]:
    """The warnings in a run folder, in the order of the file; skips lines that are not warnings."""
    try:
        records = [record for record in read_lines(folder / WARNINGS_NAME) if record is not None]
    except OSError:
        return []
    return [
        RunWarning(
            record["step"] if type(record.get("step")) is int else 0,
            str(record.get("name", "")),
            str(record["message"]),
            record["time"] if is_number(record.get("time")) else None,
        )
        for record in records
        if "message" in record
    ]


def _step_of(checkpoint: Path) -> int:
    step = checkpoint.name.removeprefix("step_")
    return int(step) if checkpoint.name.startswith("step_") and step.isdecimal() else -1


def _saved_metrics(checkpoint: Path) -> dict[str, float]:
    try:
        metrics = orjson.loads((checkpoint / _STATE_NAME).read_bytes())["metrics"]
        return {str(name): float(value) for name, value in metrics.items() if is_number(value)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
