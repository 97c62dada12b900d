"""Whole runs on two ranks: they learn what one rank learns, and end at once when a rank does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lucidrl.errors import ConfigError
from lucidrl.recipes.configs import GRPORunConfig
from lucidrl.recipes.run import train
from lucidrl.utils.config import load_config

SMALL = {
    "env": {"name": "arithmetic", "kwargs": {"max_operand": 9}},
    "policy": {
        "precision": "float64",
        "generation": {"max_new_tokens": 4},
        "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}},
    },
    "grpo": {"max_steps": 3, "loss": {"entropy_coefficient": 0.01, "kl_coefficient": 0.01}},
    "collector": {"prompts_per_step": 5, "samples_per_prompt": 3},
    "validation": {"num_prompts": 5, "every": 2},
    "tracking": {"tensorboard": False, "plot_mismatch_every": 2},
}


class Unwatched:
    def on_validation(self, step, metrics): ...

    def on_samples(self, step, message_logs, rewards): ...

    def on_step(self, step, metrics): ...

    def announce(self, message): ...


def numbers(folder: Path) -> list[dict[str, float]]:
    """Metrics of every step, without those of the clock and without the computed tokens: ranks share fewer."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    left_out = ("time", "observe/", "logger/", "train/tokens_per_s", "train/refit_gb_per_s", "train/computed_tokens")
    kept = [{k: v for k, v in r.items() if not k.startswith(left_out)} for r in records if "step" in r]
    return [record for record in kept if len(record) > 1]


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns_and_resume_from_each_others_checkpoints(tmp_path):
    def run(name, *overrides, resume=False):
        (tmp_path / name).mkdir(exist_ok=True)
        train(load_config(GRPORunConfig, SMALL, overrides=list(overrides)), tmp_path / name, Unwatched(), resume)
        return numbers(tmp_path / name)

    one, two = run("one"), run("two", "cluster.num_workers=2")
    assert len(one) == len(two)
    for alone, shared in zip(one, two, strict=True):
        assert shared == pytest.approx(alone, rel=1e-6, abs=1e-6)
    assert {"rank_0.log", "rank_1.log"} <= {path.name for path in (tmp_path / "two" / "logs").iterdir()}
    one = run("one", "cluster.num_workers=2", "grpo.max_steps=4", resume=True)
    two = run("two", "grpo.max_steps=4", resume=True)
    assert two[-1] == pytest.approx(one[-1], rel=1e-6, abs=1e-6)


def test_ranks_that_do_not_fit_the_layout_are_refused_before_any_starts(tmp_path):
    overrides = ["cluster.num_workers=3", "policy.dtensor_cfg.tensor_parallel_size=2"]
    with pytest.raises(ConfigError, match="3 ranks do not split"):
        train(load_config(GRPORunConfig, SMALL, overrides=overrides), tmp_path, Unwatched())


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_within_seconds_and_is_named(tmp_path):
    command = [sys.executable, "-c", "from lucidrl.cli import main; main()", "grpo", "cluster.num_workers=2"]
    command += ["grpo.max_steps=100000", "collector.prompts_per_step=4", "validation.num_prompts=0"]
    command += ["checkpoint.metric=null", f"run.root={tmp_path}", "run.name=run", "tracking.tensorboard=false"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        timeout_at = time.monotonic() + 180
        while not (metrics.exists() and b"train/loss" in metrics.read_bytes()):
            assert time.monotonic() < timeout_at, "the run did not begin"
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        ranks = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        assert len(ranks) == 2
        os.kill(ranks[1].pid, signal.SIGKILL)
        killed = time.monotonic()
        output, _ = process.communicate(timeout=90)
        assert time.monotonic() - killed < 60
    finally:
        process.kill()
    assert process.returncode == 2
    assert "rank 1" in output
    assert "SIGKILL" in output
    assert "rank 1 of 2 was killed by SIGKILL" in (tmp_path / "run" / "logs" / "driver.log").read_text()
    assert not psutil.wait_procs(children, timeout=60)[1]
