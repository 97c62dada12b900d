"""Asynchronous runs whose generators die or hang at the worst moments go on, and train on every prompt once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from lucidrl.algorithms.grpo import GRPO
from lucidrl.models.generation import separate
from lucidrl.models.generation.continuous import ContinuousGenerator
from lucidrl.models.policy.policy import Policy
from lucidrl.recipes.configs import GRPORunConfig
from lucidrl.recipes.run import train
from lucidrl.utils.config import load_config
from tests.faults.mortal_generators import FOLDER_VARIABLE, MortalGenerator, plan_death, was_met
from tests.faults.processes import is_running
from tests.unit.recipes.test_two_workers import Unwatched

SETTINGS = (
    "num_threads=1",
    "cluster.num_threads=1",
    "cluster.call_timeout_s=100",
    "policy.generation.placement=separate",
    "policy.generation.max_new_tokens=8",
    "policy.generation.step_timeout_s=3",
    "policy.optimizer.kwargs.lr=0.0001",
    "env.name=arithmetic",
    "env.kwargs={operations: ['+'], max_operand: 9}",
    "collector.prompts_per_step=10",
    "collector.samples_per_prompt=3",
    "grpo.async.max_staleness=1",
    "grpo.max_steps=10",
    "validation.num_prompts=0",
    "data.validation_fraction=0",
    "checkpoint.metric=null",
    "checkpoint.every=0",
    "tracking.tensorboard=false",
    "tracking.monitor=false",
    "tracking.dump_samples_every=1",
    "report.enabled=false",
)
"""Ten steps train on all 100 prompts."""


@pytest.fixture(autouse=True)
def mortal(tmp_path, monkeypatch):
    """Generators that tests can kill at a call."""
    (tmp_path / "deaths").mkdir()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "deaths"))
    monkeypatch.setitem(separate.ENGINES, "builtin", MortalGenerator)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def staleness(monkeypatch) -> list[int]:
    """Staleness of the oldest token of every sample that a step trains on."""
    found: list[int] = []
    prepare = GRPO.prepare

    def noted(self: GRPO, rollouts: Any, *args: Any, **kwargs: Any) -> Any:
        found.extend(rollouts.policy_version - min(one.version_range) for one in rollouts.samples)
        return prepare(self, rollouts, *args, **kwargs)

    monkeypatch.setattr(GRPO, "prepare", noted)
    return found


def before(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, call: int, act: Callable[[Any], None]) -> None:
    """Act once, before a call of the method; calls count from 1."""
    original, num_calls = getattr(owner, method), 0

    def acting(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            act(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, acting)


def run(folder: Path, *settings: str) -> list[dict[str, Any]]:
    """Run and return the records of the steps."""
    folder.mkdir()
    assert train(load_config(GRPORunConfig, overrides=[*SETTINGS, *settings]), folder, Unwatched()) == 10
    records = [orjson.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    return [record for record in records if "train/replaced_generators" in record]


def check_prompts(folder: Path) -> None:
    samples = [
        orjson.loads(line)["sample"]
        for step in range(1, 11)
        for line in (folder / f"samples/step_{step}.jsonl").read_bytes().splitlines()
    ]
    assert len(samples) == len(set(samples)) == 300, "a sample was lost or repeated"


DEATHS = {
    "killed in a slice": ("advance", signal.SIGKILL),
    "hung in a slice": ("advance", signal.SIGSTOP),
    "killed in a refit": ("take_weights", signal.SIGKILL),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("death", "num_workers"),
    [("killed in a slice", 2), ("hung in a slice", 1), ("hung in a slice", 2), ("killed in a refit", 2)],
)
def test_a_generator_that_fails_is_restarted_and_loses_no_sample(
    tmp_path, monkeypatch, staleness, caplog, death, num_workers
):
    method, with_signal = DEATHS[death]
    before(monkeypatch, Policy, "train", 4, lambda policy: plan_death(method, 0, with_signal))
    records = run(tmp_path / "run", f"policy.generation.num_workers={num_workers}")
    assert was_met(method, 0)
    assert sum(record["train/replaced_generators"] for record in records) >= 1
    if with_signal == signal.SIGSTOP:
        assert "did not finish a decoding step within 3 s" in caplog.text
        assert "raise policy.generation.step_timeout_s" in caplog.text
    check_prompts(tmp_path / "run")
    assert 0 <= min(staleness) <= max(staleness) == 1


@pytest.mark.slow
def test_a_generator_that_hangs_without_a_request_is_noticed_before_the_refit(tmp_path, monkeypatch, staleness, caplog):
    stopped: list[int] = []

    def stop_when_idle(generator: ContinuousGenerator) -> None:
        until = time.monotonic() + 60
        while any(state.is_running for state in generator._states):
            assert time.monotonic() < until
            time.sleep(0.01)
        stopped.extend(generator._replicas.pool.workers[0].process.pids)
        os.kill(stopped[0], signal.SIGSTOP)

    before(monkeypatch, ContinuousGenerator, "update_weights", 4, stop_when_idle)
    records = run(tmp_path / "run", "policy.generation.num_workers=1")
    assert not is_running(stopped[0])
    assert sum(record["train/replaced_generators"] for record in records) >= 1
    assert "did not finish a liveness check within 3 s" in caplog.text
    assert "raise policy.generation.step_timeout_s" in caplog.text
    check_prompts(tmp_path / "run")
    assert max(staleness) <= 1
