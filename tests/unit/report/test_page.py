"""The page of a run is one file that holds all its data as text, whatever the run recorded and however it ended."""

from __future__ import annotations

import gzip
import json
import os
import re

import orjson
import pytest

from lucidrl.errors import ConfigError
from lucidrl.report.page import write_report
from lucidrl.report.run_data import read_run
from lucidrl.utils.run_folder import occupied
from tests.unit.report.page_runs import RIGHT_TO_LEFT, SCRIPT, data_of, first_run, page_of, page_run


def test_the_page_loads_nothing_and_runs_only_its_own_script(tmp_path):
    page = page_of(page_run(tmp_path / "run"))
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:|//|file:)""", page)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; img-src data:; script-src 'sha256-")
    assert "unsafe" not in policy[1]


def test_texts_of_a_run_cannot_leave_the_data(tmp_path):
    folder = page_run(tmp_path / "<b>run", samples={1: [SCRIPT, RIGHT_TO_LEFT]})
    page = page_of(folder)
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page
    assert "<title>&lt;b&gt;run" in page
    shown = [sample["messages"][1]["content"] for sample in data_of(page)["runs"][0]["samples"]]
    assert shown == [SCRIPT, RIGHT_TO_LEFT]


def test_odd_bytes_in_files_and_names_do_not_stop_the_page(tmp_path):
    folder = page_run(tmp_path / "run", 2).rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    good = {"messages": [{"role": "assistant", "content": "fine"}, "no message"], "reward": 10**30}
    lines = [json.dumps(good), '{"messages": [{"content": "\\ud800"}]}', "{}", "no json"]
    (folder / "samples").mkdir()
    (folder / "samples" / "step_1.jsonl").write_text("\n".join(lines))
    run = first_run(folder)
    assert [sample["messages"][0]["content"] for sample in run["samples"]] == ["fine"]
    assert "3 lines of samples/step_1.jsonl cannot be read." in run["notes"]


def test_the_result_is_one_sentence(tmp_path):
    run = first_run(page_run(tmp_path / "run"))
    assert run["state"] == "finished"
    assert run["conclusion"] == (
        "The run finished 30 of 30 steps. Held-out accuracy went from 0.200 at step 0 to 0.800 at step 30: better."
    )


def test_a_small_change_of_accuracy_is_called_chance(tmp_path):
    folder = page_run(tmp_path / "run", 30, "validation.num_prompts=10")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step":30,"time":1.0,"validation/accuracy":0.3}\n')
    assert first_run(folder)["conclusion"].endswith("a change within the chance of 10 prompts.")


def test_phases_sum_to_the_step_without_parts_of_phases(tmp_path):
    phases = first_run(page_run(tmp_path / "run"))["phases"]
    assert phases["names"] == ["train", "generate", "other"]
    assert [column[0] for column in phases["seconds"]] == pytest.approx([1.2, 0.5, 0.3])


def test_exclusive_times_and_the_breakdowns_advice_are_used_if_recorded(tmp_path):
    exclusive = {"time/exclusive/forward_s": 0.5, "time/exclusive/other_s": 0.1}
    folder = page_run(tmp_path / "run", 2)
    lines = [{**orjson.loads(line), **exclusive} for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    (folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    (folder / "breakdown.json").write_bytes(orjson.dumps({"opportunities": [{"text": "save 2 s"}]}))
    run = first_run(folder)
    assert run["phases"]["names"] == ["forward", "other"]
    assert run["opportunities"] == ["save 2 s"]


def test_unknown_metrics_get_a_chart_and_constant_ones_a_row(tmp_path):
    folder = page_run(tmp_path / "run", metrics={"staleness": 3.0, "ratio/mean": 1.0})
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step":{step},"time":1.0,"train/brand_new":{step}}}\n' for step in (31, 32))
    data = data_of(page_of(folder))
    groups = {group["title"]: group["names"] for group in data["charts"]}
    assert groups["Result"] == ["validation/accuracy", "train/reward"]
    assert "train/brand_new" in groups["All other metrics"]
    assert ["train/staleness", [3.0]] in data["constant"]


def test_nan_and_infinity_are_gaps(tmp_path):
    folder = page_run(tmp_path / "run", 3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step":4,"time":1.0,"train/loss":null,"train/loss.nonfinite":"nan"}\n')
        file.write('{"step":5,"time":1.0,"train/loss":0.5}\n')
    assert first_run(folder)["series"]["train/loss"][1][-2:] == [None, 0.5]


def test_a_running_run_is_called_running(tmp_path):
    folder = page_run(tmp_path / "run", 5)
    with occupied(folder):
        run = first_run(folder)
    assert run["state"] == "running"
    assert run["conclusion"].startswith("The run is running: 5 of 30 steps so far.")
    assert "when the page was written" in run["notes"][0]


def test_a_crashed_run_names_its_error(tmp_path):
    run = first_run(page_run(tmp_path / "run", 5, error=RuntimeError("out of <memory>")))
    assert run["state"] == "crashed"
    assert "crashed after 5 of 30 steps with RuntimeError: out of <memory>." in run["conclusion"]
    assert run["starts"][0]["end"] == "RuntimeError: out of <memory>"


def test_a_resumed_run_shows_both_starts_and_what_changed_between_them(tmp_path, monkeypatch):
    folder = page_run(tmp_path / "run", 5, error=KeyboardInterrupt())
    monkeypatch.setattr("lucidrl.recipes.environment.platform.python_version", lambda: "9.9")
    page_run(folder, 30)
    run = first_run(folder)
    assert [start["end"] for start in run["starts"]] == ["KeyboardInterrupt", "completed"]
    assert len(run["series"]["train/reward"][1]) == 30
    assert any("-> 9.9" in text for text in run["restarts"])


def test_an_empty_run_says_so(tmp_path):
    folder = page_run(tmp_path / "run", 1)
    (folder / "metrics.jsonl").write_text("")
    run = first_run(folder)
    assert run["state"] == "empty"
    assert run["conclusion"] == "The run recorded nothing. No metric has two values yet, so there is no result."
    assert run["phases"] is run["timeline"] is None
    assert run["samples"] == []


@pytest.mark.parametrize(("algorithm", "metric"), [("ppo", "episode_reward"), ("sft", "nll")])
def test_other_algorithms_have_their_own_result(tmp_path, algorithm, metric):
    folder = page_run(tmp_path / "run", algorithm=algorithm, metrics={metric: 1.0})
    data = data_of(page_of(folder))
    assert data["runs"][0]["title"].startswith(f"{algorithm.upper()}: ")
    assert "samples" in data["no_samples"]


def test_runs_with_the_same_name_show_their_parent_folders(tmp_path):
    folders = [page_run(tmp_path / name / "exp_001") for name in ("a", "b")]
    data = data_of(page_of(*folders))
    assert [run["name"] for run in data["runs"]] == ["a/exp_001", "b/exp_001"]
    assert data["comparison"] == "All runs end with the same held-out accuracy: 0.800."


def test_the_recorded_timeline_is_drawn_with_what_it_lacks(tmp_path):
    folder = page_run(tmp_path / "run", 2)
    (folder / "traces").mkdir()
    events = [
        {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "policy-0"}},
        {"ph": "X", "cat": "span", "name": "train", "pid": 7, "tid": 1, "ts": 2e6, "dur": 1e6},
        {"ph": "X", "cat": "span", "name": "forward", "pid": 7, "tid": 1, "ts": 2.1e6, "dur": 4e5},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 1, "ts": 2.1e6, "dur": 4e5},
    ]
    lines = b",\n".join(map(orjson.dumps, events))
    content = b'{"traceEvents":[\n%s\n],"lucidrl":{"missing":["rank 1 was killed"]}}\n' % lines
    path = folder / "traces" / "timeline.json.gz"
    path.write_bytes(gzip.compress(content))
    timeline = first_run(folder)["timeline"]
    assert timeline["tracks"] == [{"name": "policy-0", "rows": 2, "spans": [0, 1, 1, 0, 0.1, 0.4, 0, 1]}]
    assert timeline["note"].endswith("Missing: rank 1 was killed.")
    path.write_bytes(path.read_bytes()[:60])
    assert first_run(folder)["timeline"]["tracks"][0]["name"] in ("policy-0", "steps")


def test_an_unwritable_file_is_one_sentence_and_leaves_nothing(tmp_path):
    run = read_run(page_run(tmp_path / "run", 2))
    with pytest.raises(ConfigError, match=r"missing/page.html cannot be written \(No such file or directory\); choose"):
        write_report([run], tmp_path / "missing" / "page.html")
