"""A run whose environment is in workers on Ray nodes equals the run without them, even if a worker is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from lucidrl.recipes.configs import GRPORunConfig
from lucidrl.recipes.run import train
from lucidrl.utils.config import load_config
from tests.ray.nodes import wait_for
from tests.unit.recipes.test_two_workers import SMALL, Unwatched, numbers


class KillsAWorker(Unwatched):
    """After the first step."""

    def on_step(self, step, metrics):
        if step == 1:
            pids = [process.pid for process in psutil.Process().children(recursive=True) if is_env_worker(process)]
            assert len(pids) == 2
            os.kill(pids[0], signal.SIGKILL)


def is_env_worker(process: psutil.Process) -> bool:
    return any("/logs/env/" in file.path for file in process.open_files())


def run(folder: Path, watcher: Unwatched, *overrides: str) -> list[dict[str, float]]:
    folder.mkdir()
    train(load_config(GRPORunConfig, SMALL, overrides=["num_threads=1", *overrides]), folder, watcher)
    return numbers(folder)


@pytest.mark.slow
def test_a_run_with_a_killed_env_worker_is_bit_identical_to_a_run_without_workers(tmp_path, processes_of_ray):
    def without_count(records):
        return [{k: v for k, v in record.items() if not k.endswith("/replaced_env_workers")} for record in records]

    alone = run(tmp_path / "alone", Unwatched())
    on_ray = ("cluster.launcher=ray", "cluster.num_threads=1", "env.num_workers=2")
    spread = run(tmp_path / "spread", KillsAWorker(), *on_ray)
    assert without_count(spread) == without_count(alone)
    assert sum(v for record in spread for k, v in record.items() if k.endswith("/replaced_env_workers")) == 1
    logs = {path.name for path in (tmp_path / "spread" / "logs" / "env").iterdir()}
    assert logs == {"env_0.log", "env_1.log"}
    wait_for(lambda: not processes_of_ray())
