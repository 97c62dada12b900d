"""What is read from run folders: of whole, running, resumed, crashed, old and damaged runs."""

from __future__ import annotations

import json
import math
import sys
from datetime import datetime
from pathlib import Path

import pytest

import lucidrl
from lucidrl.algorithms.config import ALGORITHM_NAMES
from lucidrl.errors import ConfigError, WorkerError
from lucidrl.recipes.folder import driver_log
from lucidrl.recipes.settings import ALGORITHMS
from lucidrl.report.metrics_file import read_metrics
from lucidrl.report.run_data import RunState, find_runs, load_metrics, read_run
from lucidrl.utils.run_folder import occupied
from tests.unit.report.run_folders import log_machine, log_steps, make_run


def rewards_of(folder: Path) -> dict[int, float]:
    return {record["step"]: record["train/reward"] for record in load_metrics(folder)}


def write_log(folder: Path, *entries: tuple[float, str]) -> None:
    """A driver's log with entries at the given Unix seconds."""
    (folder / "logs").mkdir(exist_ok=True)
    lines = [
        f"{datetime.fromtimestamp(moment).isoformat(' ', 'milliseconds').replace('.', ',')} {text}\n"
        for moment, text in entries
    ]
    (folder / "logs" / "driver.log").write_text("".join(lines))


STARTED = "INFO lucidrl.recipes.folder: lucidrl 0.1.0, process 1 on host, settings in config.yaml: lucidrl grpo"
FINISHED = "INFO lucidrl.recipes.folder: finished"
FAILED = "ERROR lucidrl.recipes.folder: failed with ConfigError"


def test_every_algorithm_is_known():
    assert set(ALGORITHM_NAMES) == set(ALGORITHMS)


def test_a_finished_run(tmp_path):
    folder = make_run(tmp_path / "exp_001", [0.25, 0.5], "run.name=exp_001", saved=[2])
    (folder / "samples").mkdir()
    for name in ("validation_2.jsonl", "step_10.jsonl", "step_2.jsonl", "notes.txt"):
        (folder / "samples" / name).touch()
    (folder / "traces").mkdir()
    (folder / "traces" / "driver.json").touch()
    (folder / "warnings.jsonl").write_text('{"step": 1, "time": 2.0, "name": "n", "message": "m"}\n[]\n{"step"')
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    run = read_run(folder)
    assert (run.name, run.algorithm, run.model) == ("exp_001", "grpo", "embedded")
    assert (run.last_step, run.max_steps, run.state) == (2, 2, RunState.FINISHED)
    assert run.config["checkpoint"]["metric"] == "reward"
    assert run.series("train/reward").values == [0.25, 0.5]
    assert run.series("train/reward").steps == [1, 2]
    assert (run.best.name, run.best.value, run.best.step) == ("validation/reward", 1.0, 2)
    assert [(file.name, file.step) for file in run.samples] == [("step", 2), ("validation", 2), ("step", 10)]
    assert [(saved.step, saved.metrics) for saved in run.checkpoints] == [(2, {"reward": 1.0})]
    assert [path.name for path in run.traces] == ["driver.json"]
    assert [(warning.step, warning.message) for warning in run.warnings] == [(1, "m")]
    assert run.started <= run.ended
    assert run.size_bytes == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert (run.error, run.problems) == (None, [])
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before, "reading changed the folder"


def test_training_validation_and_machine_are_one_record_per_step(tmp_path):
    folder = tmp_path
    log_steps(folder, {1: 0.5})
    log_machine(folder, **{"node.0.cpu.util": 10.0})
    log_machine(folder, **{"node.0.cpu.util": 90.0})
    log_steps(folder, {2: 0.75, 3: 1.0})
    log_machine(folder)
    first, second, third = load_metrics(folder)
    assert list(second)[:2] == ["step", "time"]
    assert (second["train/reward"], second["validation/reward"], second["time/step_s"]) == (0.75, 1.5, 1.5)
    assert second["machine/node.0.cpu.util"] == 90.0, "the newest since the step before"
    assert "machine/node.0.cpu.util" not in {*first, *third}, "nothing was measured"
    assert len(read_run(folder).metrics.machine) == 3


def test_steps_that_a_resumed_run_repeats_count_once(tmp_path):
    log_steps(tmp_path, {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4})
    log_steps(tmp_path, {3: 0.5, 4: 0.6, 5: 0.7})
    assert rewards_of(tmp_path) == {1: 0.1, 2: 0.2, 3: 0.5, 4: 0.6, 5: 0.7}


def test_steps_that_a_resumed_run_has_not_reached_again_do_not_count(tmp_path):
    log_steps(tmp_path, {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.9})
    log_steps(tmp_path, {3: 0.5})
    assert rewards_of(tmp_path) == {1: 0.1, 2: 0.2, 3: 0.5}
    assert read_run(tmp_path).last_step == 3
    assert read_run(tmp_path).best.value == 1.0
    lines = ['{"step":1,"train/reward":0.1,"train/kl":1.0}', '{"step":1,"train/reward":0.2}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert load_metrics(tmp_path) == [{"step": 1, "time": None, "train/reward": 0.2}]


def test_metrics_that_are_logged_later_join_their_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step":1,"train/reward":0.1}\n{"step":2,"train/reward":0.2}\n{"step":1,"own/score":7}\n{"step":2,"train/kl":3}\n'
    )
    first, second = load_metrics(tmp_path)
    assert (first["train/reward"], first["own/score"]) == (0.1, 7)
    assert (second["train/reward"], second["train/kl"]) == (0.2, 3)


def test_a_cut_last_line_and_other_rubbish_are_skipped_and_counted(tmp_path):
    folder = make_run(tmp_path / "run")
    whole = load_metrics(folder)
    path = folder / "metrics.jsonl"
    rubbish = b'\xff\x00\n[1]\n"text"\n{"step": "x"}\n{"step": -1}\n{"step": true}\n\n' + path.read_bytes()[:50]
    path.write_bytes(path.read_bytes() + rubbish)
    assert load_metrics(folder) == whole
    assert read_run(folder).problems == ["8 lines of metrics.jsonl cannot be read"]


def test_nan_and_infinity_are_numbers_and_never_the_best(tmp_path):
    log_steps(tmp_path, {1: math.nan, 2: 0.5, 3: math.inf})
    records = load_metrics(tmp_path)
    assert math.isnan(records[0]["train/reward"])
    assert records[2]["train/reward"] == math.inf
    assert not [name for record in records for name in record if name.endswith(".nonfinite")]
    assert read_run(tmp_path).best.value == 1.0


@pytest.mark.parametrize(
    ("options", "state"),
    [
        ({"rewards": [0.1, 0.2]}, RunState.FINISHED),
        ({"rewards": [0.1]}, RunState.STOPPED),
        ({"rewards": [0.1, 0.2], "error": WorkerError("rank 1 was killed")}, RunState.CRASHED),
        ({"rewards": [0.1], "error": KeyboardInterrupt()}, RunState.STOPPED),
        ({"rewards": [], "error": WorkerError("too little memory")}, RunState.CRASHED),
        ({"rewards": []}, RunState.EMPTY),
    ],
)
def test_the_state_is_how_the_run_ended(tmp_path, options, state):
    run = read_run(make_run(tmp_path / "run", **options))
    assert run.state is state
    assert run.error == (f"WorkerError: {options['error']}" if state is RunState.CRASHED else None)


def test_a_running_run_and_one_whose_driver_was_killed(tmp_path):
    folder = make_run(tmp_path / "run", [0.1, 0.2])
    with occupied(folder), driver_log(folder):
        log_steps(folder, {3: 0.3})
        run = read_run(folder)
        assert (run.state, run.ended) == (RunState.RUNNING, None)
        (folder / "logs" / "driver.log").rename(folder / "logs" / "killed.log")  # as it is now
    assert read_run(folder).state is RunState.FINISHED, "without a log, by its steps"
    (folder / "logs" / "killed.log").rename(folder / "logs" / "driver.log")
    text = (folder / "logs" / "driver.log").read_text()
    (folder / "logs" / "driver.log").write_text(text.removesuffix(text.splitlines(keepends=True)[-1]))
    run = read_run(folder)
    assert (run.state, run.error) == (RunState.CRASHED, None)
    assert run.ended == run.metrics.times[-1]


def test_a_lock_that_a_killed_driver_left_is_a_crash(tmp_path):
    folder = make_run(tmp_path / "run", [0.1])
    (folder / "run.lock").write_text("{}")
    assert read_run(folder).state is RunState.CRASHED


def test_a_resume_that_was_refused_changes_no_state(tmp_path):
    folder = make_run(tmp_path / "run", [0.1, 0.2])
    times = read_run(folder).metrics.times
    sessions = [(times[0] - 1, STARTED), (times[-1] + 1, FINISHED), (times[-1] + 2, STARTED)]
    write_log(folder, *sessions, (times[-1] + 3, FAILED))
    assert read_run(folder).state is RunState.FINISHED
    log_steps(folder, {3: 0.3})
    write_log(folder, *sessions[:2], (times[-1] - 1, STARTED), (times[-1] + 9, FAILED))
    assert read_run(folder).state is RunState.CRASHED, "it has recorded a step"


def test_a_run_whose_steps_were_raised_and_that_crashed_is_crashed(tmp_path):
    folder = make_run(tmp_path / "run", [0.1, 0.2], "grpo.max_steps=4")
    log_steps(folder, {3: 0.3})
    make_run(folder, {4: 0.4}, "grpo.max_steps=4", error=ValueError("first line\nsecond line"))
    assert read_run(folder).state is RunState.CRASHED
    assert read_run(folder).error == "ValueError: first line"


@pytest.mark.parametrize(
    ("rewards", "saved", "state"),
    [([0.1, 0.2], [], RunState.FINISHED), ([0.1], [1], RunState.STOPPED), ([0.1], [], RunState.CRASHED)],
)
def test_runs_of_version_0_1_0_have_no_log(tmp_path, rewards, saved, state):
    folder = make_run(tmp_path / "run", rewards, saved=saved)
    (folder / "logs" / "driver.log").unlink()
    run = read_run(folder)
    assert run.state is state
    assert (run.started, run.ended) == (run.metrics.times[0], run.metrics.times[-1])
    assert run.duration_s == run.ended - run.started


def test_the_duration_leaves_out_the_time_until_a_resume(tmp_path):
    lines = [{"step": 1, "time": 1030.0, "train/reward": 1}, {"step": 2, "time": 9007.0, "train/reward": 1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_log(tmp_path, (1000, STARTED), (5000, STARTED), (5010, FINISHED), (9000, STARTED))
    run = read_run(tmp_path)
    assert run.started == 1000
    assert run.duration_s == pytest.approx(30 + 10 + 7), "a killed session ends with its last line of metrics"
    assert run.ended == 9007


def test_secrets_are_redacted_and_references_are_not_resolved(tmp_path, monkeypatch):
    monkeypatch.setenv("OWN_TOKEN", "0123456789")
    settings = ("env.kwargs={api_key: plain, url: 'http://u:pw@host', seed: 3}", "env.kwargs.text=${oc.env:OWN_TOKEN}")
    run = read_run(make_run(tmp_path / "run", [0.1], "env.name=own:Env", *settings))
    kwargs = {"api_key": "<redacted>", "url": "http://<redacted>@host", "seed": 3, "text": "${oc.env:OWN_TOKEN}"}
    assert run.setting("env", "kwargs") == kwargs


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"- 1\n", b"run: {}\nother: {}\n", b"[" * 5000])
def test_a_run_with_damaged_settings_still_has_its_metrics(tmp_path, content):
    folder = make_run(tmp_path / "run", [0.1, 0.2])
    (folder / "config.yaml").write_bytes(content)
    run = read_run(folder)
    assert (run.algorithm, run.model, run.max_steps, run.last_step) == (None, None, None, 2)
    assert run.problems == ["config.yaml has no settings of a run"]
    (folder / "config.yaml").unlink()
    assert read_run(folder).problems == ["config.yaml is missing"]


def test_a_run_without_metrics_is_honest(tmp_path):
    folder = make_run(tmp_path / "run", [0.1], saved=[1])
    (folder / "metrics.jsonl").unlink()
    (folder / "checkpoints" / "step_1" / "state.json").write_text("{")
    (folder / "metrics.jsonl").mkdir()
    run = read_run(folder)
    assert (run.last_step, run.records, run.best) == (1, [], None)
    assert (run.checkpoints[0].metrics, run.state) == ({}, RunState.STOPPED)


@pytest.mark.parametrize(("name", "said"), [("nothing", "does not exist"), (".", "has neither the settings nor")])
def test_a_folder_that_is_no_run_is_one_clear_error(tmp_path, name, said):
    with pytest.raises(ConfigError, match=f"is not a run folder: it {said}.*lucidrl runs"):
        load_metrics(tmp_path / name)


def test_runs_are_found_below_a_folder_without_following_links(tmp_path):
    make_run(tmp_path / "runs/grpo/exp_001")
    make_run(tmp_path / "runs/mine/inner/exp_002/")
    make_run(tmp_path / "elsewhere")
    (tmp_path / "runs/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "runs/grpo/exp_001/eval").mkdir()
    (tmp_path / "runs/grpo/exp_001/eval/metrics.jsonl").touch()
    assert [run.name for run in find_runs(tmp_path / "runs")] == ["exp_001", "exp_002"]


def test_pandas_loads_the_metrics_in_one_line(tmp_path):
    pandas = pytest.importorskip("pandas")
    folder = make_run(tmp_path / "run", {1: 0.5, 2: math.nan, 3: 0.75})
    frame = pandas.DataFrame(lucidrl.load_metrics(folder))
    assert frame["step"].tolist() == [1, 2, 3]
    assert frame["train/reward"].dtype == float
    assert frame["validation/reward"].max() == 1.5


def test_reading_metrics_loads_no_torch(tmp_path):
    import subprocess

    make_run(tmp_path / "run")
    code = f"import sys, lucidrl; lucidrl.load_metrics({str(tmp_path / 'run')!r}); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_a_missing_file_has_no_metrics(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl").records == []
