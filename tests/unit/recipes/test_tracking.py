"""From the settings of a run to its trackers."""

from __future__ import annotations

import sqlite3
import sys

import pytest

from lucidrl.errors import ConfigError
from lucidrl.recipes.configs import GRPORunConfig, SFTRunConfig
from lucidrl.recipes.preflight import preflight
from lucidrl.recipes.run import train
from lucidrl.utils.config import load_config
from lucidrl.utils.logger import Logger

ALL_TRACKERS = [
    "tracking.wandb.enabled=true",
    "tracking.wandb.mode=offline",
    "tracking.mlflow.enabled=true",
    "tracking.trackio.enabled=true",
]
SMALL = {
    "env": {"name": "arithmetic", "kwargs": {"max_operand": 9}},
    "policy": {"generation": {"max_new_tokens": 4}},
    "validation": {"num_prompts": 4},
    "sft": {"max_steps": 1, "examples_per_step": 4},
    "tracking": {"finish_timeout_s": 60},
}


class Unwatched:
    def on_validation(self, step, metrics): ...

    def on_step(self, step, metrics): ...

    def announce(self, message): ...


@pytest.mark.slow
def test_every_setting_of_a_tracker_is_one_of_the_logger(tmp_path):
    config = load_config(
        GRPORunConfig, overrides=[*ALL_TRACKERS, "tracking.wandb.name=a", "tracking.mlflow.run_name=b"]
    )
    with Logger(config.tracking.logger_config(tmp_path, "some-id") | {"monitor_gpus": False}) as logger:
        assert logger.run_id == "some-id"


def test_a_tracker_that_is_not_installed_is_found_before_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    config = load_config(GRPORunConfig, overrides=["tracking.trackio.enabled=true"])
    with pytest.raises(ConfigError, match="tracking by trackio needs the package trackio"):
        preflight(config)


@pytest.mark.slow
def test_a_resumed_run_continues_in_the_same_run_of_every_tracker(tmp_path):
    first = load_config(SFTRunConfig, SMALL, overrides=ALL_TRACKERS)
    assert train(first, tmp_path, Unwatched()) == 1
    second = load_config(SFTRunConfig, SMALL, overrides=[*ALL_TRACKERS, "sft.max_steps=2"])
    assert train(second, tmp_path, Unwatched(), resume=True) == 2

    (wandb_id,) = {
        path.name.rpartition("-")[2] for path in (tmp_path / "wandb").rglob("offline-run-*-*") if path.is_dir()
    }
    with sqlite3.connect(tmp_path / "mlflow" / "mlflow.db") as database:
        runs = database.execute("select run_uuid from runs").fetchall()
        steps = database.execute("select step from metrics where key = 'train/loss'").fetchall()
        tags = database.execute("select value from tags where key = 'lucidrl.run_id'").fetchall()
    assert len(runs) == 1
    assert sorted(steps) == [(1,), (2,)]
    assert tags == [(wandb_id,)]
