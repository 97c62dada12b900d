"""Whole runs with a slow part: the breakdown names it first, with its seconds."""

from __future__ import annotations

import asyncio
import json
import time
from statistics import fmean

import pytest

from lucidrl.envs.text.arithmetic import ArithmeticEnv
from lucidrl.models.generation.refit import Refit
from lucidrl.report.breakdown import Breakdown

SLOW_S = 0.5
MUCH_SLOWER_S = 1.5
STEPS = ("grpo.max_steps=4", "validation.num_prompts=0")
ONE_THREAD = ("num_threads=1", "cluster.num_threads=1")


def test_a_slow_environment_is_named_first_and_the_phases_sum_to_the_step(run, monkeypatch):
    waits: list[float] = []
    fast_step = ArithmeticEnv.step

    async def slow_step(self, batch):
        start = time.perf_counter()
        await asyncio.sleep(SLOW_S)
        waits.append(time.perf_counter() - start)
        return await fast_step(self, batch)

    monkeypatch.setattr(ArithmeticEnv, "step", slow_step)
    folder, _ = run("grpo", "run", *STEPS, "env.max_concurrency=1")
    found = Breakdown.read(folder.path)
    first = found.opportunities()[0]
    assert first.name == "environment"
    assert first.saved_s == pytest.approx(fmean(waits[1:]), rel=0.2)
    for index, whole_s in enumerate(found.whole_s):
        assert sum(values[index] for values in found.phases.values()) == pytest.approx(whole_s, abs=1e-5)
    assert {"generation", "reward", "forward", "backward", "optimizer", "logging", "other"} <= found.phases.keys()
    content = json.loads((folder.path / "breakdown.json").read_text())
    assert content["opportunities"][0]["text"].startswith("environment: ")
    assert content["steps"] == [1, 2, 3, 4]
    assert all(0 < share < 100 for share in content["overhead_pct"])


def test_a_run_that_died_and_was_resumed_has_one_breakdown(run, tmp_path):
    path, options = tmp_path / "run/breakdown.json", ("sft.max_steps=3", "validation.num_prompts=0")
    with pytest.raises(RuntimeError):
        run("sft", "run", *options, "checkpoint.every=1", die_at=3)
    assert json.loads(path.read_text())["steps"] == [1, 2]
    run("sft", "run", *options, resume=True)
    content = json.loads(path.read_text())
    assert content["steps"] == [1, 2, 3]
    assert {"data", "forward", "checkpoint"} <= content["phases"].keys()


@pytest.mark.slow
def test_a_slow_rank_is_named_first(run):
    optimizer = [
        "policy.optimizer.name=tests.unit.algorithms.slow_parts.SlowOnRank1",
        f"policy.optimizer.kwargs={{lr: 0.01, slow_s: {MUCH_SLOWER_S}}}",
    ]
    folder, _ = run("grpo", "run", *STEPS, *ONE_THREAD, *optimizer, "cluster.num_workers=2")
    found = Breakdown.read(folder.path)
    first = found.opportunities()[0]
    assert first.name == "policy-1"
    assert first.saved_s == pytest.approx(MUCH_SLOWER_S, rel=0.2)
    assert found.most_waited_for("optimizer") == "policy-1"
    assert min(found.phases["optimizer"]) >= MUCH_SLOWER_S
    assert min(found.communication["policy-0"]) >= 0.9 * MUCH_SLOWER_S  # it waits
    lines = map(json.loads, (folder.path / "metrics.jsonl").read_text().splitlines())
    trained = [line for line in lines if "train/loss" in line]
    assert all(line["time/forward_s"] > 0 and line["time/optimizer_s"] >= MUCH_SLOWER_S for line in trained)


@pytest.mark.slow
def test_a_slow_refit_is_named_first(run, monkeypatch):
    fast_run, waits = Refit.run, []

    def slow_run(self, *args):
        start = time.perf_counter()
        time.sleep(MUCH_SLOWER_S)
        result = fast_run(self, *args)
        waits.append(time.perf_counter() - start)
        return result

    monkeypatch.setattr(Refit, "run", slow_run)
    folder, _ = run("grpo", "run", *STEPS, *ONE_THREAD, "policy.generation.placement=separate")
    found = Breakdown.read(folder.path)
    first = found.opportunities()[0]
    assert first.name == "refit"
    assert first.saved_s == pytest.approx(fmean(waits[-3:]), rel=0.2)
    assert found.most_waited_for("generation") == "generation-0"
