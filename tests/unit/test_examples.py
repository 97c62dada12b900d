"""The examples run, the reference of settings is up to date, and the documentation's links lead somewhere."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lucidrl.cli import app
from lucidrl.data.datasets import load_prompts
from lucidrl.envs.text.interfaces import EnvRequest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = ["grpo.max_steps=2", "collector.prompts_per_step=2", "validation.num_prompts=2", "tracking.tensorboard=false"]


@pytest.fixture
def sort_digits(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("own_environment").SortDigits


@pytest.mark.parametrize(
    ("answer", "reward"), [("123", 1.0), (" 123 ", 1.0), ("321", 1 / 3), ("12", 0.0), ("1234", 0.0), ("", 0.0)]
)
def test_sort_digits_rewards_the_share_of_digits_in_place(sort_digits, answer, reward):
    log = [{"role": "user", "content": "sort 312="}, {"role": "assistant", "content": answer}]
    [reply] = asyncio.run(sort_digits().step([EnvRequest("312#0", log, {"answer": "123"}, turn=1)]))
    assert reply.reward == pytest.approx(reward)
    assert reply.metrics == {"accuracy": float(reward == 1.0)}


def test_the_file_of_prompts_asks_what_the_environment_asks(sort_digits):
    own = {prompt.messages: prompt.info for prompt in map(_comparable, sort_digits().prompts())}
    for prompt in map(_comparable, load_prompts(ROOT / "examples" / "prompts.jsonl")):
        assert own[prompt.messages] == prompt.info


@pytest.mark.parametrize(
    "settings",
    [["env.kwargs.num_digits=2"], [f"env.prompts_file={ROOT}/examples/prompts.jsonl", "env.validation_fraction=0.25"]],
)
def test_the_command_line_trains_the_example_environment(monkeypatch, tmp_path, sort_digits, settings):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(
        app, ["grpo", "env.name=own_environment:SortDigits", *settings, *SMALL], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in Path("runs/grpo/exp_001/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/reward" in line] == [1, 2]


def test_grpo_in_python_trains(capsys, sort_digits):
    main = runpy.run_path(str(ROOT / "examples" / "grpo_in_python.py"))["main"]
    main(["--steps", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 1", "step 2"]
    assert any(float(line.rpartition(" ")[2]) > 0 for line in lines), "no gradient, so nothing was trained"


def test_own_tracker_prints_what_it_got(capsys, tmp_path):
    main = runpy.run_path(str(ROOT / "examples" / "own_tracker.py"))["main"]
    main(str(tmp_path))
    settings, *steps = capsys.readouterr().out.splitlines()
    assert settings == "settings: {'lr': 0.0001, 'judge': {'api_key': '<redacted>'}}"
    assert steps == [f"step {n}: {{'train/reward': {n / 4}, 'train/tokens/mean': 8.5}}" for n in (1, 2, 3)]


def test_the_logging_page_shows_programs_that_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")

    def run(program):  # in a process of its own: wandb reads its settings once in a process
        subprocess.run([sys.executable, "-c", program], check=True, timeout=180)

    send_again, own_program = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "logging.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    run(own_program)
    rows = [json.loads(line) for line in Path("runs/mine/exp_001/samples/step_3.jsonl").read_text().splitlines()]
    assert [row["input_ids"] for row in rows] == [[5, 6], [7, 8, 9]]
    run(send_again.replace("runs/grpo/exp_001", "runs/mine/exp_001"))
    assert len(list(Path("wandb").glob("offline-run-*/*.wandb"))) == 1


def test_the_reference_of_settings_is_up_to_date():
    script = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))
    committed = (ROOT / "docs" / "configuration-reference.md").read_text(encoding="utf-8")
    assert committed == script["reference"](), "run `python docs/make_reference.py`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in _anchors(linked), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_named_in_the_pages_exist(page):
    reference = (ROOT / "docs" / "configuration-reference.md").read_text(encoding="utf-8")
    known = re.findall(r"^\| `([\w.]+)`", reference, flags=re.MULTILINE)
    sections = "|".join({key.partition(".")[0] for key in known if "." in key})
    # Messages about unknown keys are quoted, too.
    text = re.sub(r"unknown key \S+", "", page.read_text(encoding="utf-8"))
    for name in re.findall(rf"(?<![\w./])(?:{sections})\.[a-z_.]*[a-z_]", text):
        is_key = any(f"{name}.".startswith(f"{key}.") or key.startswith(f"{name}.") for key in known)
        assert is_key or name.endswith((".py", ".yaml", ".json", ".jsonl", ".lock", ".md")), f"{page.name} names {name}"


def _comparable(prompt):
    [message] = prompt.messages
    return type(prompt)(prompt.prompt_id, (message["content"],), prompt.info)


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}
