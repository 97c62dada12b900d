"""The run folder has the log of the driver, without secrets."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from lucidrl import __version__
from lucidrl.errors import ConfigError, WorkerError
from lucidrl.recipes.folder import driver_log

OURS, OTHER = logging.getLogger("lucidrl.somewhere"), logging.getLogger("lucidrlish")


def lines(folder: Path) -> list[str]:
    """Without date and time."""
    return [line[24:] for line in (folder / "logs" / "driver.log").read_text().splitlines()]


def test_it_has_our_records_and_warnings_of_all(tmp_path):
    level = logging.getLogger("lucidrl").level
    with driver_log(tmp_path):
        OURS.info("taking over %s", "runs")
        OURS.debug("too much")
        OTHER.info("of no interest")
        OTHER.warning("low on disk")
    OURS.warning("afterwards")
    first, *between, last = lines(tmp_path)
    assert first.startswith(f"INFO lucidrl.recipes.folder: lucidrl {__version__}, process ")
    assert str(tmp_path / "config.yaml") in first
    assert between == ["INFO lucidrl.somewhere: taking over runs", "WARNING lucidrlish: low on disk"]
    assert last == "INFO lucidrl.recipes.folder: finished"
    assert logging.getLogger("lucidrl").level == level


def test_a_resumed_run_appends_and_the_error_that_ended_one_has_its_traceback(tmp_path):
    def fail() -> None:
        error = WorkerError("rank 1 of 2 was killed by SIGKILL in train")
        error.add_note("its output is in rank_1.log")
        raise error

    with pytest.raises(WorkerError), driver_log(tmp_path):
        fail()
    with driver_log(tmp_path):
        pass
    text = (tmp_path / "logs" / "driver.log").read_text()
    assert "ERROR lucidrl.recipes.folder: failed with WorkerError\nTraceback (most recent call last):" in text
    assert "in fail\n" in text
    assert "lucidrl.errors.WorkerError: rank 1 of 2 was killed by SIGKILL in train\nits output is in rank_1.log" in text
    assert text.count(f": lucidrl {__version__}, process ") == 2
    assert text.endswith("finished\n")


def test_secrets_of_the_environment_the_command_and_errors_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "wandb-0123456789")
    monkeypatch.setenv("SIGNING_KEY", "first line\nsecond line")
    monkeypatch.setattr(sys, "argv", ["lucidrl", "grpo", "env.kwargs.api_key=typed-secret", "seed=3"])

    def fail() -> None:
        OURS.warning("login with wandb-0123456789 failed")
        OURS.warning("signed by first line\nsecond line")
        raise ValueError("token='typed-secret' (\nbut all of this is shown")

    with pytest.raises(ValueError), driver_log(tmp_path):
        fail()
    text = (tmp_path / "logs" / "driver.log").read_text()
    for secret in ("wandb-0123456789", "typed-secret", "second line"):
        assert secret not in text
    assert "seed=3" in text
    assert text.endswith("but all of this is shown\n")


def test_a_secret_setting_of_several_words_is_left_out_as_a_whole(tmp_path, monkeypatch):
    settings = ["env.kwargs.password=correct horse,battery", 'env.kwargs={"api_key": "staple one"}', "run.name=a b"]
    monkeypatch.setattr(sys, "argv", ["lucidrl", "grpo", *settings])
    with driver_log(tmp_path):
        pass
    text = (tmp_path / "logs" / "driver.log").read_text()
    assert not any(word in text for word in ("correct", "horse", "battery", "staple", "one"))
    assert "'run.name=a b'" in text


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "logs").touch()
    refused = pytest.raises(ConfigError, match=r"driver.log cannot be written \(.*\); choose a writable run folder")
    with refused, driver_log(tmp_path):
        pass
