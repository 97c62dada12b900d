"""Whole runs of a few steps, on the embedded model and in a real run folder."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from lucidrl.collectors.in_flight import GroupsInFlight
from lucidrl.models.generation.continuous import ContinuousGenerator
from lucidrl.recipes.run import train
from lucidrl.recipes.settings import ALGORITHMS
from lucidrl.utils.config import load_config

SMALL = {
    "env": {"name": "arithmetic", "kwargs": {"max_operand": 9}},
    "policy": {"generation": {"max_new_tokens": 4}, "optimizer": {"kwargs": {"lr": 1e-3}}},
    "validation": {"num_prompts": 8, "every": 2},
    "checkpoint": {"every": 0},
    "tracking": {"tensorboard": False, "dump_samples_every": 1},
}
SMALL_GRPO = {
    # The entropy bonus gives every step a gradient, whatever the model has learned already.
    "grpo": {"max_steps": 4, "loss": {"entropy_coefficient": 0.01}},
    "collector": {"prompts_per_step": 4, "samples_per_prompt": 4},
}
SMALL_DISTILL = {
    "distill": {"max_steps": 4, "reward_coefficient": 0.5},
    "policy": {"model_name": "embedded-untrained"},
    "teacher": {"model_name": "embedded"},
    "collector": {"prompts_per_step": 4, "samples_per_prompt": 4},
}
SMALL_SFT = {"sft": {"max_steps": 4, "examples_per_step": 8}}
SMALL_DPO = {"dpo": {"max_steps": 4, "examples_per_step": 8}}
SMALL_REWARD_MODEL = {"reward_model": {"max_steps": 4, "examples_per_step": 8}}
SMALL_BY_ALGORITHM = {
    "grpo": SMALL_GRPO,
    "distill": SMALL_DISTILL,
    "sft": SMALL_SFT,
    "dpo": SMALL_DPO,
    "reward_model": SMALL_REWARD_MODEL,
}


@dataclass
class Watcher:
    """Records the calls; presses Ctrl-C at step `interrupt_at`, raises at step `die_at`."""

    interrupt_at: int | None = None
    die_at: int | None = None
    validated: list[int] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    samples_of: dict[int, Any] = field(default_factory=dict)

    def on_validation(self, step, metrics):
        self.validated.append(step)

    def on_samples(self, step, message_logs, rewards):
        self.samples_of[step] = (message_logs, rewards)

    def on_step(self, step, metrics):
        if step == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)
        if step == self.die_at:
            raise RuntimeError("died before anything of this step was saved")

    def announce(self, message):
        self.messages.append(message)


@dataclass
class RunFolder:
    """A run's folder, read back."""

    path: Path
    watcher: Watcher

    def lines(self):
        """The metrics of steps, without what depends on the clock."""
        records = [orjson.loads(line) for line in (self.path / "metrics.jsonl").read_bytes().splitlines()]
        return [
            {
                name: value
                for name, value in record.items()
                if not name.startswith(("time", "observe/", "logger/")) and not name.endswith("_per_s")
            }
            for record in records
            if "step" in record and "time/whole_step_s" not in record
        ]

    def train_metric(self, name):
        return [line[f"train/{name}"] for line in self.lines() if f"train/{name}" in line]


@pytest.fixture
def run(tmp_path):
    """run("grpo", "folder", *overrides, interrupt_at=…, die_at=…, resume=…) → the folder and the last step."""

    def start(algorithm, name, *overrides, interrupt_at=None, die_at=None, resume=False):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        watcher = Watcher(interrupt_at, die_at)
        config = load_config(ALGORITHMS[algorithm], SMALL, SMALL_BY_ALGORITHM[algorithm], overrides=overrides)
        return RunFolder(folder, watcher), train(config, folder, watcher, resume)

    return start


@pytest.fixture
def asynchronous_parts(monkeypatch):
    """Names of the asynchronous parts that runs have made."""
    made = []

    def note(part):
        init = part.__init__

        def noted(self, *args, **kwargs):
            made.append(part.__name__)
            init(self, *args, **kwargs)

        monkeypatch.setattr(part, "__init__", noted)

    note(ContinuousGenerator)
    note(GroupsInFlight)
    return made
