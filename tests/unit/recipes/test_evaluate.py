"""`lucidrl eval`: it agrees with validation, continues after a kill, compares, and explains mistakes in a sentence."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lucidrl import GRPOTrainer, SFTTrainer
from lucidrl.errors import LucidError
from lucidrl.recipes.eval_folder import EvalFolder, digest_of
from lucidrl.recipes.eval_plan import plan_of_sources
from lucidrl.recipes.eval_report import gaps
from lucidrl.recipes.evaluate import evaluate
from lucidrl.utils.layers import COMMAND_LINE, Origins

ROOT = Path(__file__).parents[3]
CONFIG = {
    "tracking": {"tensorboard": False, "monitor": False},
    "num_threads": 1,
    "env": {"name": "arithmetic", "kwargs": {"max_operand": 20}},
    "collector": {"prompts_per_step": 2, "samples_per_prompt": 2},
    "validation": {"num_prompts": 40, "prompts_per_batch": 16},
    "checkpoint": {"every": 1},
    "policy": {"generation": {"max_new_tokens": 4}},
}

FEWER = {"reward": 40, "pass_at_4": 2, "pass_at_8": 2, "maj_at_8": 39}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A finished run of two steps."""
    trainer = GRPOTrainer(
        "embedded",
        config=CONFIG,
        preset="task-embedded",
        learning_rate=1e-3,
        max_steps=2,
        output=tmp_path_factory.mktemp("runs"),
        display=False,
    )
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def run(trainer) -> Path:
    return trainer.run_folder


def last_validation(run: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last, prefix = [line for line in lines if "validation/reward" in line][-1], "validation/"
    return {name.removeprefix(prefix): value for name, value in last.items() if name.startswith(prefix)}


def files_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("samples.jsonl", "result.json", "eval.json")}


class Stopping:
    """Raises after some batches, as a crash would, or calls `act`."""

    def __init__(self, num_batches: int, act=None) -> None:
        self._left, self._act, self.announced = num_batches, act, []

    def on_start(self, name, num_finished, num_prompts): ...

    def on_batch(self, num_finished):
        self._left -= 1
        if not self._left and self._act is not None:
            self._act()
        elif not self._left:
            raise KeyboardInterrupt

    def announce(self, message):
        self.announced.append(message)


def test_greedy_evaluation_equals_the_last_validation_exactly(run):
    result = evaluate(run).result
    expected = last_validation(run)
    assert expected["answer_tokens"] > 0
    assert {name: result.metrics[name] for name in expected} == expected
    assert result.estimates["reward"].value == pytest.approx(expected["reward"], abs=1e-15)
    assert result.num_prompts == 40
    assert json.loads((result.folder / "result.json").read_text())["estimates"]["reward"]["value"] is not None


def test_estimates_that_leave_out_prompts_say_so(run):
    result = evaluate(run).result
    assert gaps(result) == []
    estimates = {name: replace(result.estimates["reward"], num_prompts=number) for name, number in FEWER.items()}
    assert gaps(replace(result, estimates=estimates)) == [
        "pass@4 and pass@8 rest on 2 of 40 prompts, because samples of the others were dropped",
        "maj@8 rests on 39 of 40 prompts, because samples of the others were dropped",
    ]


def test_samples_give_pass_and_majority(run, trainer):
    result = trainer.evaluate(samples=4, by="answer").result
    names = ["reward", "accuracy", "avg_at_4", "pass_at_1", "pass_at_2", "pass_at_4", "maj_at_4"]
    assert list(result.estimates) == names
    values = {name: estimate.value for name, estimate in result.estimates.items()}
    assert values["avg_at_4"] == pytest.approx(values["pass_at_1"])
    assert values["pass_at_1"] <= values["pass_at_2"] <= values["pass_at_4"]
    assert all(one.low <= one.value <= one.high for one in result.estimates.values())
    assert sum(result.category_sizes.values()) == 40
    lines = [json.loads(line) for line in (result.folder / "samples.jsonl").read_text().splitlines()]
    assert {len(line["samples"]) for line in lines} == {4}


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id="greedy"), pytest.param({"samples": 2}, id="sampled", marks=pytest.mark.slow)],
)
def test_an_interrupted_evaluation_continues_and_ends_equal(run, tmp_path, options):
    settings = ["validation.prompts_per_batch=8"]
    whole = evaluate(run, settings=settings, output=tmp_path / "whole", **options).result
    with pytest.raises(KeyboardInterrupt):
        evaluate(run, settings=settings, output=tmp_path / "parts", watcher=Stopping(2), **options)
    assert json.loads((tmp_path / "parts/progress.json").read_text())["num_prompts"] == 16
    with (tmp_path / "parts/samples.jsonl").open("ab") as file:
        file.write(b'{"prompt_id": "cut in the mid')
    parts = evaluate(run, settings=settings, output=tmp_path / "parts", **options).result
    assert files_of(parts.folder) == files_of(whole.folder)


def test_ctrl_c_finishes_the_batch_and_the_same_call_continues(run, tmp_path):
    watcher = Stopping(1, act=lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(LucidError, match=r"stopped after 16 of 40 prompts, .*; run the same command to continue"):
        evaluate(run, output=tmp_path / "out", watcher=watcher)
    assert watcher.announced == ["SIGINT: finishing this batch; a second signal stops at once"]
    assert evaluate(run, output=tmp_path / "out").result.num_prompts == 40


@pytest.mark.slow
def test_a_killed_process_is_continued_and_ends_equal(run, tmp_path):
    settings = ["validation.prompts_per_batch=1"]
    command = [sys.executable, "-m", "lucidrl.cli", "eval", str(run), "--samples", "8", "--output", "parts", *settings]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    progress, until = tmp_path / "parts/progress.json", time.monotonic() + 120
    while not progress.is_file() and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert 0 < json.loads(progress.read_text())["num_prompts"] < 40
    parts = evaluate(run, settings=settings, samples=8, output=tmp_path / "parts").result
    whole = evaluate(run, settings=settings, samples=8, output=tmp_path / "whole").result
    assert files_of(parts.folder) == files_of(whole.folder)


def test_two_models_are_compared_on_the_same_prompts(lucidrl, run, tmp_path):
    code, out, _ = lucidrl("eval", "embedded", run, "--output", tmp_path / "both")
    assert code == 0
    assert "A  embedded" in out
    assert "B  exp_001 step 2" in out
    assert "accuracy: no difference can be shown" in out or " is better by " in out
    ids = [
        [json.loads(line)["prompt_id"] for line in path.read_text().splitlines()]
        for path in sorted((tmp_path / "both").glob("*/samples.jsonl"))
    ]
    assert len(ids) == 2
    assert ids[0] == ids[1]
    [compared] = json.loads((tmp_path / "both/comparison.json").read_text())["comparisons"]
    assert f"accuracy: {compared['sentence']}" in out


@pytest.mark.slow
def test_settings_of_the_policy_reach_both_models_and_a_model_keeps_its_tokenizer(run, tmp_path):
    other = tmp_path / "exp_002"
    shutil.copytree(run, other)
    content = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(content.replace("  pad_token: null", "  pad_token: <other>"))

    def policies(*sources, settings=()):
        plan = plan_of_sources(sources, settings)
        return [plan.config_of(candidate).policy for candidate in plan.candidates]

    assert [policy.pad_token for policy in policies(run, other)] == [None, "<other>"]
    assert [policy.pad_token for policy in policies(other, "embedded")] == ["<other>", None]
    assert [policy.pad_token for policy in policies("embedded", other)] == [None, "<other>"]
    given = ["policy.precision=float64", "policy.pad_token=<given>"]
    for sources in ((run, other), (other, "embedded"), ("embedded", run)):
        found = [(policy.precision, policy.pad_token) for policy in policies(*sources, settings=given)]
        assert found == [("float64", "<given>")] * 2


def test_all_checkpoints_have_one_row_each(lucidrl, run):
    code, out, _ = lucidrl("eval", run, "--checkpoint", "all")
    assert code == 0
    assert [line.split()[2] for line in out.splitlines() if line.startswith("exp_001 step") and "[" in line] == [
        "1",
        "2",
    ]


def test_a_model_is_evaluated_on_every_row_of_a_file(lucidrl, tmp_path):
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "size": a} for a in (3, 4) for b in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = [f"data.file={tmp_path / 'rows.jsonl'}", "reward=numeric", "policy.generation.max_new_tokens=4"]
    arguments = ["eval", "embedded", *task, "--samples", 2, "--by", "size", "--output", tmp_path / "out"]
    code, out, err = lucidrl(*arguments)
    assert code == 0, err
    assert out.startswith("8 rows of rows.jsonl, 2 samples each")
    assert "maj@2" in out
    assert "failed to parse" in out
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["category_sizes"] == {"3": 4, "4": 4}


def test_a_run_is_evaluated_with_another_reward(run, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "3+4=", "answer": "7"}\n')
    settings = [f"data.file={tmp_path / 'rows.jsonl'}", "reward=exact"]
    result = evaluate(run, settings=settings, output=tmp_path / "out").result
    assert "reward/exact" in result.metrics
    assert result.num_prompts == 1


@pytest.mark.slow
def test_a_run_of_sft_is_evaluated_with_a_reward(lucidrl, tmp_path):
    rows = [{"prompt": f"{a}+{a}=", "completion": str(2 * a)} for a in range(8)]
    (tmp_path / "learned.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.jsonl").write_text('{"prompt": "3+4=", "sum": "7"}\n{"prompt": "2+2=", "sum": "4"}\n')
    config = {
        "tracking": CONFIG["tracking"],
        "data": {"file": str(tmp_path / "learned.jsonl"), "validation_fraction": 0},
        "sft": {"examples_per_step": 4},
    }
    trainer = SFTTrainer("embedded", config=config, max_steps=1, output=tmp_path / "runs", display=False)
    trainer.train()
    task = [f"data.file={tmp_path / 'test.jsonl'}", "data.answer=sum", "policy.generation.max_new_tokens=4"]
    code, out, err = lucidrl("eval", trainer.run_folder, *task, "reward=numeric")
    assert code == 0, err
    assert out.startswith("2 rows of test.jsonl, greedy")
    code, _, err = lucidrl("eval", trainer.run_folder, *task)
    assert code == 2
    assert "learned from examples, so nothing says how its completions are scored; set reward=" in err


@pytest.mark.slow
def test_a_file_is_evaluated_without_the_validation_rows_of_the_run(tmp_path):
    for name, sums in (("own", 4), ("held_out", 3), ("test", 2)):
        rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(sums)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"file": str(tmp_path / "own.jsonl"), "validation_file": str(tmp_path / "held_out.jsonl")}
    config = {**CONFIG, "env": {}, "data": data, "reward": "numeric"}
    trainer = GRPOTrainer(
        "embedded", config=config, preset="task-embedded", max_steps=1, output=tmp_path / "runs", display=False
    )
    trainer.train()
    assert evaluate(trainer.run_folder).result.num_prompts == 3
    assert evaluate(trainer.run_folder, settings=[f"data.file={tmp_path / 'test.jsonl'}"]).result.num_prompts == 2


def test_an_evaluation_without_scores_says_how_to_repeat_it(run, tmp_path):
    def dropped() -> None:
        path = tmp_path / "out/samples.jsonl"
        path.write_text(path.read_text().replace('"dropped":false', '"dropped":true '))

    settings = ["validation.num_prompts=4"]
    with pytest.raises(LucidError, match=r"scored none of the 4 samples .* remove the folder, or change a setting"):
        evaluate(run, settings=settings, output=tmp_path / "out", watcher=Stopping(1, act=dropped))
    with pytest.raises(LucidError, match=r"another evaluation: env.timeout_s is 60.0 there and 90.0 here"):
        evaluate(run, settings=[*settings, "env.timeout_s=90"], output=tmp_path / "out")


def test_a_model_is_evaluated_before_training(tmp_path):
    options = {"config": CONFIG, "preset": "task-embedded", "output": tmp_path, "display": False}
    report = GRPOTrainer("embedded", **options).evaluate()
    assert report.result.num_prompts == 40
    assert report.result.folder.parent == tmp_path / "eval"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "7"], "there is no checkpoint"),
        (["--checkpoint", "bst"], "--checkpoint bst is not known; write a step, best, newest or all"),
        (["--samples", "0"], "--samples 0 completes no prompt; write 1 or more"),
        (["--by", "level"], "has no such column; choose one of its columns: answer"),
        (["validation.num_prompts=0"], "validation.num_prompts=0 leaves no prompts to evaluate"),
        (["data.validation_fraction=0"], "no prompts are held out, so there are none to evaluate"),
        (["validaton.num_prompts=3"], "unknown key validaton; did you mean validation?"),
    ],
)
def test_mistakes_are_one_sentence(lucidrl, run, arguments, message):
    code, _, err = lucidrl("eval", run, *arguments)
    assert (code, err.count("error:"), "Traceback" in err) == (2, 1, False)
    assert message in " ".join(err.split())


def test_a_model_without_reward_is_refused(lucidrl, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    code, _, err = lucidrl("eval", "embedded", f"data.file={tmp_path / 'rows.jsonl'}")
    assert code == 2
    assert "embedded is a model, not a run, so nothing says how its completions are scored; set reward=" in err


def test_a_folder_of_another_evaluation_or_other_files_is_refused(run, tmp_path):
    evaluate(run, output=tmp_path / "out", settings=["validation.num_prompts=4"])
    with pytest.raises(LucidError, match=r"holds another evaluation: samples is 1 there and 2 here .* choose another"):
        evaluate(run, output=tmp_path / "out", settings=["validation.num_prompts=4"], samples=2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").touch()
    with pytest.raises(LucidError, match=r"holds other files, such as notes\.txt"):
        evaluate(run, output=tmp_path / "mine")


def test_a_kill_in_the_first_write_does_not_block_the_folder(tmp_path):
    (tmp_path / ".eval.json").write_text('{"mod')
    settings = {"reward": {"kwargs": {3: "three"}}}
    for _ in range(2):
        EvalFolder(tmp_path, settings).open()
    assert [path.name for path in tmp_path.iterdir()] == ["eval.json"]
    assert digest_of(settings) == digest_of({"reward": {"kwargs": {"3": "three"}}})


def test_validation_samples_several_completions_on_request(tmp_path):
    config = {**CONFIG, "validation": {"num_prompts": 8, "samples_per_prompt": 2}}
    trainer = GRPOTrainer(
        "embedded", config=config, preset="task-embedded", max_steps=1, output=tmp_path, display=False
    )
    metrics = trainer.train().metrics
    assert {"validation/pass_at_1", "validation/pass_at_2_low", "validation/maj_at_2", "validation/reward_high"} <= (
        metrics.keys()
    )
    result = trainer.evaluate().result
    assert result.estimates["pass_at_2"].value == metrics["validation/pass_at_2"]
    assert result.metrics["answer_tokens"] == metrics["validation/answer_tokens"]


def test_a_setting_of_a_section_counts_as_a_change_of_the_section():
    given = Origins({"env.kwargs.level": COMMAND_LINE})
    assert given.has_any_of("env")
    assert given.has_any_of("env.kwargs.level")
    assert not given.has_any_of("data")
    assert not given.has_any_of("env.kwargs.lev")


@pytest.mark.slow
def test_a_setting_may_be_longer_than_the_name_of_a_file(run, tmp_path):
    names = ", ".join(f"name_{number}" for number in range(60))
    command = [sys.executable, "-m", "lucidrl.cli", "eval", str(run), f"env.kwargs={{names: [{names}]}}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown key env.kwargs.names;")
