"""MLflow's own client reads back what the logger wrote."""

import logging
import math
import os
import subprocess
import sys
import uuid
import zlib

import pytest
import torch
from matplotlib.figure import Figure
from mlflow import MlflowClient, active_run, get_tracking_uri

from lucidrl.errors import ConfigError
from lucidrl.utils.logger.mlflow import MlflowLogger


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One store for all tests, with one run each: creating the tables of a store takes seconds."""
    return tmp_path_factory.mktemp("run_a") / "mlflow"


@pytest.fixture
def run_id():
    return uuid.uuid4().hex


@pytest.fixture
def logger(folder, run_id):
    logger = MlflowLogger({"id": run_id}, log_dir=str(folder))
    yield logger
    logger.finish()


@pytest.fixture(scope="module")
def client(folder):
    return MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")


@pytest.fixture
def history(client, logger):
    """Steps and values of a metric, in the order of their arrival."""
    return lambda name: [(item.step, item.value) for item in client.get_metric_history(logger.run_id, name)]


def test_scalars_of_every_kind_arrive_at_their_step(logger, client, history):
    logger.log_metrics({"reward": 0.5, "ok": True, "t": torch.tensor(3), "deep": {"x": 2}}, step=4, prefix="train")
    latest = client.get_run(logger.run_id).data.metrics
    assert latest == {"train/reward": 0.5, "train/ok": 1.0, "train/t": 3.0, "train/deep/x": 2.0}
    assert history("train/deep/x") == [(4, 2.0)]


def test_numbers_that_are_not_finite_are_kept_as_mlflow_can(logger, history):
    logger.log_metrics({"nan": float("nan"), "inf": float("inf"), "minus": float("-inf")}, step=1)
    assert math.isnan(history("nan")[0][1])
    assert (history("inf")[0][1], history("minus")[0][1]) == (sys.float_info.max, -sys.float_info.max)


def test_the_step_metric_keeps_its_name(logger, client):
    logger.log_metrics({"x": 1, "ray/ray_step": 30}, step=2, prefix="ray", step_metric="ray/ray_step")
    assert client.get_run(logger.run_id).data.metrics == {"ray/x": 1.0, "ray/ray_step": 30.0}


def test_steps_may_repeat_and_go_back(logger, history):
    for step, value in [(5, 1.0), (5, 2.0), (3, 3.0), (-1, 4.0), (2**40, 5.0)]:
        logger.log_metrics({"x": value}, step)
    assert sorted(history("x")) == [(-1, 4.0), (3, 3.0), (5, 1.0), (5, 2.0), (2**40, 5.0)]


def test_a_list_becomes_mean_min_and_max_of_its_finite_values(logger, client):
    logger.log_metrics({"h": [1.0, 2.0, 6.0, math.nan], "none": [math.inf], "empty": []}, step=1)
    assert client.get_run(logger.run_id).data.metrics == {"h.mean": 3.0, "h.min": 1.0, "h.max": 6.0}


def test_one_call_may_have_more_metrics_than_mlflow_takes_at_once(logger, client):
    logger.log_metrics({f"m{i}": i for i in range(1500)}, step=1)
    assert len(client.get_run(logger.run_id).data.metrics) == 1500


def test_what_is_no_number_is_warned_about_once(logger, history, caplog):
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            logger.log_metrics({"text": "hello", "x": 1.0}, step)
    assert len(caplog.records) == 1
    assert len(history("x")) == 3


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("acc@1 (top-k)", "acc_1 _top-k_"),
        ("größe", "größe"),
        ("/a//b/../c/", "a/b/_/c"),
        ("..a", "a"),
        ("../..", "_/_"),
        (".../x", "x"),
        ("", "_"),
        ("x" * 300, f"{'x' * 231}_{zlib.crc32(b'x' * 300):08x}"),
    ],
)
def test_names_are_made_acceptable(logger, client, name, accepted):
    logger.log_metrics({name: 1.0}, step=1)
    logger.log_hyperparams({name: 1})
    data = client.get_run(logger.run_id).data
    assert (list(data.metrics), list(data.params)) == ([accepted], [accepted])


def test_hyperparameters_are_flat_and_without_secrets(logger, client):
    many = {f"p{i}": i for i in range(150)}
    logger.log_hyperparams({"policy": {"lr": 1e-4, "layers": [1, None]}, "hf_token": "hf_12345678", **many})
    params = client.get_run(logger.run_id).data.params
    assert (
        params.items()
        >= {
            "policy.lr": "0.0001",
            "policy.layers.0": "1",
            "policy.layers.1": "None",
            "hf_token": "<redacted>",
            "p149": "149",
        }.items()
    )


def test_long_values_are_cut(logger, client):
    logger.log_hyperparams({"prompt": "x" * 9000})
    logger.log_hyperparams({"prompt": "y" * 9000})
    data = client.get_run(logger.run_id).data
    assert data.params == {"prompt": "x" * 6000}
    assert len(data.tags["changed.prompt"]) == 6000


def test_a_run_of_the_same_id_is_continued_and_a_changed_parameter_becomes_a_tag(logger, client, folder, run_id):
    logger.log_hyperparams({"lr": 1, "same": "x"})
    logger.log_metrics({"x": 1}, step=1)
    logger.finish()
    assert client.get_run(logger.run_id).info.status == "FINISHED"
    resumed = MlflowLogger({"id": run_id}, log_dir=str(folder))
    assert resumed.run_id == logger.run_id
    assert client.get_run(logger.run_id).info.status == "RUNNING"
    resumed.log_hyperparams({"lr": 2, "same": "x", "new": 3})
    resumed.log_metrics({"x": 2}, step=2)
    resumed.finish()
    run = client.get_run(logger.run_id)
    assert run.data.params == {"lr": "1", "same": "x", "new": "3"}
    assert {name: tag for name, tag in run.data.tags.items() if name.startswith("changed")} == {"changed.lr": "1 → 2"}
    assert [item.step for item in client.get_metric_history(run.info.run_id, "x")] == [1, 2]
    assert run.info.status == "FINISHED"


def test_a_run_has_our_id_and_the_name_of_its_folder(logger, client, run_id, folder):
    run = client.get_run(logger.run_id)
    assert run.data.tags["lucidrl.run_id"] == run_id
    assert run.info.run_name == folder.parent.name
    assert client.get_experiment(run.info.experiment_id).name == "lucidrl"


def test_a_figure_becomes_an_image_below_the_folder(logger, client, folder):
    logger.log_plot(Figure(figsize=(1, 1)), step=9, name="errors/größe")
    names = [file.path for file in client.list_artifacts(logger.run_id, "images")]
    (png,) = [name for name in names if name.endswith(".png")]
    assert "+step+9+" in png
    assert list((folder / "artifacts").rglob("*.png"))


def test_the_users_own_mlflow_stays_as_it_is(logger):
    logger.log_metrics({"x": 1}, step=1)
    assert active_run() is None
    assert "run_a" not in get_tracking_uri()


def test_finish_may_be_called_twice(logger):
    logger.finish()
    logger.finish()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r'needs the package mlflow; pip install "lucidrl\[mlflow\]"'):
        MlflowLogger({})


def test_an_unknown_key_is_refused(folder):
    with pytest.raises(ConfigError, match=r"unknown key MlflowConfig\.uri"):
        MlflowLogger({"uri": "x"}, log_dir=str(folder))


@pytest.mark.slow
def test_it_is_quiet_and_an_abandoned_server_does_not_keep_the_process(tmp_path):
    code = """
import logging, sqlite3, threading
from lucidrl.utils.logger.mlflow import MlflowLogger
logging.basicConfig(level="WARNING")
logger = MlflowLogger({}, log_dir="run/mlflow")
logger.log_metrics({"x": 1}, 1)
logger.finish()
with sqlite3.connect("run/mlflow/mlflow.db") as database:
    database.execute("DROP TABLE latest_metrics")
try:
    logger.log_metrics({"x": 1}, 2)
    raise SystemExit("no error of the database")
except Exception:
    pass  # and nothing is shown
thread = threading.Thread(target=MlflowLogger, args=({"tracking_uri": "http://127.0.0.1:9"},), daemon=True)
thread.start()
thread.join(2)
assert thread.is_alive()
logging.getLogger("urllib3.connectionpool").warning("Retrying (%r) after '%r': %s", 3, None, "/simple/torch")
"""
    # Little else, since MLflow reports nothing from where it recognises a test.
    env = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH", "VIRTUAL_ENV")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=env | {"HOME": str(tmp_path / "home")}, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    only_others = "WARNING:urllib3.connectionpool:Retrying (3) after 'None': /simple/torch\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, "", only_others)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
