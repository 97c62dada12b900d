"""Asynchronous runs of the command whose trained prompts are noted outside of the run folder, and faults for them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from lucidrl.envs.text.arithmetic import ArithmeticConfig, ArithmeticEnv

ROOT = Path(__file__).parents[2]
LEDGER = "LUCIDRL_TEST_LEDGER"
SETTINGS = (
    "num_threads=1",
    "cluster.num_threads=1",
    "grpo.async.max_staleness=2",
    "policy.generation.placement=separate",
    "policy.generation.max_new_tokens=4",
    "policy.optimizer.kwargs.lr=0.0001",
    "env.name=tests.faults.async_runs:SlowEnv",
    "env.max_concurrency=32",
    "collector.prompts_per_step=4",
    "collector.samples_per_prompt=3",
    "validation.num_prompts=0",
    "data.validation_fraction=0",
    "checkpoint.metric=null",
    "checkpoint.every=1",
    "tracking.tensorboard=false",
    "tracking.monitor=false",
    "report.enabled=false",
)


class SlowEnv(ArithmeticEnv):
    """100 additions; a score takes a random time, mostly short."""

    def __init__(self) -> None:
        super().__init__(ArithmeticConfig(operations=("+",), max_operand=9))

    async def step(self, batch: Any) -> Any:
        import asyncio

        await asyncio.sleep(min(1.0, 0.01 * random.paretovariate(1.0)))
        return await super().step(batch)


def main() -> None:
    """`lucidrl`, which notes the prompts of each step as soon as the policy was trained on them."""
    from lucidrl import cli
    from lucidrl.algorithms.grpo import GRPO

    record = GRPO.record

    def noted(self: GRPO, step: int, rollouts: Any, *args: Any, **kwargs: Any) -> None:
        prompts = [sample.prompt.prompt_id for sample in rollouts.samples[:: self.collector._config.samples_per_prompt]]
        version = rollouts.policy_version
        staleness = [version - min(one.version_range) for one in rollouts.samples if one.version_range]
        with Path(os.environ[LEDGER]).open("a") as ledger:
            ledger.write(json.dumps({"step": step, "prompts": prompts, "staleness": max(staleness)}) + "\n")
            ledger.flush()
            os.fsync(ledger.fileno())
        record(self, step, rollouts, *args, **kwargs)

    GRPO.record = noted  # type: ignore[method-assign]
    cli.main()


def start(folder: Path, ledger: Path, *settings: str, resume: bool = False) -> subprocess.Popen[bytes]:
    """Start or resume the command in a separate session."""
    config = folder.with_suffix(".yaml")
    config.write_text("seed: 0\n")
    where = ["--resume", str(folder)] if resume else ["--config", str(config), f"run.root={folder.parent}"]
    where += [] if resume else [f"run.name={folder.name}", *SETTINGS]
    command = [sys.executable, "-c", f"from {__name__} import main; main()", "grpo", *where, *settings]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), LEDGER: str(ledger), "OMP_NUM_THREADS": "1"}
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def read(ledger: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []


def lineage(entries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The prompts of each step of the run that survived: a resumed step replaces its first attempt and later ones."""
    kept: dict[int, list[str]] = {}
    for entry in entries:
        kept = {step: prompts for step, prompts in kept.items() if step < entry["step"]}
        kept[entry["step"]] = entry["prompts"]
    assert list(kept) == list(range(1, len(kept) + 1)), f"steps are missing: {list(kept)}"
    return list(kept.values())


def wait(condition: Callable[[], bool], process: subprocess.Popen[bytes], timeout_s: float = 120.0) -> None:
    """Wait until the condition holds or the process ends."""
    until = time.monotonic() + timeout_s
    while not condition() and process.poll() is None:
        assert time.monotonic() < until, "timed out"
        time.sleep(0.01)


def workers_of(process: subprocess.Popen[bytes], role: str) -> list[psutil.Process]:
    """The local processes of a role: `generation`, `env` or `rank`."""
    return of_role(role, psutil.Process(process.pid).children(recursive=True))


def of_role(role: str, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes of a role, found by the log that they write."""
    found = []
    for process in processes:
        try:
            if f"/logs/{role}" in os.readlink(f"/proc/{process.pid}/fd/1"):
                found.append(process)
        except OSError:  # it has just exited
            continue
    return found


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL the driver alone; its workers must notice."""
    process.send_signal(signal.SIGKILL)
    process.wait(30)
