"""What a run left behind, as digests that are equal exactly if the runs were."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors.torch import load_file

from lucidrl.checkpoint.manager import CheckpointManager

CLOCK = ("time", "observe/", "logger/", "ray/", "train/tokens_per_s", "train/frames_per_s", "train/refit_gb_per_s")
"""Metrics that depend on the clock begin with these."""


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the newest checkpoint's parameters and optimizer, of all samples, of batch order and metrics."""
    checkpoint = CheckpointManager(folder / "checkpoints").latest()
    samples = [
        orjson.loads(line)
        for file in sorted((folder / "samples").glob("step_*.jsonl"), key=lambda path: int(path.stem[5:]))
        for line in file.read_bytes().splitlines()
    ]
    return {
        "parameters": _digest_of_tensors(checkpoint.path / "policy"),
        "optimizer": _digest_of_tensors(checkpoint.path / "optimizer"),
        "samples": _digest(samples),
        "batch order": _digest([sample["sample"] for sample in samples]),
        "metrics": _digest(metrics(folder)),
        "step": str(checkpoint.step),
    }


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step, those of its last time, without what depends on the clock."""
    records = {}
    for line in (folder / "metrics.jsonl").read_bytes().splitlines():
        record = {name: value for name, value in orjson.loads(line).items() if not name.startswith(CLOCK)}
        if "step" in record and len(record) > 1:
            records[record["step"], "train/loss" in record] = record
    return [record for _, record in sorted(records.items(), key=lambda item: item[0])]


def _digest_of_tensors(folder: Path) -> str:
    result = hashlib.sha256()
    tensors = {name: tensor for file in folder.rglob("*.safetensors") for name, tensor in load_file(file).items()}
    assert tensors, f"{folder} holds no tensors"
    for name, tensor in sorted(tensors.items()):
        result.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        result.update(tensor.reshape(-1, 1).view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
