"""Asynchronous GRPO: the time of a step with an environment that sleeps, against generation and training alone.

A synchronous run with the same threads shows what generation and environment take without training beside them, and
training without generation. If both overlapped perfectly, a step would take as long as the longer of them.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from statistics import median

from harness import Claim, arguments, print_table, read_metrics, report, run_grpo

ROWS = 128
EPOCHS = "2,16,40"
"""Optimizer epochs per step: training that takes less, about as much, and more time than generation."""
WARM_UP = 3
"""First steps that do not count."""


def settings(epochs: int, steps: int) -> list[str]:
    return [
        "num_threads=1",
        "cluster.num_threads=1",
        "env.name=sleeping_env:SleepingEnv",
        f"env.max_concurrency={2 * ROWS}",
        f"collector.prompts_per_step={ROWS // 8}",
        "collector.samples_per_prompt=8",
        f"grpo.num_epochs={epochs}",
        f"grpo.max_steps={steps}",
        "policy.generation.placement=separate",
        "policy.generation.max_new_tokens=8",
        "validation.num_prompts=0",
        "checkpoint.every=0",
        "checkpoint.metric=null",
        "tracking.tensorboard=false",
        "tracking.monitor=false",
        "report.enabled=false",
    ]


def main() -> None:
    options = arguments(
        __doc__,
        steps=(int, 20, "steps of each run"),
        staleness=(int, 1, "async.max_staleness"),
        epochs=(str, EPOCHS, "optimizer epochs per step, separated by commas"),
    )
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    claims, rows = [], []
    for epochs in map(int, options.epochs.split(",")):
        common = settings(epochs, options.steps)
        with tempfile.TemporaryDirectory() as name:
            alone = run_grpo(Path(name) / "sync", common)
            beside = run_grpo(Path(name) / "async", [*common, f"grpo.async.max_staleness={options.staleness}"])
            steps, rollouts = (read_metrics(alone, f"time/{part}_s")[WARM_UP:] for part in ("step", "rollout"))
            training = median(step - rollout for step, rollout in zip(steps, rollouts, strict=True))
            overlapped = median(read_metrics(beside, "time/step_s")[WARM_UP:])
            idle = [
                median(read_metrics(beside, f"train/async/{who}_idle_fraction")) for who in ("trainer", "generator")
            ]
        longest = max(median(rollouts), training)
        claims.append(
            Claim(
                f"async, {epochs} epochs: seconds per step, of the longer of generation and training",
                1.2,
                overlapped / longest,
                at_most=True,
            )
        )
        seconds = (median(rollouts), training, median(steps), overlapped)
        rows.append((str(epochs), *(f"{value:.2f} s" for value in seconds), *(f"{part:.0%}" for part in idle)))
    header = ("epochs", "generation + environment", "training", "synchronous step", "asynchronous step")
    print_table(rows, (*header, "trainer idle", "generator idle"))
    report(claims, options.json)


if __name__ == "__main__":
    main()
