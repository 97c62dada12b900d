"""`reward` in the settings of a run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from lucidrl.distributed.workers.process import num_cores
from lucidrl.errors import ConfigError
from lucidrl.recipes.configs import GRPORunConfig
from lucidrl.recipes.inputs import PythonInputs
from lucidrl.recipes.run import train
from lucidrl.recipes.settings import new_settings
from lucidrl.recipes.text_inputs import TextInputs
from lucidrl.rewards.config import REWARD_ENV, RewardConfig, rewards_of, seconds_per_sample
from lucidrl.rewards.interfaces import SampleTime
from lucidrl.utils.config import load_config, merged_settings
from tests.unit.algorithms.conftest import Watcher


def test_a_name_a_mapping_and_a_list_mean_the_same():
    expected = (RewardConfig(name="math"),)
    for settings in ("math", {"name": "math"}, ["math"], [{"name": "math"}], expected):
        assert rewards_of(settings) == expected
    assert rewards_of(None) == ()


def test_a_run_with_reward_uses_its_environment_and_says_so():
    config = load_config(GRPORunConfig, {}, overrides=["reward=my_rewards:exact", "data.file=p.jsonl"])
    assert config.env.name == REWARD_ENV
    assert config.env.is_isolated
    assert config.title == "embedded on p.jsonl with reward my_rewards:exact"


def test_settings_of_a_reward_come_back_from_yaml(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN_OF_TEST", "s3cret")
    settings = ["reward={name: 'my:grader', weight: 0.5, kwargs: {token: '${oc.env:TOKEN_OF_TEST}'}}"]
    config = new_settings("grpo", overrides=settings)
    assert config.reward[0].kwargs == {"token": "s3cret"}
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert "s3cret" not in config.to_yaml()
    assert load_config(GRPORunConfig, tmp_path / "config.yaml").model_dump() == config.model_dump()
    changed = load_config(GRPORunConfig, tmp_path / "config.yaml", overrides=["reward=math"])
    assert changed.reward == (RewardConfig(name="math"),)


def test_reward_starts_from_no_preset_and_replaces_the_environment_of_one():
    plain = new_settings("grpo", overrides=["reward=math"])
    assert plain.policy.generation.max_new_tokens == GRPORunConfig().policy.generation.max_new_tokens
    chat = new_settings("grpo", preset="chat", overrides=["reward=math"])
    assert (chat.env.name, chat.env.kwargs, chat.policy.precision) == (REWARD_ENV, {}, "bfloat16")
    assert merged_settings({"env": {"name": "a", "timeout_s": 3}}, {"reward": "math"})["env"] == {"timeout_s": 3}


def test_a_name_on_the_command_line_can_be_extended():
    config = new_settings("grpo", overrides=["reward=regex", "reward.kwargs.pattern=a+", "reward.weight=2"])
    assert config.reward == (RewardConfig(name="regex", weight=2, kwargs={"pattern": "a+"}),)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["reward=math", "env.name=arithmetic"], "reward and env.name=arithmetic are both set"),
        (["reward=math", "env.kwargs.match=exact"], "has no effect in a run with reward; set reward.kwargs"),
        (["reward={name: math, weigth: 2}"], "unknown key reward.0.weigth; did you mean reward.0.weight?"),
        (["reward={name: math, on_timeout: ignore}"], "reward.0.on_timeout"),
        (["reward={name: math, on_crash: .nan}"], "reward.0.on_crash"),
        (
            ["reward={name: 'my:exact', timeout_s: 2}"],
            "is a function, so timeout_s=2.0 would have no effect",
        ),
        (
            ["reward={name: numeric, timeout_s: 2, memory_limit_mb: 64, num_workers: 3, on_timeout: fail}"],
            "verifier numeric runs in the environment's process, so memory_limit_mb=64, num_workers=3, "
            "on_timeout=fail, timeout_s=2.0 would have no effect, as only verifiers in a pool use it; remove it",
        ),
        (
            ["reward={name: code, kwargs: {timeout_s: 2}}"],
            "kwargs.timeout_s=2 is not an option of verifier code, but timeout_s is a setting of the reward; set it",
        ),
        (["reward.weight=2"], "reward.0.name is required but not set"),
        (["reward=5"], "reward=5 is not valid"),
    ],
)
def test_wrong_settings_are_refused(overrides, complaint):
    with pytest.raises(ConfigError) as refused:
        new_settings("grpo", overrides=overrides)
    assert complaint in str(refused.value)


def test_the_timeout_of_a_step_leaves_room_for_the_timeouts_of_all_verifiers():
    assert seconds_per_sample(rewards_of(["my:exact"])) == []
    (of_math,) = seconds_per_sample(rewards_of(["my:exact", {"name": "math", "timeout_s": 2, "num_workers": 4}]))
    assert of_math == SampleTime(3, num_at_once=4)
    assert [of_math.of(num_samples) for num_samples in (1, 4, 5, 256)] == [6, 6, 9, 195]
    assert seconds_per_sample(rewards_of("math")) == [SampleTime(6, num_cores())]


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) + "\n" for n in range(30)))
    return path


def new_inputs(overrides: list[str], *rewards) -> TextInputs:
    return TextInputs(load_config(GRPORunConfig, {}, overrides=overrides), PythonInputs(rewards=rewards))


def test_functions_of_a_program_score_in_the_driver(prompts_file):
    inputs = new_inputs([f"data.file={prompts_file}"], lambda completion, answer: 1.0)
    inputs.check_rewards()
    wrong = new_inputs([f"data.file={prompts_file}"], lambda completion, solution: 1.0)
    with pytest.raises(ConfigError, match="the parameter solution, but the columns are answer"):
        wrong.check_rewards()
    for each in (inputs, wrong):
        each.close()


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("env.num_workers=2", "env.num_workers=2 needs reward functions by name"),
        ("env.isolation=process", "env.isolation=process needs reward functions by name"),
        ("env.kwargs={max_operand: 9}", "env.kwargs={'max_operand': 9} would have no effect"),
        ("env.name=my:Env", "one source of rewards"),
        ("env.name=guessing", "one source of rewards"),
    ],
)
def test_functions_of_a_program_need_the_driver(prompts_file, override, complaint):
    inputs = new_inputs([f"data.file={prompts_file}", override], lambda completion: 1.0)
    with pytest.raises(ConfigError, match=complaint):
        inputs.check_rewards()


def test_rewards_without_data_are_refused_in_one_sentence():
    inputs = new_inputs([], lambda completion: 1.0)
    with pytest.raises(ConfigError, match="scores completions of your prompts, but the run has no prompts"):
        inputs.check_rewards()
    inputs.close()


@pytest.mark.slow
def test_columns_are_checked_in_the_worker_process(prompts_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user_rewards.py").write_text("def exact(completion, solution): return 1.0\n")
    inputs = new_inputs([f"data.file={prompts_file}", "reward=user_rewards:exact"])
    with pytest.raises(ConfigError) as refused:
        inputs.check_rewards()
    assert str(refused.value).startswith("reward exact has the parameter solution, but the columns are answer")
    inputs.close()


@pytest.mark.slow
def test_the_example_of_the_page_runs_as_written(tmp_path, monkeypatch):
    text = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
    blocks = {language: re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S) for language in ("python", "json")}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text("\n".join(blocks["python"]))
    (tmp_path / "rows.jsonl").write_text(blocks["json"][0])
    (command,) = re.findall(r"^lucidrl grpo (reward=my_rewards:exact .*)$", text, re.M)
    both = 'reward=[my_rewards:exact, {name: "my_rewards:shortest", weight: 0.1}, my_rewards:starts_well]'
    few = ["grpo.max_steps=1", "collector.prompts_per_step=2", "policy.generation.max_new_tokens=4"]
    config = new_settings("grpo", overrides=[*shlex.split(command), both, *few])
    (tmp_path / "run").mkdir()
    assert train(config, tmp_path / "run", Watcher()) == 1
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    names = {f"train/reward{part}" for part in ("", "/exact", "/shortest", "/starts_well", "/exact/not_applicable")}
    assert names <= metrics.keys()
