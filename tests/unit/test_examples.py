"""The examples run."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from lucidrl.cli import app
from lucidrl.data.columns import Columns
from lucidrl.data.config import DataConfig
from lucidrl.data.loading import load_prompts
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest
from lucidrl.losses.interfaces import TokenOutputs
from tests.unit.test_pages import undocumented

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SMALL = ["grpo.max_steps=2", "collector.prompts_per_step=2", "validation.num_prompts=2", "tracking.tensorboard=false"]


@pytest.fixture
def examples_on_path(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture
def sort_digits(examples_on_path):
    return importlib.import_module("own_environment").SortDigits


@pytest.mark.parametrize(
    ("completion", "reward"), [("123", 1.0), (" 123 ", 1.0), ("321", 1 / 3), ("12", 0.0), ("1234", 0.0), ("", 0.0)]
)
def test_sort_digits_rewards_the_share_of_digits_in_place(sort_digits, completion, reward):
    log = [{"role": "user", "content": "sort 312="}, {"role": "assistant", "content": completion}]
    [reply] = asyncio.run(sort_digits().step([EnvRequest("312#0", log, {"answer": "123"}, turn=1)]))
    assert reply.reward == pytest.approx(reward)
    assert reply.metrics == {"accuracy": float(reward == 1.0)}


def test_the_prompt_file_matches_the_prompts_of_the_environment(sort_digits):
    own = {prompt.messages: prompt.info for prompt in map(_comparable, sort_digits().prompts())}
    for prompt in map(_comparable, load_prompts(ROOT / "examples" / "prompts.jsonl")):
        assert own[prompt.messages] == prompt.info


@pytest.mark.parametrize(
    "settings",
    [["env.kwargs.num_digits=2"], [f"data.file={ROOT}/examples/prompts.jsonl", "data.validation_fraction=0.25"]],
)
def test_the_command_line_trains_the_example_environment(monkeypatch, tmp_path, sort_digits, settings):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(
        app, ["grpo", "env.name=own_environment:SortDigits", *settings, *SMALL], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    lines = recorded_lines("runs/grpo/exp_001")
    assert [line["step"] for line in lines if "train/reward" in line] == [1, 2]
    assert undocumented({name for line in lines for name in line}) == set()


def test_grpo_from_parts_trains(capsys, sort_digits):
    main = runpy.run_path(str(ROOT / "examples" / "grpo_from_parts.py"))["main"]
    main(["--steps", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 1", "step 2"]
    assert any(float(line.rpartition(" ")[2]) > 0 for line in lines), "no gradient, so nothing was trained"


@pytest.mark.slow
def test_grpo_in_python_trains_and_saves(capsys, tmp_path):
    main = runpy.run_path(str(EXAMPLES / "grpo_in_python.py"))["main"]
    main(["--steps", "2", "--output", str(tmp_path)])
    *_, accuracy, completion = capsys.readouterr().out.splitlines()
    assert accuracy.startswith("accuracy after 2 steps: 0.")
    assert completion.startswith("12+30 is ")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.model_type == "llama"


@pytest.mark.slow
def test_preference_pairs_are_distinct_and_readable(tmp_path):
    rows = runpy.run_path(str(EXAMPLES / "preference_pairs.py"))["preferences"]()
    assert len({row["prompt"] for row in rows}) == len(rows) == 400
    columns = Columns(DataConfig(file="preferences.jsonl"))
    pairs = [columns.pair(row, "here", str(number)) for number, row in enumerate(rows)]
    assert all(len(one.chosen[0]["content"]) < len(one.rejected[0]["content"]) for one in pairs)


def test_llm_judge_grades_with_its_stand_in(capsys, monkeypatch):
    main = runpy.run_path(str(EXAMPLES / "llm_judge.py"))["main"]
    main(["--steps", "2"])
    *_, score, num_requests = capsys.readouterr().out.splitlines()
    assert 0 <= float(score.rpartition(" ")[2]) <= 1
    assert 0 < float(num_requests.rpartition(" ")[2]) <= 1


@pytest.mark.slow
def test_sft_then_grpo_then_plain_transformers(capsys, tmp_path):
    main = runpy.run_path(str(EXAMPLES / "sft_then_grpo.py"))["main"]
    main(["--sft-steps", "40", "--grpo-steps", "15", "--output", str(tmp_path)])
    *_, rewards, completion = capsys.readouterr().out.splitlines()
    before, after = map(float, re.findall(r"0\.\d+|1\.0+", rewards))
    assert before > 0.3, "the supervised steps taught the form of the task"
    assert after > before
    assert re.fullmatch(r"sort 312= is \d{3}", completion)


def test_own_tracker_prints_what_it_got(capsys, tmp_path):
    main = runpy.run_path(str(ROOT / "examples" / "own_tracker.py"))["main"]
    main(str(tmp_path))
    settings, *steps = capsys.readouterr().out.splitlines()
    assert settings == "settings: {'lr': 0.0001, 'scorer': {'api_key': '<redacted>'}}"
    assert steps == [f"step {n}: {{'train/reward': {n / 4}, 'train/tokens/mean': 8.5}}" for n in (1, 2, 3)]


def test_own_loss_trains(capsys, examples_on_path):
    main = runpy.run_path(str(EXAMPLES / "own_loss.py"))["main"]
    main(["--steps", "1"])
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("step 1: reward")
    assert float(line.rpartition(" ")[2]) > 0, "no gradient, so nothing was trained"


def test_a_loss_does_not_depend_on_how_rows_are_cut(examples_on_path):
    loss_fn = importlib.import_module("own_loss").ReinforceLoss()
    draw = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(4, 5, generator=draw)
    data = {"advantages": torch.randn(4, generator=draw), "token_mask": torch.ones(4, 5), "sample_mask": torch.ones(4)}

    def loss_of(rows: slice) -> float:
        outputs = TokenOutputs(logprobs=logprobs[rows], entropy=-logprobs[rows])
        columns = {name: column[rows] for name, column in data.items()}
        loss, _ = loss_fn(outputs, columns, torch.tensor(4), torch.tensor(16))
        return loss.item()

    assert loss_of(slice(0, 1)) + loss_of(slice(1, 4)) == pytest.approx(loss_of(slice(0, 4)))


def test_a_second_attempt_earns_half(examples_on_path):
    env = importlib.import_module("multi_turn_environment").SecondAttempt(num_problems=20)
    prompt = env.prompts()[0]

    def reply(completion: str, turn: int) -> EnvReply:
        log = [*prompt.messages, {"role": "assistant", "content": completion}]
        [found] = asyncio.run(env.step([EnvRequest(f"{prompt.prompt_id}#0", log, prompt.info, turn=turn)]))
        return found

    assert reply(prompt.info["answer"], turn=1).reward == 1
    again = reply("wrong", turn=1)
    assert not again.done
    assert again.messages == ({"role": "user", "content": prompt.info["problem"]},)
    assert reply(prompt.info["answer"], turn=2).reward == 0.5
    assert reply("wrong", turn=2).done


@pytest.mark.slow
def test_the_command_line_plays_two_turns(monkeypatch, tmp_path, examples_on_path):
    monkeypatch.chdir(tmp_path)
    settings = ["env.name=multi_turn_environment:SecondAttempt", "collector.max_turns=2", *SMALL]
    result = CliRunner().invoke(app, ["grpo", *settings, "tracking.dump_samples_every=1"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    samples = [json.loads(line) for line in Path("runs/grpo/exp_001/samples/step_1.jsonl").read_text().splitlines()]
    assert {len(sample["messages"]) for sample in samples} >= {4}  # problem, attempt, problem, attempt


@pytest.mark.slow
def test_ppo_trains_on_an_own_environment(monkeypatch, tmp_path, capsys, examples_on_path):
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(EXAMPLES / "ppo_own_environment.py"))["main"]
    main(["--steps", "2", "--runs", str(tmp_path / "runs")])
    assert -1000 < float(capsys.readouterr().out.splitlines()[-1].rpartition(" ")[2]) < 0
    assert undocumented({name for line in recorded_lines(tmp_path / "runs/push-cart") for name in line}) == set()


@pytest.mark.slow
def test_sft_records_documented_metrics(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    settings = ["sft.max_steps=2", "validation.num_prompts=2", "tracking.tensorboard=false"]
    assert CliRunner().invoke(app, ["sft", *settings], catch_exceptions=False).exit_code == 0
    assert undocumented({name for line in recorded_lines("runs/sft/exp_001") for name in line}) == set()


def test_collectors_collect_with_every_version(capfd, examples_on_path):
    main = runpy.run_path(str(EXAMPLES / "collectors.py"))["main"]
    main(["--workers", "2", "--frames", "400"])
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("one process: batch [8, 50]")
    assert lines[1:] == [
        "2 processes: batch [2, 200], policy version 0",
        "2 processes, asynchronous: 400 frames",
    ]


@pytest.mark.slow
def test_a_dqn_learns_from_a_replay_buffer(capfd, examples_on_path):
    main = runpy.run_path(str(EXAMPLES / "dqn_replay_buffer.py"))["main"]
    main(["--frames", "12000"])
    returns = [float(line.rpartition(" ")[2]) for line in capfd.readouterr().out.splitlines()]
    assert max(returns) > 5 * returns[0]
    main(["--frames", "3000", "--workers", "2"])
    assert capfd.readouterr().out.startswith("  2560 frames: ")


def recorded_lines(run: str | Path) -> list[dict]:
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def _comparable(prompt):
    [message] = prompt.messages
    return type(prompt)(prompt.prompt_id, (message["content"],), prompt.info)
