"""`lucidrl runs`: the table of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lucidrl.errors import WorkerError
from lucidrl.report.runs_table import list_runs, short_model
from lucidrl.report.text import shown_number, shown_seconds
from lucidrl.utils.run_folder import occupied
from tests.unit.report.run_folders import make_run


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """Four runs below `runs`, the default folder."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs/grpo/exp_2", [0.1, 0.2])
    make_run(tmp_path / "runs/grpo/exp_10", [0.3], error=WorkerError("rank 1 of 2 was killed by SIGKILL"))
    make_run(tmp_path / "runs/ppo/exp_001", [50.0, 40.0], algorithm="ppo", saved=[1])
    make_run(tmp_path / "runs/sft/exp_001", [], algorithm="sft")
    return tmp_path / "runs"


def names(folder: Path, sort: str, **options: bool) -> list[str]:
    return [row.name for row in list_runs(folder, sort, **options)]


def test_the_table_has_one_line_per_run_and_fits_80_columns(runs, lucidrl):
    with occupied(runs / "grpo/exp_10"):
        code, output, _ = lucidrl("runs")
    assert code == 0
    lines = [line.split() for line in output.splitlines()]
    assert max(map(len, output.splitlines())) <= 80
    assert lines[0] == ["name", "algo", "model", "steps", "state", "best", "duration", "size"]
    assert lines[1][:7] == ["grpo/exp_2", "grpo", "embedded", "2/2", "finished", "reward", "0.4"]
    assert lines[2][:7] == ["grpo/exp_10", "grpo", "embedded", "1/2", "running", "reward", "0.6"]
    assert lines[3][:7] == ["ppo/exp_001", "ppo", "CartPole-v1", "2/2", "finished", "reward", "100"]
    assert lines[4][:6] == ["sft/exp_001", "sft", "embedded", "0/2", "empty", "-"]
    assert len(lines) == 5


def test_errors_and_problems_are_below_the_table(runs, lucidrl):
    (runs / "sft/exp_001/metrics.jsonl").write_text("{")
    (runs / "sft/exp_001/config.yaml").unlink()
    _, output, _ = lucidrl("runs")
    assert "grpo/exp_10: WorkerError: rank 1 of 2 was killed by SIGKILL\n" in output
    assert "sft/exp_001: config.yaml is missing\nsft/exp_001: 1 line of metrics.jsonl cannot be read\n" in output


def test_names_are_sorted_by_their_numbers_and_numbers_with_the_largest_first(runs):
    by_name = ["grpo/exp_2", "grpo/exp_10", "ppo/exp_001", "sft/exp_001"]
    assert names(runs, "name") == by_name
    assert names(runs, "name", reverse=True) == by_name[::-1]
    assert names(runs, "steps") == ["grpo/exp_2", "ppo/exp_001", "grpo/exp_10", "sft/exp_001"]
    (runs / "ppo/exp_001/large").write_bytes(bytes(100_000))
    assert names(runs, "size")[0] == "ppo/exp_001"
    assert names(runs, "state")[0] == "grpo/exp_10"
    assert names(runs, "model")[0] == "ppo/exp_001"
    assert names(runs, "started") == by_name[::-1]


def test_the_best_run_is_the_first_and_runs_without_a_value_are_last(runs):
    lowest_first = ("checkpoint.metric=reward", "checkpoint.mode=min")
    make_run(runs / "sft/high", [2.0, 3.0], *lowest_first, algorithm="sft")
    make_run(runs / "sft/low", [1.0, 4.0], *lowest_first, algorithm="sft")
    ranked = ["ppo/exp_001", "grpo/exp_10", "grpo/exp_2", "sft/low", "sft/high"]
    assert names(runs, "best") == [*ranked, "sft/exp_001"]
    assert names(runs, "best", reverse=True) == [*ranked[::-1], "sft/exp_001"]


def test_json_has_every_field(runs, lucidrl):
    code, output, _ = lucidrl("runs", runs, "--sort", "best", "--json")
    found = {row["name"]: row for row in json.loads(output)}
    assert code == 0
    assert found["ppo/exp_001"]["best"] == {"name": "validation/reward", "value": 100.0, "step": 1, "mode": "max"}
    assert found["grpo/exp_10"]["state"] == "crashed"
    assert found["grpo/exp_10"]["error"] == "WorkerError: rank 1 of 2 was killed by SIGKILL"
    assert found["sft/exp_001"]["best"] is None
    assert {"algorithm", "model", "last_step", "max_steps", "duration_s", "size_bytes", "started"} <= set(
        found["grpo/exp_2"]
    )


def test_text_of_runs_is_printed_literally(tmp_path, lucidrl):
    names = {"[red]\x1b[/red]": "[red]␛[/red] ", "a\u202e:x:": "a\\u202e:x: ", "\udcff\n": "\\udcff␊ "}
    for name in names:
        make_run(tmp_path / name, [0.5], "policy.model_name='[b]m'")
    code, output, _ = lucidrl("runs", tmp_path)
    assert code == 0
    assert output.replace("\n", "").isprintable()
    assert all(shown in output for shown in names.values()), output
    assert output.count("[b]m") == 3
    code, output, _ = lucidrl("runs", tmp_path, "--json")
    assert {row["name"] for row in json.loads(output)} == set(names)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["runs"], ["runs is not a folder", "give a folder that holds runs"]),
        (["runs", "."], [". holds no run", "give a folder that holds runs"]),
        (["runs", ".", "--sort", "age"], ["--sort age is not a column", "name, algorithm, model, steps"]),
    ],
)
def test_a_mistake_is_one_sentence(lucidrl, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    code, _, errors = lucidrl(*arguments)
    assert code == 2
    assert errors.count("\n") == 1
    assert all(part in errors for part in said), errors


def test_a_run_folder_or_a_link_can_be_listed_itself(runs, tmp_path):
    assert names(runs / "grpo/exp_2", "name") == ["exp_2"]
    (tmp_path / "link").symlink_to(runs)
    assert len(names(tmp_path / "link", "name")) == 4
    assert list_runs(tmp_path / "link" / "grpo")[0].size_bytes > 0


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        (None, "-"),
        ("embedded", "embedded"),
        ("/data/models/SmolLM2/", "SmolLM2"),
        ("/w/runs/grpo/exp_001/checkpoints/step_20/policy", "exp_001/step_20"),
        ("hub:org/name@main", "name@main"),
    ],
)
def test_models_are_named_shortly(model, shown):
    assert short_model(model) == shown


def test_durations_and_numbers_are_short():
    assert [shown_seconds(value) for value in (None, 3.6, 185, 7800, 180_000)] == [
        "-",
        "4 s",
        "3m 05s",
        "2h 10m",
        "2d 02h",
    ]
    assert [shown_number(value) for value in (None, 0.123456, 12345.6, 1e-7)] == ["-", "0.1235", "12,346", "1e-07"]
    assert shown_number(0.5, with_sign=True) == "+0.5"
