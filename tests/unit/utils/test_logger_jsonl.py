"""metrics.jsonl holds every number of a run, of any type, and survives a kill."""

import json
import logging
import threading
import time

import numpy as np
import pytest
import torch

from lucidrl.utils.logger import JsonlLogger


def read(path):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def logged(path, metrics, **kwargs):
    """The one record that `metrics` become, without step and time."""
    logger = JsonlLogger(path)
    logger.log_metrics(metrics, step=1, **kwargs)
    logger.finish()
    (record,) = read(path)
    return {name: value for name, value in record.items() if name not in ("step", "time")}


def test_a_call_is_one_line_with_step_and_unix_time_at_once(path):
    logger = JsonlLogger(path)
    logger.log_metrics({"reward": 0.5}, step=7, prefix="train")
    (record,) = read(path)  # before the file is closed
    assert record["step"] == 7
    assert abs(record["time"] - time.time()) < 60
    assert record["train/reward"] == 0.5


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(2.5), 2.5),
        (torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True), 1.5),
        (torch.tensor(True), True),
        (np.float32(0.5), 0.5),
        (np.float64(0.25), 0.25),
        (np.int64(3), 3),
        (np.bool_(False), False),
        (True, True),
        (2**70, float(2**70)),
        ([1, 2.5, np.float32(3)], [1, 2.5, 3.0]),
        (torch.arange(3), [0, 1, 2]),
        ((), []),
    ],
    ids=repr,
)
def test_numbers_of_every_type_are_kept(path, value, expected):
    assert logged(path, {"x": value}) == {"x": expected}


def test_nested_dictionaries_are_flattened_with_slashes(path):
    assert logged(path, {"a": {"b": {"c": 1}}, 3: 4}, prefix="p") == {"p/a/b/c": 1, "p/3": 4}


def test_the_step_metric_keeps_its_name(path):
    metrics = {"ray/ray_step": 3, "util": 0.5}
    assert logged(path, metrics, prefix="ray", step_metric="ray/ray_step") == {"ray/ray_step": 3, "ray/util": 0.5}


def test_only_metrics_without_a_step_metric_count_as_those_of_a_step(path):
    logger = JsonlLogger(path)
    logger.log_metrics({"seconds": 1.5, "x": 1}, step=1500, step_metric="seconds")
    logger.log_metrics({"x": 1}, step=2, step_metric="seconds")
    assert [record.get("step") for record in read(path)] == [None, 2]


def test_non_finite_numbers_are_null_and_flagged(path):
    metrics = {"a": float("nan"), "b": float("-inf"), "c": torch.tensor(float("inf")), "d": [1.0, float("nan")]}
    assert logged(path, metrics, prefix="p") == {
        "p/a": None,
        "p/a.nonfinite": "nan",
        "p/b": None,
        "p/b.nonfinite": "-inf",
        "p/c": None,
        "p/c.nonfinite": "inf",
        "p/d": [1.0, None],
    }


@pytest.mark.parametrize(
    "value",
    ["text", None, object(), 1j, torch.zeros(2, 2), ["a"], [[1]], torch.tensor(1.0, device="meta"), 10**400, {1, 2}],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_left_out_with_one_warning_by_name(path, caplog, value):
    logger = JsonlLogger(path)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            logger.log_metrics({"odd": value, "fine": 1}, step, prefix="train")
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["metric train/odd is not logged"]
    assert [record["train/fine"] for record in read(path)] == [1, 1, 1]


def test_a_metric_cannot_take_the_place_of_step_or_time(path, caplog):
    logger = JsonlLogger(path)
    logger.log_metrics({"step": 99, "loss": 1.0}, step=5)
    (record,) = read(path)
    assert record["step"] == 5
    assert "metric step is not logged" in caplog.text


def test_a_name_that_is_no_valid_unicode_does_not_matter(path):
    assert list(logged(path, {"bad\ud800": 1}).values()) == [1]


def test_a_resumed_run_appends(path):
    for step in (1, 2):
        logger = JsonlLogger(path)
        logger.log_metrics({"x": 1}, step)
        logger.finish()
    assert [record["step"] for record in read(path)] == [1, 2]


@pytest.mark.parametrize("tear", [b'{"step": 2, "x": 1', b'{"step": 2, "long": [' + b"1," * 100_000])
def test_a_torn_line_is_removed_before_appending(path, caplog, tear):
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"step": 1}\n' + tear)
    logger = JsonlLogger(path)
    logger.log_metrics({"x": 1}, step=3)
    assert [record["step"] for record in read(path)] == [1, 3]
    assert f"{len(tear)} bytes" in caplog.text


def test_a_file_that_is_one_torn_line_becomes_empty(path):
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"step"')
    JsonlLogger(path)
    assert path.read_bytes() == b""


def test_threads_never_mix_their_lines(path):
    logger = JsonlLogger(path)

    def work(number):
        for step in range(100):
            logger.log_metrics({f"t{number}": list(range(50))}, step)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read(path)) == 400


def test_hyperparameters_lie_beside_the_metrics(path):
    logger = JsonlLogger(path)
    logger.log_hyperparams({"model": {"layers": [1, np.float64(2.0)]}, "dtype": torch.float32, "big": 2**80})
    assert json.loads(path.with_name("hyperparams.json").read_text()) == {
        "model.layers.0": 1,
        "model.layers.1": 2.0,
        "dtype": "torch.float32",
        "big": str(2**80),
    }


def test_finish_may_be_called_twice(path):
    logger = JsonlLogger(path)
    logger.finish()
    logger.finish()
