"""Runs with tools: settings, training, evaluation and SFT on conversations with calls."""

from __future__ import annotations

import json

import pytest

from lucidrl import GRPOTrainer
from lucidrl.errors import ConfigError
from lucidrl.recipes.settings import new_settings

TASK = ["data.file=problems.jsonl", "reward=numeric", "tools=calculator"]
ADD = '''def add(a: int) -> int:
    """Add.

    Args:
        a: a
    """
    return a + 3
'''
SMALL = ["grpo.max_steps=1", "collector.prompts_per_step=2", "policy.generation.max_new_tokens=8"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with problems and conversations."""
    problems = [{"prompt": f"{n}+3=", "answer": str(n + 3)} for n in range(24)]
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    conversations = [
        {
            "messages": [
                {"role": "user", "content": f"{n}+3="},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "4"},
                {"role": "assistant", "content": "4"},
            ]
        }
        for n in range(24)
    ]
    for name, rows in (("problems", problems), ("conversations", conversations)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "short_tools.py").write_text(ADD)  # the embedded model has a short context
    monkeypatch.chdir(tmp_path)
    return tmp_path


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_with_tools_trains_resumes_and_is_evaluated(lucidrl, here):
    folder = here / "runs" / "tools"
    code, _, errors = lucidrl("grpo", *TASK, *SMALL, "run.name=tools", "run.root=runs")
    assert code == 0, errors
    found = next(record for record in records(folder) if "train/reward" in record)
    assert {"train/tools/calls", "train/tools/bad_calls", "train/forked_rows"} <= found.keys()
    code, _, errors = lucidrl("grpo", "--resume", folder, "grpo.max_steps=2")
    assert code == 0, errors
    code, output, errors = lucidrl("eval", folder)
    assert code == 0, errors
    assert "accuracy" in output


@pytest.mark.slow
def test_sft_learns_calls_as_the_plain_format_writes_them(lucidrl, here):
    settings = ["sft.max_steps=1", "sft.examples_per_step=2", "run.name=sft", "run.root=runs"]
    code, _, errors = lucidrl("sft", "data.file=conversations.jsonl", "tools=short_tools:add", *settings)
    assert code == 0, errors
    code, _, errors = lucidrl("eval", here / "runs" / "sft", "data.file=problems.jsonl", "reward=numeric")
    assert code == 0, errors


@pytest.mark.slow
def test_a_trainer_takes_functions_as_tools(here):
    def double(number: int) -> int:
        """Double a number.

        Args:
            number: any number
        """
        return 2 * number

    config = {"collector": {"prompts_per_step": 2}, "policy": {"generation": {"max_new_tokens": 8}}}
    options = {"dataset": "problems.jsonl", "rewards": ["numeric"], "max_steps": 1, "output": str(here / "runs")}
    trainer = GRPOTrainer(tools=[double], config=config, display=False, **options)
    assert trainer.config.collector.max_turns == 4
    assert trainer.config.python_inputs == {"tools": "double"}
    trainer.train()
    assert (
        "train/tools/calls" in records(trainer.run_folder)[0] or "train/tools/calls" in records(trainer.run_folder)[1]
    )


def test_tools_choose_their_environment_and_turns():
    config = new_settings("grpo", overrides=TASK)
    assert config.env.name == "lucidrl.tools.env:ToolEnv"
    assert config.collector.max_turns == 4
    assert new_settings("grpo", overrides=[*TASK, "collector.max_turns=2"]).collector.max_turns == 2


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["tools=calculator", "data.file=problems.jsonl"], "tools=calculator needs a reward"),
        ([*TASK, "collector.max_turns=1"], "leaves no turn after a tool call"),
        (["tool_use.max_calls_per_turn=2"], "tool_use would have no effect without tools"),
        ([*TASK, "tools=[{name: calculator, timeout_s: 0}]"], "timeout_s"),
        ([*TASK, "tool_use.on_bad_call=ignore"], "message"),
        ([*TASK, "tool_use.max_results=3"], "max_result_chars"),
        ([*TASK, "env.name=guessing"], "both set"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_remedy(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        new_settings("grpo", overrides=settings)


def test_an_unknown_tool_is_refused_before_anything_loads(lucidrl, here):
    code, _, errors = lucidrl("check", "data.file=problems.jsonl", "reward=numeric", "tools=calculater")
    assert code == 2
    assert "did you mean calculator?" in errors
