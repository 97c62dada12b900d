"""docs/recipes.md: its tables and curves are those of the records, and the script makes records from run folders."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lucidrl import GRPOTrainer
from lucidrl.recipes.settings import PRESETS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recipes.md"
ESTIMATE = {"value": 0.25, "low": 0.2, "high": 0.3, "num_prompts": 400}


@pytest.fixture(scope="module")
def curves():
    spec = importlib.util.spec_from_file_location("recipe_curves", ROOT / "tools" / "recipe_curves.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made_up() -> dict:
    run = {"training_s": 90.0, "curve": "reward", "held_out": "accuracy", "training": [[1, 0.1], [2, 0.3]]}
    before = {
        "name": "before",
        "num_prompts": 400,
        "estimates": {"greedy accuracy": ESTIMATE, "avg@4": ESTIMATE, "pass@4": ESTIMATE},
        "readable": 0.5,
        "gains": {},
    }
    gains = {name: {"difference": ESTIMATE} for name in ("greedy accuracy", "avg@4")}
    after = {**before, "name": "after GRPO", "readable": None, "gains": gains}
    runs = [
        {**run, "algorithm": "sft", "steps": 2, "validation": []},
        {**run, "algorithm": "grpo", "steps": 2, "validation": [[0, 0.1], [2, 0.2]]},
    ]
    return {"recipe": "made-up", "runs": runs, "models": [before, after]}


def test_the_tables_of_the_page_are_those_of_the_records(curves):
    text = PAGE.read_text(encoding="utf-8")
    assert curves.records()
    assert curves.page_with_tables(text, curves.records()) == text, "run `python tools/recipe_curves.py draw`"


def test_every_recipe_has_a_record_a_curve_and_a_preset(curves):
    text = PAGE.read_text(encoding="utf-8")
    named = re.findall(r"^<!-- ([\w-]+) -->$", text, flags=re.MULTILINE)
    assert sorted(set(named) - {"end"}) == [content["recipe"] for content in curves.records()]
    for name in [content["recipe"] for content in curves.records() if content["runs"]]:
        assert f"(images/recipe-{name}.svg)" in text
        assert (ROOT / "docs" / "images" / f"recipe-{name}.svg").is_file()
    for preset in re.findall(r"--preset ([\w-]+)", text):
        assert (PRESETS / f"{preset}.yaml").is_file()


def test_a_table_has_the_intervals_and_the_gain(curves):
    *_, before, after = curves.table(made_up()).splitlines()
    interval, gain = "0.250 [0.200, 0.300]", "+0.250 [+0.200, +0.300]"
    assert before == f"| before | {interval} | {interval} | {interval} | 50% |  |  |"
    assert after == f"| after GRPO | {interval} | {interval} | {interval} |  | {gain} | {gain} |"
    assert curves.table(made_up()).startswith("2 steps of sft in 1.5 minutes, then 2 steps of grpo in 1.5 minutes;")


def test_a_page_without_a_place_for_a_table_is_refused(curves):
    with pytest.raises(SystemExit, match="no place for the table of made-up"):
        curves.page_with_tables("# Recipes\n", [made_up()])


def test_curves_are_small_and_the_same_each_time(curves, tmp_path):
    files = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in files:
        curves.draw(made_up(), path)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].stat().st_size < 60_000
    words = {element.text for element in ElementTree.parse(files[0]).iter() if element.text}
    assert {"step of lucidrl sft", "step of lucidrl grpo", "training reward", "held-out accuracy"} <= words


@pytest.mark.slow
def test_a_record_holds_the_curves_and_estimates_of_a_run(curves, tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(curves, "NUM_PROMPTS", 20)
    monkeypatch.chdir(tmp_path)
    config = {
        "tracking": {"tensorboard": False, "monitor": False},
        "collector": {"prompts_per_step": 2, "samples_per_prompt": 2},
        "validation": {"every": 1, "num_prompts": 20},
        "num_threads": 1,
    }
    trainer = GRPOTrainer("embedded", config=config, max_steps=2, output=tmp_path / "runs", display=False)
    trainer.train()
    path = curves.record("tiny", "embedded", [trainer.run_folder], samples=2)
    content = json.loads(path.read_text())
    [run] = content["runs"]
    assert (run["algorithm"], run["steps"], run["curve"], run["held_out"]) == ("grpo", 2, "reward", "accuracy")
    assert [step for step, _ in run["training"]] == [1, 2]
    assert [step for step, _ in run["validation"]] == [0, 1, 2]
    before, after = content["models"]
    assert before["estimates"]["greedy accuracy"]["value"] == run["validation"][0][1], "greedy on the same prompts"
    assert after["estimates"]["greedy accuracy"]["value"] == run["validation"][-1][1]
    for name in ("greedy accuracy", "avg@2"):
        gain = after["estimates"][name]["value"] - before["estimates"][name]["value"]
        assert after["gains"][name]["difference"]["value"] == pytest.approx(gain, abs=2e-4)
    assert before["gains"] == {}
    assert (before["name"], after["name"]) == ("before", "after GRPO")
    assert curves.table(content).count("\n| ") == 4
