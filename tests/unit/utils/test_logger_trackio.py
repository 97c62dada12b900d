"""Trackio itself reads back what the logger wrote."""

import logging
import math
import os
import subprocess
import sys

import pytest
import torch
import trackio
from matplotlib.figure import Figure
from trackio import sqlite_storage

from lucidrl.errors import ConfigError
from lucidrl.utils.logger.trackio import TrackioLogger


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "run_a" / "trackio"
    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", folder)  # where the reader looks
    return folder


@pytest.fixture
def logger(folder):
    return TrackioLogger({"id": "id-1"}, log_dir=str(folder))


def rows(run_id="id-1"):
    """Records of a run: their steps, and the metrics without what Trackio adds."""
    logs = sqlite_storage.SQLiteStorage.get_logs("lucidrl", run=None, run_id=run_id)
    return [(row["step"], {k: v for k, v in row.items() if k not in ("step", "timestamp")}) for row in logs]


def config():
    return sqlite_storage.SQLiteStorage.get_run_config("lucidrl", run_id="id-1")


def test_scalars_of_every_kind_arrive_at_their_step(logger):
    logger.log_metrics({"reward": 0.5, "ok": True, "t": torch.tensor(3), "deep": {"x": 2}}, step=4, prefix="train")
    assert rows() == [(4, {"train/reward": 0.5, "train/ok": True, "train/t": 3, "train/deep/x": 2})]


def test_numbers_that_are_not_finite_are_kept(logger):
    logger.log_metrics({"nan": float("nan"), "inf": float("inf"), "minus": float("-inf")}, step=1)
    ((_, row),) = rows()
    assert math.isnan(row["nan"])
    assert (row["inf"], row["minus"]) == (math.inf, -math.inf)


def test_the_step_metric_keeps_its_name(logger):
    logger.log_metrics({"x": 1, "ray/ray_step": 30}, step=2, prefix="ray", step_metric="ray/ray_step")
    assert rows() == [(2, {"ray/x": 1, "ray/ray_step": 30})]


def test_steps_may_repeat_and_go_back(logger):
    for step, value in [(5, 1), (5, 2), (3, 3)]:
        logger.log_metrics({"x": value}, step)
    assert sorted((step, row["x"]) for step, row in rows()) == [(3, 3), (5, 1), (5, 2)]


@pytest.mark.parametrize("values", [[1.0, 2.0, 2.0, math.nan], [3.0, 3.0, 3.0], [1.0, 1.0, 1.0 + 2**-52], [1e20] * 3])
def test_lists_become_histograms_of_their_finite_values(logger, values):
    logger.log_metrics({"h": values, "none": [math.inf]}, step=1)
    ((_, row),) = rows()
    assert list(row) == ["h"]
    assert row["h"]["_type"] == trackio.Histogram.TYPE
    assert sum(row["h"]["values"]) == 3
    assert len(row["h"]["bins"]) == len(row["h"]["values"]) + 1


def test_what_is_no_number_is_warned_about_once(logger, caplog):
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            logger.log_metrics({"text": "hello", "x": 1.0}, step)
    assert len(caplog.records) == 1
    assert len(rows()) == 3


def test_a_name_that_trackio_keeps_for_itself_is_renamed(logger):
    logger.log_metrics({"step": 7, "time": 8}, step=1)
    assert rows() == [(1, {"__step": 7, "__time": 8})]


def test_hyperparameters_are_nested_and_without_secrets(logger):
    logger.log_hyperparams({"policy": {"lr": 1e-4, "layers": [1, None]}, "llm_judge": {"api_key": "sk-12345678"}})
    assert config() == {"policy": {"lr": 1e-4, "layers": [1, None]}, "llm_judge": {"api_key": "<redacted>"}}


def test_a_run_of_the_same_id_is_continued_also_with_another_config(logger, folder):
    logger.log_hyperparams({"lr": 1})
    logger.log_metrics({"x": 1}, step=1)
    logger.finish()
    resumed = TrackioLogger({"id": "id-1"}, log_dir=str(folder))
    resumed.log_hyperparams({"lr": 2})
    resumed.log_metrics({"x": 2}, step=2)
    assert [row for row in rows() if row[1]] == [(1, {"x": 1}), (2, {"x": 2})]
    assert config() == {"lr": 2}
    (record,) = sqlite_storage.SQLiteStorage.get_run_records("lucidrl")
    assert (record["id"], record["name"]) == ("id-1", "run_a")


def test_a_figure_becomes_an_image(logger, folder):
    logger.log_plot(Figure(figsize=(1, 1)), step=9, name="errors")
    ((step, row),) = rows()
    assert step == 9
    assert row["errors"]["_type"] == trackio.Image.TYPE
    assert (folder / "media" / row["errors"]["file_path"]).read_bytes().startswith(b"\x89PNG")


def test_a_run_name_cannot_lead_out_of_the_folder(folder):
    logger = TrackioLogger({"name": "../../../../out"}, log_dir=str(folder))
    with pytest.raises(ConfigError, match="leaves the log folder"):
        logger.log_plot(Figure(figsize=(1, 1)), step=1, name="errors")


def test_loggers_of_several_folders_do_not_mix(tmp_path, logger):
    other = TrackioLogger({"id": "id-2"}, log_dir=str(tmp_path / "run_b" / "trackio"))
    logger.log_metrics({"x": 1}, step=1)
    other.log_metrics({"x": 2}, step=1)
    assert rows("id-2") == []
    assert (tmp_path / "run_b" / "trackio" / "lucidrl.db").exists()


def test_finish_may_be_called_twice(logger):
    logger.finish()
    logger.finish()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match=r'needs the package trackio; pip install "lucidrl\[trackio\]"'):
        TrackioLogger({})


def test_an_unknown_key_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown key TrackioConfig\.space_id"):
        TrackioLogger({"space_id": "x"}, log_dir=str(tmp_path))


def test_it_works_quietly_in_a_thread_without_touching_home_or_network_and_the_user_can_look(tmp_path):
    folder = tmp_path / "run" / "trackio"
    write = f"""
import socket, threading
socket.socket.connect = None  # every connection fails
from lucidrl.utils.logger.trackio import TrackioLogger
def work():
    logger = TrackioLogger({{"id": "a"}}, log_dir={str(folder)!r})
    logger.log_hyperparams({{"lr": 1}})
    logger.log_metrics({{"x": 1}}, 1)
    logger.finish()
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert threading.enumerate() == [threading.main_thread()]
"""
    read = "import trackio; (run,) = trackio.Api().runs('lucidrl'); print(run.name, run.id)"
    # A Space in the environment must not be used: the run stays here.
    env = os.environ | {"HOME": str(tmp_path / "home"), "TRACKIO_SPACE_ID": "somebody/space", "HF_HUB_OFFLINE": "1"}
    written = subprocess.run([sys.executable, "-c", write], env=env, capture_output=True, text=True)
    assert (written.returncode, written.stdout, written.stderr) == (0, "", "")
    assert not (tmp_path / "home").exists()
    env = {name: value for name, value in env.items() if name != "TRACKIO_SPACE_ID"} | {"TRACKIO_DIR": str(folder)}
    seen = subprocess.run([sys.executable, "-c", read], env=env, capture_output=True, text=True)
    assert seen.stdout == "run a\n", seen.stderr
