"""`lucidrl compare`: the settings that differ, and the differences of metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lucidrl.errors import ConfigError
from lucidrl.report.compare import compare_runs
from tests.unit.report.run_folders import log_steps, make_run


@pytest.fixture
def two(tmp_path, monkeypatch) -> tuple[str, str]:
    """Two runs; the second has another learning rate, and learned more."""
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/a"), [0.1, 0.3, 0.2], "run.name=a", "grpo.max_steps=3", saved=[1, 2, 3])
    make_run(Path("runs/b"), [0.25, 0.5], "run.name=b", "policy.optimizer.kwargs.lr=0.5", "env.kwargs.max_operand=9")
    return "runs/a", "runs/b"


def words(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines()]


def test_only_settings_that_differ_are_printed_with_both_values(two, lucidrl):
    code, output, _ = lucidrl("compare", *two)
    found = words(output)
    assert code == 0
    assert max(map(len, output.splitlines())) <= 80
    assert output.startswith("A  runs/a: grpo, finished at step 3 of 3, ")
    start = found.index(["setting", "A", "B"])
    assert found[start + 1 : start + 5] == [
        ["env.kwargs.max_operand", "99", "9"],
        ["grpo.max_steps", "3", "2"],
        ["policy.optimizer.kwargs.lr", "0.00015", "0.5"],
        [],
    ], "run.name and equal settings are left out"


def test_metrics_have_last_and_best_values_with_differences_validation_first(two, lucidrl):
    found = words(lucidrl("compare", *two)[1])
    start = found.index(["metric", "A", "B", "B", "-", "A"])
    assert found[start + 1 :] == [
        ["validation/reward", "last", "0.4", "@3", "1", "@2", "+0.6"],
        ["best", "0.6", "@2", "1", "@2", "+0.4"],
        ["train/reward", "last", "0.2", "@3", "0.5", "@2", "+0.3"],
        ["best", "0.3", "@2", "0.5", "@2", "+0.2"],
        ["train/loss", "last", "-0.2", "@3", "-0.5", "@2", "-0.3"],
        ["time/step_s", "last", "1.5", "@3", "1.5", "@2", "+0"],
    ]


@pytest.mark.parametrize(("name", "step"), [("runs/a@best", 2), ("runs/a@newest", 3), ("runs/a/checkpoints/step_1", 1)])
def test_of_a_checkpoint_the_metrics_up_to_its_step_count(two, name, step):
    comparison = compare_runs([name, two[1]])
    [reward] = [row for row in comparison.metrics if row.name == "validation/reward"]
    assert (comparison.runs[0].step, reward.last_step["A"]) == (step, step)
    assert reward.best["A"].step <= step


def test_json_has_the_same_differences(two, lucidrl):
    code, output, _ = lucidrl("compare", *two, "--json")
    found = json.loads(output)
    assert code == 0
    assert found["runs"]["B"]["source"] == "runs/b"
    assert found["settings"]["policy.optimizer.kwargs.lr"] == {"A": 0.00015, "B": 0.5}
    reward = found["metrics"]["validation/reward"]
    assert reward["mode"] == "max"
    assert reward["A"] == {"last": 0.4, "last_step": 3, "best": 0.6, "best_step": 2}
    assert reward["B"]["best_difference"] == pytest.approx(0.4)


def test_nan_is_null_in_json_and_equal_settings_with_nan_do_not_differ(two, lucidrl):
    log_steps(Path("runs/a"), {4: float("nan")})
    for run in two:
        path = Path(run) / "config.yaml"
        path.write_text(path.read_text().replace("temperature: 1.5", "temperature: .nan"))
    _, output, _ = lucidrl("compare", *two, "--json")
    found = json.loads(output, parse_constant=pytest.fail)
    assert found["metrics"]["validation/reward"]["A"]["last"] is None
    assert "policy.generation.temperature" not in found["settings"]


def test_runs_of_other_algorithms_compare_what_they_share(two, lucidrl):
    make_run(Path("runs/c"), [30.0], algorithm="ppo")
    code, output, _ = lucidrl("compare", *two, "runs/c")
    found = words(output)
    assert code == 0
    assert ["seed", "1", "1", "0"] in found
    assert [row for row in found if row[:1] == ["ppo.*"]] == [["ppo.*", "unset", "unset", "8", "settings"]]
    assert not [row for row in found if row and row[0].startswith("ppo.max")]
    assert ["metric", "A", "B", "C", "B", "-", "A", "C", "-", "A"] in found
    Path("runs/c/metrics.jsonl").write_text('{"step":1,"train/episode_reward":3}\n')
    assert "in one run only: train/episode_reward (C)\n" in lucidrl("compare", *two, "runs/c")[1]


def test_items_of_a_list_or_mapping_are_compared_not_its_emptiness(two, lucidrl):
    make_run(Path("runs/sft"), [0.5], algorithm="sft")
    found = json.loads(lucidrl("compare", two[0], "runs/sft", "--json")[1])["settings"]
    assert found["env.kwargs.max_operand"] == {"A": 99}
    assert "env.kwargs" not in found
    assert "policy.scheduler" not in found


def test_a_run_without_settings_is_compared_by_its_metrics(two, lucidrl):
    Path("runs/b/config.yaml").unlink()
    code, output, _ = lucidrl("compare", *two)
    assert code == 0
    assert "B  runs/b: unknown algorithm, stopped at step 2, " in output
    assert "\n   config.yaml is missing\n" in output
    assert "there are no settings to compare" in output
    assert "validation/reward" in output


def test_text_of_runs_is_printed_literally(two, lucidrl):
    path = Path("runs/b/config.yaml")
    path.write_text(path.read_text().replace("max_operand: 9", 'max_operand: "[red]x[/red]\\e[31m"'))
    with Path("runs/b/metrics.jsonl").open("a") as file, Path("runs/a/metrics.jsonl").open("a") as other:
        for opened in (file, other):
            opened.write('{"step":2,"validation/[bold]\\u001b[0m":1.0}\n')
    _, output, _ = lucidrl("compare", *two)
    assert "[red]x[/red]␛[31m" in output
    assert "validation/[bold]␛[0m" in output
    assert "\x1b" not in output


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["runs/a"], "the number of runs to compare is 1; name 2 to 26 runs"),
        (["runs/a", "runs"], "runs is not a run folder: it has neither the settings nor the metrics of a run"),
        (["runs/a", "runs/x"], "runs/x is not a run folder: it does not exist"),
        (["runs/a", "runs/a@last"], "write runs/a@best or runs/a@newest"),
        (["runs/a", "runs/x@best"], "runs/x@best is not a checkpoint of a run"),
    ],
)
def test_a_mistake_is_one_clear_error(two, names, said):
    with pytest.raises(ConfigError, match=said):
        compare_runs(names)
