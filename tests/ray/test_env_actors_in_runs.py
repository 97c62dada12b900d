"""A run whose environment is in Ray actors is the run without them, also when an actor dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from lucidrl.recipes.configs import GRPORunConfig
from lucidrl.recipes.wiring import run_grpo
from lucidrl.utils.config import load_config
from tests.ray.nodes import wait_for
from tests.unit.recipes.test_two_workers import SMALL, Unwatched, numbers


class KillsAnActor(Unwatched):
    """After the first step."""

    def __init__(self, processes_of_ray):
        self._processes_of_ray = processes_of_ray

    def on_step(self, step, metrics):
        if step == 1:
            actors = [process for process in self._processes_of_ray() if process.name().startswith("ray::EnvActor")]
            assert len(actors) == 2
            os.kill(actors[0].pid, signal.SIGKILL)


def run(folder: Path, watcher: Unwatched, *overrides: str) -> list[dict[str, float]]:
    folder.mkdir()
    run_grpo(load_config(GRPORunConfig, SMALL, overrides=["num_threads=1", *overrides]), folder, watcher)
    return numbers(folder)


@pytest.mark.slow
def test_a_run_with_actors_of_which_one_dies_is_the_run_without_them_to_the_bit(tmp_path, processes_of_ray):
    def without_count(records):
        return [{k: v for k, v in record.items() if not k.endswith("/replaced_env_actors")} for record in records]

    alone = run(tmp_path / "alone", Unwatched())
    on_ray = ("cluster.launcher=ray", "cluster.num_threads=1", "env.num_actors=2")
    actors = run(tmp_path / "actors", KillsAnActor(processes_of_ray), *on_ray)
    assert without_count(actors) == without_count(alone)
    assert sum(v for record in actors for k, v in record.items() if k.endswith("/replaced_env_actors")) == 1
    logs = {path.name for path in (tmp_path / "actors" / "logs" / "env").iterdir()}
    assert logs == {"actor_0.log", "actor_1.log"}
    wait_for(lambda: not processes_of_ray())
