"""The trainers start the runs of the command line, from arguments, objects and callbacks."""

from __future__ import annotations

import asyncio
import collections
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

import lucidrl
from lucidrl import (
    Callback,
    DPOTrainer,
    GRPOTrainer,
    PPOTrainer,
    RewardModelTrainer,
    SFTTrainer,
    StopTraining,
)
from lucidrl.algorithms.config import GRPOConfig
from lucidrl.cli import app
from lucidrl.errors import ConfigError, DataError, LucidError, TrainingError
from lucidrl.recipes.configs import GRPORunConfig, PPORunConfig
from lucidrl.recipes.folder import create_run_folder
from lucidrl.recipes.settings import new_settings, resumed_settings
from lucidrl.utils.config import dump_yaml

QUIET = {"tracking": {"tensorboard": False, "monitor": False}, "num_threads": 1}
GRPO = QUIET | {
    "env": {"name": "arithmetic", "kwargs": {"max_operand": 9}},
    "collector": {"prompts_per_step": 2, "samples_per_prompt": 2},
    "validation": {"num_prompts": 2},
}
PPO = QUIET | {
    "env": {"num_envs": 2},
    "collector": {"frames_per_batch": 16},
    "ppo": {"minibatch_frames": 16, "num_epochs": 1},
    "validation": {"num_episodes": 2, "max_episode_frames": 5},
}
ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
"""Additions that the embedded model can learn."""


def exact(completion: str, answer: str, **row: object) -> float:
    return float(completion.strip() == answer)


class Recorder(Callback):
    """Records its calls, and does `acts[step]` in `on_step`."""

    def __init__(self, acts=None):
        self.calls, self._acts = [], acts or {}

    def on_step(self, step, metrics):
        self.calls.append(("step", step))
        if step in self._acts:
            self._acts[step]()

    def on_validation(self, step, metrics):
        self.calls.append(("validation", step))

    def on_save(self, step, folder):
        assert (folder / "manifest.json").is_file()
        self.calls.append(("save", step))

    def on_end(self, result):
        self.calls.append(("end", result.last_step))


def stop() -> None:
    raise StopTraining("seen enough")


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def ppo(folder: Path, *callbacks: Callback, **options) -> PPOTrainer:
    options = {"config": PPO, "max_steps": 3, "display": False} | options
    return PPOTrainer("CartPole-v1", output=folder, callbacks=callbacks, **options)


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    """A trainer that a callback has stopped after step 1, and that was continued to step 2."""
    recorder = Recorder({1: stop})
    trainer = GRPOTrainer(
        "embedded",
        config=GRPO,
        learning_rate=1e-3,
        max_steps=2,
        output=tmp_path_factory.mktemp("runs"),
        callbacks=[recorder],
        display=False,
    )
    stopped = trainer.train()
    return trainer, recorder, stopped, trainer.train()


def test_a_callback_sees_the_run_and_may_stop_it_after_saving(grpo):
    _, recorder, stopped, result = grpo
    first = [("validation", 0), ("step", 1), ("save", 1), ("end", 1)]
    assert recorder.calls == [*first, ("step", 2), ("validation", 2), ("save", 2), ("end", 2)]
    assert (stopped.last_step, stopped.checkpoint.name) == (1, "step_1")
    assert (result.last_step, result.checkpoint.name) == (2, "step_2")
    assert result.run_folder == stopped.run_folder


def test_metrics_have_one_record_per_step_and_agree_with_the_run_folder(grpo):
    trainer, _, _, result = grpo
    assert [record["step"] for record in trainer.metrics] == [0, 1, 2]
    lines = [json.loads(line) for line in (trainer.run_folder / "metrics.jsonl").read_text().splitlines()]
    rewards = {line["step"]: line["train/reward"] for line in lines if "train/reward" in line}
    assert {record["step"]: record["reward"] for record in trainer.metrics[1:]} == rewards
    assert result.metrics["reward"] == rewards[2]
    assert result.metrics["validation/accuracy"] == trainer.metrics[2]["validation/accuracy"]


def test_a_complete_run_is_not_trained_again(grpo):
    with pytest.raises(
        ConfigError, match=r"complete, with 2 steps; to train more steps, call GRPOTrainer\(\.\.\., max_steps=4\)"
    ):
        grpo[0].train()


def test_the_settings_are_those_of_the_command_line(grpo):
    trainer, *_ = grpo
    same = [
        "policy.model_name=embedded",
        *("env.name=arithmetic", "env.kwargs.max_operand=9", "validation.num_prompts=2", "num_threads=1"),
        *("collector.prompts_per_step=2", "collector.samples_per_prompt=2"),
        *("tracking.tensorboard=false", "tracking.monitor=false"),
        *("policy.optimizer.kwargs.lr=1e-3", "grpo.max_steps=2", f"run.root={trainer.config.run.root}"),
    ]
    assert new_settings("grpo", overrides=same) == trainer.config
    assert resumed_settings("grpo", trainer.run_folder) == trainer.config


def test_a_saved_model_loads_in_plain_transformers_and_replaces_an_earlier_one(grpo, tmp_path):
    trainer, *_, result = grpo
    for _ in range(2):
        trainer.save(tmp_path / "models" / "out")
    trained = load_file(result.checkpoint / "policy" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "out", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "models" / "out")
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in trained.items())
    assert tokenizer.decode(tokenizer("1+2=").input_ids, skip_special_tokens=True).strip() == "1+2="
    assert os.listdir(tmp_path / "models") == ["out"]


def test_a_model_never_replaces_other_files(grpo, tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="exists and is not a model folder; choose a new or empty folder"):
        grpo[0].save(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.slow
def test_a_trainer_completes_prompts(grpo):
    trainer, *_ = grpo
    assert len(trainer.generate(["1+1=", "2+2="], samples=2, max_new_tokens=4)) == 4
    assert trainer.generate("1+1=", max_new_tokens=4) == trainer.generate(["1+1="], max_new_tokens=4)


@pytest.mark.parametrize("method", ["save", "generate"])
def test_an_untrained_trainer_has_nothing_to_save_or_to_generate_with(method):
    with pytest.raises(ConfigError, match=rf"call train\(\) before {method}\(\)"):
        getattr(GRPOTrainer("embedded"), method)("x")


def test_ctrl_c_finishes_the_step_saves_and_returns(tmp_path):
    result = ppo(tmp_path, Recorder({2: press_ctrl_c})).train()
    assert (result.last_step, result.checkpoint.name) == (2, "step_2")


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        ppo(tmp_path, Recorder({2: lambda: [press_ctrl_c(), press_ctrl_c()]})).train()


@pytest.mark.slow
def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path):
    whole = ppo(tmp_path, run_name="whole").train()
    cut = ppo(tmp_path, Recorder({1: stop}), run_name="cut").train()
    resumed = ppo(tmp_path, run_name="cut").train(resume=True)
    assert (cut.last_step, resumed.last_step) == (1, 3)
    ends = [load_file(result.checkpoint / "policy" / "model.safetensors") for result in (whole, resumed)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    longer = ppo(tmp_path, max_steps=4, config=None).train(resume=resumed.run_folder)
    assert longer.last_step == 4
    assert longer.run_folder == resumed.run_folder


def test_resume_true_needs_the_name_of_a_run(tmp_path):
    with pytest.raises(ConfigError, match="set run_name, or pass the folder"):
        ppo(tmp_path).train(resume=True)
    with pytest.raises(ConfigError, match="is not a run folder"):
        ppo(tmp_path, run_name="none").train(resume=True)


def test_a_failing_callback_stops_the_run_by_its_name(tmp_path):
    trainer = ppo(tmp_path, Recorder({2: lambda: 1 / 0}), config=PPO | {"checkpoint": {"every": 1}})
    with pytest.raises(TrainingError, match=r"callback Recorder.on_step raised ZeroDivisionError") as failure:
        trainer.train()
    assert isinstance(failure.value.__cause__, ZeroDivisionError)
    assert [path.name for path in (trainer.run_folder / "checkpoints").iterdir()] == ["step_1"]


@pytest.mark.parametrize(
    ("callback", "remedy"), [(Recorder, r"pass an instance: Recorder\(\)"), (print, "subclass lucidrl.Callback")]
)
def test_only_callbacks_are_accepted_as_callbacks(callback, remedy):
    with pytest.raises(ConfigError, match=remedy):
        PPOTrainer(callbacks=[callback])


def test_without_a_display_nothing_is_printed_but_logged(tmp_path, capfd, caplog):
    with caplog.at_level(logging.INFO, logger="lucidrl"):
        ppo(tmp_path).train()
    assert capfd.readouterr() == ("", "")
    assert "saved step 3" in caplog.messages


@pytest.mark.slow
def test_a_program_keeps_its_threads_signals_and_logging(tmp_path):
    def state():
        signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        return signals, torch.get_num_threads(), list(logging.getLogger().handlers), logging.getLogger().level

    torch.set_num_threads(2)
    try:
        before = state()
        ppo(tmp_path, display=True).train()
        assert state() == before
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow
def test_it_trains_in_a_thread_and_where_an_event_loop_runs(tmp_path):
    async def cell() -> int:  # as Jupyter runs the code of a cell
        return GRPOTrainer("embedded", config=GRPO, max_steps=1, output=tmp_path, display=False).train().last_step

    steps = [asyncio.run(cell())]
    thread = threading.Thread(target=lambda: steps.append(ppo(tmp_path).train().last_step))
    thread.start()
    thread.join(60)
    assert steps == [1, 3]


def test_arguments_win_over_config_and_config_over_the_preset(tmp_path):
    assert new_settings("grpo", preset="demo").seed == 1
    config = {"seed": 5, "grpo": {"max_steps": 7, "loss": {"kl_coefficient": 0.5}}}
    found = GRPOTrainer(preset="demo", config=config, max_steps=9, output=tmp_path, run_name="mine").config
    assert (found.seed, found.max_steps, found.grpo.loss.kl_coefficient) == (5, 9, 0.5)
    assert found.collector.prompts_per_step == 64  # of the preset
    assert (found.run.root, found.run.name) == (tmp_path, "mine")


def test_a_file_or_a_config_object_is_a_whole_and_a_mapping_changes_single_settings(tmp_path):
    whole = GRPORunConfig(grpo=GRPOConfig(max_steps=7))
    (tmp_path / "mine.yaml").write_text(dump_yaml(whole))
    for config in (whole, tmp_path / "mine.yaml", str(tmp_path / "mine.yaml")):
        assert GRPOTrainer(config=config).config == whole
        assert GRPOTrainer(config=config, seed=3).config == whole.model_copy(update={"seed": 3})
    assert GRPOTrainer(config={"grpo": {"max_steps": 7}}).config == new_settings("grpo", overrides=["grpo.max_steps=7"])
    assert GRPOTrainer(config=whole, preset="demo").config == new_settings(
        "grpo", preset="demo", overrides=["grpo.max_steps=7"]
    )


def test_a_secret_of_a_config_object_stays_a_reference(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hunter2hunter2")
    secret = ["env.kwargs={api_key: '${oc.env:MY_TOKEN}'}", f"run.root={tmp_path}"]
    for config in (new_settings("grpo", overrides=secret), {"env": {"kwargs": {"api_key": "${oc.env:MY_TOKEN}"}}}):
        found = GRPOTrainer(config=config).config
        assert found.env.kwargs["api_key"] == "hunter2hunter2"
        assert "hunter2" not in found.to_yaml()


def test_both_networks_of_ppo_get_the_learning_rate():
    config = PPOTrainer(learning_rate=3e-5, seed=2).config
    assert config.policy.optimizer.kwargs["lr"] == config.critic.optimizer.kwargs["lr"] == 3e-5
    assert config.env.name == "CartPole-v1"
    assert config.collector == new_settings("ppo").collector


def test_values_arrive_as_they_are():
    values = [
        "plain",
        "1e5",
        "true",
        "3:5",
        "a: b",
        "*x",
        "",
        " é 😀 \u2028 \x7f\n",
        "\\n",
        [1e-06, None],
        {"a.b": [{}]},
    ]
    kwargs = {f"value_{number}": value for number, value in enumerate(values)}
    assert GRPOTrainer(config={"env": {"name": "mine", "kwargs": kwargs}}).config.env.kwargs == kwargs


@pytest.mark.parametrize(
    ("trainer", "name", "meant"),
    [
        (GRPOTrainer, "lr", "learning_rate?"),
        (GRPOTrainer, "reward_funcs", "rewards?"),
        (GRPOTrainer, "train_dataset", "dataset?"),
        (GRPOTrainer, "max_step", "max_steps?"),
        (GRPOTrainer, "samples_per_prompt", "config={'collector': {'samples_per_prompt': ...}}?"),
        (SFTTrainer, "completions", "completion?"),
        (PPOTrainer, "envs", "env?"),
        (PPOTrainer, "gae_lambda", "config={'ppo': {'gae_lambda': ...}}?"),
        (PPOTrainer, "zzz", "its arguments are seed"),
    ],
)
def test_a_wrong_argument_suggests_the_right_one(trainer, name, meant):
    with pytest.raises(ConfigError) as refused:
        trainer(**{name: 1})
    assert f"{trainer.__name__} has no argument {name}; " in str(refused.value)
    assert meant in str(refused.value)


def test_wrong_values_are_refused_as_on_the_command_line_all_at_once():
    with pytest.raises(ConfigError) as refused:
        GRPOTrainer("embedded", max_steps=0, config={"colector": {}, "seed": "x"})
    with pytest.raises(ConfigError) as on_command_line:
        new_settings("grpo", overrides=["colector={}", "seed=x", "policy.model_name=embedded", "grpo.max_steps=0"])
    assert str(refused.value) == str(on_command_line.value)
    assert str(refused.value).count("\n") == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"model": torch.nn.Linear(1, 1)}, "is a Linear; pass a string"),
        ({"config": 3}, "config is a int; pass a mapping, a GRPORunConfig or the path"),
        ({"config": PPORunConfig()}, "config is a PPORunConfig; pass a GRPORunConfig"),
        ({"config": {"env": {"name": Recorder}}}, "config: env.name=.* is a type; pass a string"),
        ({"config": "none.yaml"}, "config file none.yaml does not exist"),
        ({"preset": "demmo"}, "there is no preset 'demmo'"),
        ({"rewards": 3}, "rewards has 3; pass functions"),
        ({"rewards": [exact, None]}, "rewards has None"),
        ({"dataset": []}, "dataset is empty"),
        ({"dataset": ["1+1="]}, "the first row of dataset is a str; pass dictionaries"),
        ({"dataset": {"train": ROWS}}, "dataset is a dict, not a sequence of rows; .* one of its keys: 'train'"),
        ({"dataset": (row for row in ROWS)}, "dataset is a generator, which has no length or no index; pass list"),
        ({"validation_dataset": iter(ROWS)}, "validation_dataset is a list_iterator"),
    ],
)
def test_objects_of_the_wrong_kind_are_refused(arguments, complaint):
    with pytest.raises((ConfigError, DataError), match=complaint):
        GRPOTrainer(**arguments)


@pytest.mark.slow
def test_the_settings_say_what_python_passed_and_the_command_line_refuses_to_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = GRPOTrainer(
        "embedded", exact, collections.deque(ROWS), validation_dataset=ROWS[:2], run_name="mine"
    ).config
    assert config.python_inputs == {"dataset": "36 rows", "validation_dataset": "2 rows", "rewards": "exact"}
    folder = create_run_folder(config)
    for arguments in (["--resume", str(folder)], ["--config", str(folder / "config.yaml"), "run.name=other"]):
        refused = CliRunner().invoke(app, ["grpo", *arguments]).exception
        assert isinstance(refused, ConfigError)
        assert "objects of a Python program (dataset: 36 rows; validation_dataset: 2 rows; rewards: exact)" in str(
            refused
        )
        assert "GRPOTrainer(..., dataset=..., validation_dataset=..., rewards=...).train(" in str(refused)
    with pytest.raises(ConfigError, match="objects of a Python program"):
        GRPOTrainer("embedded", exact, ROWS).train(resume=folder)
    plain = create_run_folder(GRPOTrainer("embedded", run_name="plain").config)
    with pytest.raises(ConfigError, match="has its own dataset and rewards"):
        GRPOTrainer("embedded", exact, ROWS).train(resume=plain)


def test_importing_the_package_and_a_trainer_loads_nothing_heavy():
    code = (
        "import sys, time; start = time.perf_counter(); import lucidrl; seconds = time.perf_counter() - start\n"
        "from lucidrl import GRPOTrainer, SFTTrainer, PPOTrainer\n"
        "print(seconds < 0.3, [name for name in ('torch', 'numpy', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "True []"
    assert all(getattr(lucidrl, name) is not None for name in lucidrl.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'ORPOTrainer'"):
        _ = lucidrl.ORPOTrainer


@pytest.mark.slow
def test_sft_reads_a_file(tmp_path):
    lines = [json.dumps({"prompt": row["question"], "completion": row["answer"]}) for row in ROWS]
    (tmp_path / "examples.jsonl").write_text("\n".join(lines))
    config = QUIET | {"sft": {"examples_per_step": 4}, "validation": {"num_prompts": 2}}
    trainer = SFTTrainer(
        "embedded", tmp_path / "examples.jsonl", config=config, output=tmp_path, display=False, max_steps=1
    )
    assert trainer.train().metrics["nll"] > 0
    assert trainer.config.python_inputs == {}


@pytest.mark.slow
def test_rows_and_functions_train_and_resume(tmp_path):
    config = QUIET | {"collector": {"prompts_per_step": 2, "samples_per_prompt": 2}, "validation": {"num_prompts": 2}}
    options = {"prompt": "question", "config": config, "max_steps": 2, "output": tmp_path, "display": False}
    whole = GRPOTrainer("embedded", [exact], ROWS, **options).train()
    cut = GRPOTrainer("embedded", [exact], ROWS, callbacks=[Recorder({1: stop})], **options).train()
    resumed = GRPOTrainer("embedded", [exact], ROWS, **options).train(resume=cut.run_folder)
    ends = [load_file(result.checkpoint / "policy" / "model.safetensors") for result in (whole, resumed)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    samples = (whole.run_folder / "samples" / "validation_0.jsonl").read_text().splitlines()
    assert {json.loads(line)["messages"][0]["content"] for line in samples} <= {row["question"] for row in ROWS}


@pytest.mark.slow
def test_a_datasets_dataset_and_a_parquet_file_are_the_same_rows(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(tmp_path / "train.parquet")
    config = QUIET | {"collector": {"prompts_per_step": 2, "samples_per_prompt": 2}, "validation": {"num_prompts": 0}}
    options = {"prompt": "question", "config": config, "max_steps": 1, "output": tmp_path, "display": False}
    results = [GRPOTrainer("embedded", exact, data, **options).train() for data in (table, tmp_path / "train.parquet")]
    ends = [load_file(result.checkpoint / "policy" / "model.safetensors") for result in results]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.slow
def test_functions_and_names_are_added_up(tmp_path):
    def long_enough(completion: str, **row: object) -> float:
        return float(len(completion) > 1)

    config = QUIET | {"collector": {"prompts_per_step": 2, "samples_per_prompt": 2}, "validation": {"num_prompts": 2}}
    options = {"prompt": "question", "config": config, "max_steps": 1, "output": tmp_path, "display": False}
    trainer = GRPOTrainer("embedded", [long_enough, "exact"], ROWS, **options)
    assert trainer.config.python_inputs["rewards"] == "long_enough"
    metrics = trainer.train().metrics
    assert sum("long_enough" in name for name in metrics) >= 1
    assert sum("exact" in name for name in metrics) >= 1


@pytest.mark.slow
def test_sft_trains_on_rows(tmp_path):
    config = QUIET | {"sft": {"examples_per_step": 4}, "validation": {"num_prompts": 2}}
    columns = {"prompt": "question", "completion": "answer"}
    options = {"config": config, "max_steps": 1, "output": tmp_path, "display": False}
    assert SFTTrainer("embedded", ROWS, **columns, **options).train().metrics["nll"] > 0


PAIRS = [{"q": f"{n}+1=", "good": str(n + 1), "bad": f"{n + 1}, dear"} for n in range(10, 40)]
PAIR_COLUMNS = {"prompt": "q", "chosen": "good", "rejected": "bad"}


@pytest.mark.slow
def test_preferences_train_from_rows_and_a_resumed_run_continues(tmp_path):
    config = QUIET | {"dpo": {"examples_per_step": 4}, "data": {"validation_fraction": 0.3}}
    options = {"config": config, "output": tmp_path, "display": False, "learning_rate": 1e-3, "beta": 0.2}
    trainer = DPOTrainer("embedded", PAIRS, **PAIR_COLUMNS, **options, max_steps=1, reference="cached")
    first = trainer.train()
    assert trainer.config.dpo.beta == 0.2
    again = DPOTrainer("embedded", PAIRS, **PAIR_COLUMNS, **options, max_steps=2)
    result = again.train(resume=first.run_folder)
    assert result.last_step == 2
    assert result.metrics["loss"] < first.metrics["loss"]
    assert len(again.generate("10+1=")) == 1
    report = CliRunner().invoke(app, ["eval", str(first.run_folder)])
    assert "learned from preferences, so nothing says how its completions are scored" in str(report.exception)


@pytest.mark.slow
def test_a_reward_model_trains_from_rows_and_is_saved_for_transformers(tmp_path):
    config = QUIET | {"reward_model": {"examples_per_step": 4}, "data": {"validation_fraction": 0.3}}
    trainer = RewardModelTrainer(
        "embedded", PAIRS, **PAIR_COLUMNS, config=config, output=tmp_path, display=False, max_steps=1
    )
    assert trainer.train().metrics["loss"] > 0
    trainer.save(tmp_path / "saved")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").config.num_labels == 1


@pytest.mark.slow
def test_a_missing_column_and_a_failing_function_are_one_sentence(tmp_path):
    def broken(completion: str, **row: object) -> float:
        raise KeyError("solution")

    config = QUIET | {"collector": {"prompts_per_step": 2, "samples_per_prompt": 2}, "validation": {"num_prompts": 0}}
    options = {"config": config, "max_steps": 1, "output": tmp_path, "display": False}
    with pytest.raises(LucidError, match="problem"):
        GRPOTrainer("embedded", exact, ROWS, prompt="problem", **options).train()
    with pytest.raises(LucidError, match="broken"):
        GRPOTrainer("embedded", broken, ROWS, prompt="question", **options).train()
