"""`lucidrl report` writes the page, keeps it up to date, and every run writes its own at the end."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lucidrl.report import page
from lucidrl.utils.run_folder import occupied
from tests.unit.report.page_runs import data_of, page_run

SMALL_PPO = ["ppo", "ppo.max_steps=2", "collector.frames_per_batch=256", "tracking.tensorboard=false"]


def test_the_page_is_in_the_first_run_folder_unless_named(lucidrl, tmp_path):
    folders = [page_run(tmp_path / name) for name in ("a", "b")]
    code, output, errors = lucidrl("report", *folders)
    assert code == 0, errors
    assert output.startswith(f"report: {folders[0] / 'report.html'} (0.1 MB)")
    assert len(data_of((folders[0] / "report.html").read_text())["runs"]) == 2
    code, _, errors = lucidrl("report", folders[1], "--output", tmp_path / "page.html")
    assert code == 0, errors
    assert (tmp_path / "page.html").is_file()
    assert not (folders[1] / "report.html").exists()


def test_a_folder_without_a_run_is_one_sentence(lucidrl, tmp_path):
    code, _, errors = lucidrl("report", tmp_path)
    assert code == 2
    assert "is not a run folder" in errors


def test_watching_writes_the_page_until_the_run_ends(lucidrl, tmp_path, monkeypatch):
    folder = page_run(tmp_path / "run", 5)
    lock, states = occupied(folder), []

    def let_time_pass(_: float) -> None:
        states.append(data_of((folder / "report.html").read_text())["runs"][0]["state"])
        if len(states) == 2:
            lock.__exit__(None, None, None)

    monkeypatch.setattr("time.sleep", let_time_pass)
    lock.__enter__()
    code, output, errors = lucidrl("report", folder, "--watch")
    assert code == 0, errors
    assert states == ["running", "running"]
    assert output.endswith("MB); it is written again every 10 s until the run ends\n")
    assert data_of((folder / "report.html").read_text())["runs"][0]["state"] == "stopped"


def test_every_run_writes_its_page_and_the_summary_names_it(lucidrl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, output, errors = lucidrl(*SMALL_PPO, "run.name=run")
    assert code == 0, errors
    assert "report: runs/run/report.html\n" in output
    run = data_of(Path("runs/run/report.html").read_text())["runs"][0]
    assert run["state"] == "finished"
    assert run["environment"]["command"].startswith("lucidrl ppo")
    assert {"train/frames_per_s", "time/step_s"} <= run["series"].keys()


def test_a_resume_that_is_refused_writes_no_page(lucidrl, tmp_path):
    folder = page_run(tmp_path / "run", 2, algorithm="ppo")
    with occupied(folder):
        code, _, errors = lucidrl("ppo", "--resume", folder)
    assert code == 2
    assert "is in use by process" in errors
    assert not (folder / "report.html").exists()


@pytest.mark.slow
def test_report_enabled_false_writes_no_page(lucidrl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, output, errors = lucidrl(*SMALL_PPO, "run.name=run", "report.enabled=false")
    assert code == 0, errors
    assert "report: " not in output
    assert not Path("runs/run/report.html").exists()


def test_a_page_that_cannot_be_made_is_a_warning(lucidrl, tmp_path, monkeypatch, caplog):
    def fail(runs):
        raise RuntimeError("a defect of the page")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(page, "report_page", fail)
    with caplog.at_level(logging.WARNING, "lucidrl"):
        code, output, errors = lucidrl(*SMALL_PPO, "run.name=run")
    assert code == 0, errors
    assert "summary" in output
    assert "no report.html is written: a defect of the page" in caplog.text


@pytest.mark.slow
def test_a_run_that_fails_has_a_page_with_its_error(lucidrl, tmp_path, monkeypatch):
    def fail(self, batch):
        raise RuntimeError("the disk burns")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lucidrl.algorithms.ppo.PPO.prepare", fail)
    with pytest.raises(RuntimeError, match="the disk burns"):
        lucidrl(*SMALL_PPO, "run.name=run")
    run = data_of(Path("runs/run/report.html").read_text())["runs"][0]
    assert run["state"] == "crashed"
    assert "RuntimeError: the disk burns" in run["conclusion"]
