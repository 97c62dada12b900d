"""TensorBoard itself reads back what the logger wrote."""

import logging
import struct
import zlib
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams import metadata

from lucidrl.errors import ConfigError
from lucidrl.utils.logger import TensorboardLogger


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "tensorboard"


@pytest.fixture
def logger(folder):
    logger = TensorboardLogger({"log_dir": str(folder)})
    yield logger
    logger.finish()


def accumulated(logger, folder):
    logger.finish()
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def raw_events(logger, folder):
    logger.finish()
    (file,) = Path(folder).iterdir()
    return [event for event in EventFileLoader(str(file)).Load() if event.HasField("summary")]


def test_scalars_of_every_kind_arrive_at_their_step(logger, folder):
    logger.log_metrics({"reward": 0.5, "ok": True, "t": torch.tensor(3), "deep": {"x": 1e300}}, step=4, prefix="train")
    events = accumulated(logger, folder)
    scalars = {tag: (item.step, item.value) for tag in events.Tags()["scalars"] for item in events.Scalars(tag)}
    assert scalars == {
        "train/reward": (4, 0.5),
        "train/ok": (4, 1.0),
        "train/t": (4, 3.0),
        "train/deep/x": (4, float("inf")),
    }


def test_one_call_is_one_event(logger, folder):
    logger.log_metrics({f"m{i}": i for i in range(50)}, step=1)
    (event,) = raw_events(logger, folder)
    assert len(event.summary.value) == 50


def test_lists_become_histograms_of_their_finite_values(logger, folder):
    logger.log_metrics({"h": torch.tensor([1.0, 2.0, 2.0, 5.0, float("nan")]), "none": [float("inf")]}, step=2)
    events = accumulated(logger, folder)
    assert events.Tags()["histograms"] == ["h"]
    (item,) = events.Histograms("h")
    histogram = item.histogram_value
    assert (item.step, histogram.min, histogram.max, histogram.num) == (2, 1.0, 5.0, 4)
    assert sum(histogram.bucket) == 4


@pytest.mark.parametrize("values", [[3.0], [1e20, 1e20], [1.0, 1.0 + 2**-52], [True, False], [0, 0]])
def test_values_without_a_range_still_make_a_histogram(logger, folder, values):
    logger.log_metrics({"h": values}, step=1)
    (item,) = accumulated(logger, folder).Histograms("h")
    assert sum(item.histogram_value.bucket) == len(values)


def test_what_is_no_number_is_warned_about_once(logger, folder, caplog):
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            logger.log_metrics({"text": "hello", "matrix": torch.zeros(2, 2), "x": 1.0}, step)
    assert len(caplog.records) == 2
    assert len(accumulated(logger, folder).Scalars("x")) == 3


def test_hyperparameters_are_a_table_of_text(logger, folder):
    logger.log_hyperparams({"policy": {"lr": 1e-4, "names": ["a|b", "two\nlines"]}})
    events = accumulated(logger, folder)
    tag = "hyperparams"
    table = events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
    assert "| policy.lr | 0.0001 |" in table
    assert "| policy.names.0 | a\\|b |" in table
    assert "| policy.names.1 | two<br>lines |" in table
    assert events.SummaryMetadata(tag).plugin_data.plugin_name == "text"


def test_hyperparameters_are_on_the_hparams_page_without_secrets(logger, folder):
    params = {
        "lr": 1e-4,
        "n": 3,
        "on": True,
        "none": None,
        "a": {"b": ["x", 2**70]},
        "api_key": "sk-1",
        "odd": "\ud800",
    }
    logger.log_hyperparams(params)
    events = accumulated(logger, folder)
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    session = metadata.parse_session_start_info_plugin_data(content)
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in session.hparams.items()}
    assert values == {
        "lr": 1e-4, "n": 3.0, "on": True, "none": "None", "a.b.0": "x", "a.b.1": float(2**70),
        "api_key": "<redacted>", "odd": "?",
    }  # fmt: skip
    assert session.start_time_secs > 0


class Figure:
    """The one method of a matplotlib figure that is used, with a real PNG of 3 x 2 grey pixels."""

    @staticmethod
    def savefig(file, format):
        def chunk(kind, data):
            return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

        assert format == "png"
        header = struct.pack(">IIBBBBB", 3, 2, 8, 0, 0, 0, 0)
        pixels = zlib.compress(b"\0\1\2\3" * 2)
        file.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))


def test_a_figure_becomes_an_image(logger, folder):
    logger.log_plot(Figure(), step=9, name="errors")
    (item,) = accumulated(logger, folder).Images("errors")
    assert (item.step, item.width, item.height) == (9, 3, 2)
    assert item.encoded_image_string.startswith(b"\x89PNG")


def test_the_log_dir_argument_wins(tmp_path):
    TensorboardLogger({"log_dir": str(tmp_path / "unused")}, log_dir=str(tmp_path / "used")).finish()
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


def test_an_unknown_key_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown key TensorboardConfig\.logdir"):
        TensorboardLogger({"log_dir": str(tmp_path), "logdir": "x"})


def test_finish_may_be_called_twice(logger):
    logger.finish()
    logger.finish()
