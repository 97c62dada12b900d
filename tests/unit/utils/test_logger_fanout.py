"""`Logger` writes everywhere it should, and cannot stop a run."""

import gc
import json
import os
import subprocess
import sys
import zlib

import pytest
import torch
from matplotlib.figure import Figure

import lucidrl.utils.logger as logger_package
from lucidrl.errors import ConfigError
from lucidrl.utils.logger import Logger, LoggerInterface


@pytest.fixture
def cfg(tmp_path):
    return {"log_dir": str(tmp_path / "run"), "tensorboard_enabled": True, "tensorboard": {"log_dir": "unused"}}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_reach_the_run_folder_and_tensorboard(cfg, tmp_path):
    with Logger(cfg) as logger:
        logger.log_metrics({"reward": 0.5}, step=1, prefix="train")
        logger.log_hyperparams({"lr": 0.1})
    assert lines(tmp_path / "run" / "metrics.jsonl")[0]["train/reward"] == 0.5
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert b"train/reward" in events.read_bytes()
    assert b"| lr | 0.1 |" in events.read_bytes()


def test_tensorboard_is_not_imported_when_it_is_off(tmp_path):
    code = f"""
import sys
from lucidrl.utils.logger import Logger
with Logger({{"log_dir": {str(tmp_path)!r}, "tensorboard_enabled": False}}) as logger:
    logger.log_metrics({{"x": 1}}, 1)
assert not {{"torch", "tensorboard", "matplotlib", "numpy"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_folder_that_cannot_be_written_is_an_error(cfg, tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="cannot be written"):
        Logger(cfg)


def test_logging_after_the_end_warns_and_finish_may_be_called_twice(cfg, caplog):
    logger = Logger(cfg)
    logger.finish()
    logger.finish()
    assert not caplog.records
    logger.log_metrics({"x": 1}, 1)
    assert "records nothing more" in caplog.text


def test_an_unfinished_logger_is_closed_with_its_last_reference(cfg, tmp_path):
    logger = Logger(cfg)
    logger.log_metrics({"x": 1}, 1)
    del logger
    gc.collect()
    open_files = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    assert not [name for name in open_files if name.startswith(str(tmp_path))]


def test_a_process_that_forgets_to_finish_still_exits(cfg):
    code = f"from lucidrl.utils.logger import Logger; logger = Logger({cfg!r}); logger.log_metrics({{'x': 1}}, 1)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"log_dir": 3}, "LoggerConfig.log_dir=3 is not valid"),
        ({"tensorbord_enabled": True}, "unknown key LoggerConfig.tensorbord_enabled"),
        ({"wandb": {"mode": "on"}}, r"LoggerConfig.wandb\.mode='on' is not valid"),
        ({"gpu_monitoring": {"flush_interval": 1}}, r"LoggerConfig.gpu_monitoring\.collection_interval is required"),
        ({"finish_timeout_s": 0}, "LoggerConfig.finish_timeout_s=0 is not valid"),
    ],
)
def test_a_wrong_config_is_refused_by_key(cfg, change, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Logger(cfg | change)


def test_a_back_end_needs_two_methods_and_no_more():
    class Memory(LoggerInterface):
        def log_metrics(self, metrics, step, prefix="", step_metric=None):
            pass

        def log_hyperparams(self, params):
            pass

    memory = Memory()
    memory.log_plot(None, 1, "plot")
    memory.finish()
    assert LoggerInterface.__abstractmethods__ == {"log_metrics", "log_hyperparams"}


def test_rows_are_cut_to_their_length_and_numbered(cfg, tmp_path):
    batch = {
        "input_ids": torch.tensor([[1, 2, 0], [3, 4, 5]]),
        "input_lengths": torch.tensor([2, 3]),
        "logprobs": torch.tensor([[0.0, -1.0, 0.0], [0.0, float("nan"), -2.0]]),
        "pair": torch.tensor([[7, 8], [9, 10]]),
        "reward": [0.5, float("inf")],
        "messages": [[{"role": "user", "token_ids": torch.tensor([1])}], []],
        "text": ["bad \ud800", "[/INST]"],
        "idx": [40, 41],
        "loss": 3.0,
        "short": [1],
    }
    with Logger(cfg) as logger:
        logger.log_batched_dict_as_jsonl(batch, "samples/step_1.jsonl")
        logger.log_batched_dict_as_jsonl(batch, "samples/step_1.jsonl")
    assert lines(tmp_path / "run" / "samples" / "step_1.jsonl") == [
        {
            "input_ids": [1, 2],
            "input_lengths": 2,
            "logprobs": [0.0, -1.0],
            "pair": [7, 8],
            "reward": 0.5,
            "messages": [{"role": "user", "token_ids": [1]}],
            "text": "bad ?",
            "idx": 0,
        },
        {
            "input_ids": [3, 4, 5],
            "input_lengths": 3,
            "logprobs": [0.0, None, -2.0],
            "pair": [9, 10],
            "reward": None,
            "messages": [],
            "text": "[/INST]",
            "idx": 1,
        },
    ]


def test_columns_that_do_not_fit_are_named(cfg, caplog):
    with Logger(cfg) as logger:
        logger.log_batched_dict_as_jsonl({"a": [1, 2], "b": [1], "c": 5}, "rows.jsonl")
    assert {record.args[0] for record in caplog.records} == {"b", "c"}


def test_an_empty_batch_is_an_empty_file(cfg, tmp_path):
    with Logger(cfg) as logger:
        logger.log_batched_dict_as_jsonl({}, "rows.jsonl")
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == b""


@pytest.mark.parametrize("filename", ["../rows.jsonl", "/tmp/rows.jsonl", "a/../../rows.jsonl", "link/rows.jsonl", "."])
def test_a_file_name_that_leaves_the_folder_is_refused(cfg, tmp_path, filename):
    with Logger(cfg) as logger:
        (tmp_path / "run" / "link").symlink_to(tmp_path)
        with pytest.raises(ConfigError, match="leaves the log folder"):
            logger.log_batched_dict_as_jsonl({"a": [1]}, filename)


def test_rows_that_cannot_be_written_do_not_stop_the_run(cfg, tmp_path, caplog):
    with Logger(cfg) as logger:
        (tmp_path / "run" / "rows.jsonl").mkdir()
        logger.log_batched_dict_as_jsonl({"a": [1]}, "rows.jsonl")
    assert "samples and plots lost 1 of 1 records: it raised" in caplog.text
    assert "rows.jsonl: IsADirectoryError" in caplog.text


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        logger_package.nothing  # noqa: B018


LONG = "é" * 300


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("train/a.b-c d:1", "train/a.b-c d:1"),
        ("größe/λ", "größe/λ"),
        ("../../etc/passwd", "_/_/etc/passwd"),
        ("a/./b/...", "a/_/b/..."),
        ("/a//b/", "a/b"),
        ("a\0b\nc\x1b[31m\u202e\ud800", "a_b_c_[31m__"),
        ("", "_"),
        (LONG, f"{'é' * 115}_{zlib.crc32(LONG.encode()):08x}"),
    ],
)
def test_one_rule_for_names_holds_for_every_back_end(tmp_path, name, written):
    names = []

    class Own(LoggerInterface):
        def log_metrics(self, metrics, step, prefix="", step_metric=None):
            names.extend([*metrics, step_metric])

        def log_hyperparams(self, params): ...

        def log_plot(self, figure, step, name):
            names.append(name)

    with Logger({"log_dir": str(tmp_path)}, extra_backends=[Own()]) as logger:
        logger.log_metrics({name: 1.0}, 1, step_metric=name)
        logger.log_plot(Figure(figsize=(1, 1)), 1, name)
    assert names == [written] * 3
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line.keys() == {"time", written}
    (picture,) = (tmp_path / "plots").rglob("*.png")
    assert tmp_path / "plots" in picture.resolve().parents


def test_long_names_with_the_same_beginning_stay_different_and_renaming_warns_once(tmp_path, caplog):
    with Logger({"log_dir": str(tmp_path)}) as logger:
        for step in (1, 2):
            logger.log_metrics({LONG + "a": 1, LONG + "b": 2}, step, prefix="train")
    counts = [sum(name.startswith("train/é") for name in line) for line in lines(tmp_path / "metrics.jsonl")]
    assert counts == [2, 2]
    assert len([record for record in caplog.records if "is logged as" in record.getMessage()]) == 2
