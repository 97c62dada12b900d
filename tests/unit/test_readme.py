"""The programs of the README: the reward gives partial credit, and the run starts as written."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
[REWARD] = [code for code in PROGRAMS if code.startswith("def exact")]
SMALL = ["collector={prompts_per_step: 2, samples_per_prompt: 2}", "grpo.max_steps=1", "validation.num_prompts=2"]


@pytest.fixture
def exact():
    names: dict = {}
    exec(REWARD, names)
    return names["exact"]


def test_the_reward_prefers_the_answer_alone(exact):
    completions = ["Lyon", "The capital of France is Paris.", "It is Paris", "Paris."]
    rewards = [exact(completion, answer="Paris", prompt="...") for completion in completions]
    assert rewards == sorted(rewards)
    assert (rewards[0], rewards[-1]) == (0, 1)
    assert len(set(rewards)) == 4
    assert exact("Buenos Aires", answer="Buenos Aires") == 1
    assert exact("", answer="Paris") == 0


def test_the_file_of_the_example_has_the_columns_of_the_readme():
    [row] = [json.loads(code) for code in re.findall(r"^```json\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)]
    rows = [json.loads(line) for line in (ROOT / "examples/capitals.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows[0] == row
    assert {tuple(row) for row in rows} == {("prompt", "answer")}


@pytest.fixture
def workplace(embedded_folder, tmp_path) -> Path:
    """What the README asks a reader to have: model, rows and reward."""
    model = tmp_path / "path/to/model"
    shutil.copytree(embedded_folder, model)
    shutil.copy(ROOT / "examples/capitals.jsonl", tmp_path / "train.jsonl")
    (tmp_path / "my_rewards.py").write_text(REWARD)
    return tmp_path


@pytest.mark.slow
def test_the_program_in_python_runs_as_written(workplace):
    [program] = [code for code in PROGRAMS if "GRPOTrainer" in code]
    assert "max_steps=200" in program
    (workplace / "program.py").write_text(program.replace("max_steps=200", "max_steps=1"))
    _run(workplace, [sys.executable, "program.py"])
    assert (workplace / "out/config.json").is_file()


@pytest.mark.slow
def test_the_command_runs_as_written(workplace):
    [command] = re.findall(r"^lucidrl grpo policy.model_name=FOLDER .*reward=\S+$", README, flags=re.MULTILINE)
    program, *words = shlex.split(command.replace("FOLDER", "path/to/model"))
    assert program == "lucidrl"
    _run(workplace, [sys.executable, "-m", "lucidrl.cli", *words, *SMALL])
    assert (workplace / "runs/grpo/exp_001/metrics.jsonl").is_file()


def _run(folder: Path, command: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
