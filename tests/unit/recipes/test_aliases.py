"""Names of other libraries are understood where they have one meaning, and explained where they have several."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lucidrl.errors import ConfigError
from lucidrl.models.policy.config import SchedulerConfig
from lucidrl.recipes.aliases import ALIASES, CANDIDATES
from lucidrl.recipes.configs import GRPORunConfig, PPORunConfig, SFTRunConfig
from lucidrl.recipes.settings import ALGORITHMS, default_preset, new_settings, resumed_settings
from lucidrl.utils.config import aliases_of, load_config
from lucidrl.utils.layers import Source


def value_at(config, key):
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("lr=3e-5", "policy.optimizer.kwargs.lr", 3e-5),
        ("learning_rate=3e-5", "policy.optimizer.kwargs.lr", 3e-5),
        ("weight_decay=0.1", "policy.optimizer.kwargs.weight_decay", 0.1),
        ("beta=0.04", "grpo.loss.kl_coefficient", 0.04),
        ("temperature=0.7", "policy.generation.temperature", 0.7),
        ("num_generations=16", "collector.samples_per_prompt", 16),
        ("max_tokens=99", "policy.generation.max_new_tokens", 99),
        ("max_new_tokens=99", "policy.generation.max_new_tokens", 99),
        ("max_steps=7", "grpo.max_steps", 7),
        ("model=embedded-untrained", "policy.model_name", "embedded-untrained"),
        ("epsilon=0.3", "grpo.loss.clip_low", 0.3),
        ("epsilon=0.3", "grpo.loss.clip_high", 0.3),
        ("num_iterations=2", "grpo.num_epochs", 2),
        ("scheduler=cosine", "policy.scheduler", (SchedulerConfig(name="cosine"),)),
    ],
)
def test_an_alias_sets_its_setting_on_the_command_line_and_in_a_file(tmp_path, override, key, value):
    assert value_at(new_settings("grpo", overrides=[override]), key) == value
    name, _, text = override.partition("=")
    (tmp_path / "mine.yaml").write_text(f"{name}: {text.replace('3e-5', '3.0e-5')}\n")
    assert value_at(new_settings("grpo", tmp_path / "mine.yaml"), key) == value


def test_an_alias_sets_policy_and_critic_unless_one_is_set_by_itself():
    both = new_settings("ppo", overrides=["lr=0.01"])
    assert both.policy.optimizer.kwargs["lr"] == both.critic.optimizer.kwargs["lr"] == 0.01
    one = new_settings("ppo", overrides=["lr=0.01", "critic.optimizer.kwargs.lr=0.02"])
    assert (one.policy.optimizer.kwargs["lr"], one.critic.optimizer.kwargs["lr"]) == (0.01, 0.02)
    high = new_settings("grpo", overrides=["epsilon=0.2", "epsilon_high=0.28"]).grpo.loss
    assert (high.clip_low, high.clip_high) == (0.2, 0.28)


def test_later_layers_win_by_either_name(tmp_path):
    (tmp_path / "mine.yaml").write_text("lr: 0.5\npolicy: {generation: {temperature: 2}}\n")
    config = new_settings(
        "grpo", tmp_path / "mine.yaml", overrides=["policy.optimizer.kwargs.lr=0.25", "temperature=3"]
    )
    assert (config.policy.optimizer.kwargs["lr"], config.policy.generation.temperature) == (0.25, 3)


@pytest.mark.parametrize(
    "overrides",
    [["lr=1", "policy.optimizer.kwargs.lr=2"], ["lr=1", "learning_rate=2"], ["max_tokens=1", "max_new_tokens=1"]],
)
def test_a_setting_that_is_set_twice_at_once_is_refused(overrides):
    with pytest.raises(ConfigError, match="are the same setting, and the command line sets both; remove one"):
        new_settings("grpo", overrides=overrides)


@pytest.mark.parametrize(
    ("schema", "override", "said"),
    [
        (
            GRPORunConfig,
            "batch_size=8",
            [
                "collector.prompts_per_step (prompts per step)",
                "policy.train_global_batch_size (rows per optimizer step)",
                "policy.train_micro_batch_size (rows per micro-batch",
            ],
        ),
        (SFTRunConfig, "batch_size=8", ["sft.examples_per_step (examples per step)", "policy.train_global_batch_size"]),
        (PPORunConfig, "batch_size=8", ["collector.frames_per_batch", "ppo.minibatch_frames"]),
        (GRPORunConfig, "epochs=3", ["grpo.num_epochs (optimizer epochs per batch)", "grpo.max_steps"]),
        (GRPORunConfig, "grpo.beta=1", ["did you mean grpo.loss.kl_coefficient?"]),
        (GRPORunConfig, "policy.lr=1", ["did you mean policy.optimizer.kwargs.lr?"]),
        (GRPORunConfig, "collector.num_generations=1", ["did you mean collector.samples_per_prompt?"]),
        (PPORunConfig, "critic.learning_rate=1", ["did you mean critic.optimizer.kwargs.lr?"]),
        (GRPORunConfig, "output_dir=x", ["run.root (parent folder of all runs)", "run.name"]),
        (GRPORunConfig, "bf16=true", ["policy.precision"]),
        (GRPORunConfig, "report_to=wandb", ["tracking.wandb.enabled"]),
    ],
)
def test_another_name_is_answered_with_the_settings_it_may_mean(schema, override, said):
    with pytest.raises(ConfigError) as caught:
        load_config(schema, overrides=[override])
    message = str(caught.value)
    assert message.startswith(f"unknown key {override.partition('=')[0]};")
    assert all(part in message for part in said), message
    assert "\n" not in message


def test_every_alias_belongs_to_a_setting_and_is_not_one_itself():
    usable = {alias for schema in ALGORITHMS.values() for alias in aliases_of(schema)}
    assert usable == ALIASES.keys()
    for schema in ALGORITHMS.values():
        assert not schema.model_fields.keys() & (ALIASES.keys() | CANDIDATES.keys())


def test_the_page_lists_every_alias():
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")
    table = page.partition("## Aliases")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == ALIASES.keys()


@pytest.mark.parametrize(
    ("algorithm", "overrides", "preset"),
    [
        ("grpo", [], "demo"),
        ("grpo", ["model=/models/x"], "chat"),
        ("grpo", ["env.kwargs.max_operand=9"], "demo"),
        ("grpo", ["policy.model_name=/models/x", "env.name=my:Env"], "task"),
        ("grpo", ["policy.model_name=/models/x", "env.name=guessing"], "task"),
        ("grpo", ["policy.model_name=/models/x", "env.prompts_file=mine.jsonl"], "task"),
        ("grpo", ["env.name=my:Env"], "task-embedded"),
        ("distill", [], "distill-demo"),
        ("distill", ["policy.model_name=/models/x"], "distill"),
        ("distill", ["env.name=my:Env"], "distill"),
        ("sft", [], None),
        ("dpo", [], "dpo-demo"),
        ("dpo", ["data.file=pairs.jsonl"], "dpo"),
        ("reward-model", [], "reward-model-demo"),
        ("reward-model", ["policy.model_name=/models/x"], "reward-model"),
        ("ppo", [], "cartpole"),
        ("ppo", ["env.name=Acrobot-v1"], None),
    ],
)
def test_a_preset_applies_to_its_task_only(algorithm, overrides, preset):
    config = new_settings(algorithm, overrides=overrides)
    found = {source.name for source in config.origins.values() if source.kind == "preset"}
    assert found == ({preset} if preset else set())


@pytest.mark.parametrize("model", ["embedded", "/models/x"])
def test_an_own_environment_does_not_inherit_the_token_limit_of_the_demo(model):
    limits = [
        new_settings("grpo", overrides=[f"policy.model_name={model}", *own]).policy.generation.max_new_tokens
        for own in ([], ["env.name=my:Env"], ["env.prompts_file=mine.jsonl"])
    ]
    assert limits[0] <= 16
    assert min(limits[1:]) >= 64


def test_rows_and_rewards_of_a_python_program_are_an_own_task():
    model = {"policy.model_name": "/models/x"}
    assert default_preset("grpo", model) == "chat"
    for key in ("python_inputs", "data.file", "reward", "reward.name"):
        assert default_preset("grpo", {**model, key: "x"}) == "task"


def test_every_setting_knows_its_source(tmp_path):
    (tmp_path / "mine.yaml").write_text("grpo: {max_steps: 9}\nbeta: 0.1\n")
    config = new_settings("grpo", tmp_path / "mine.yaml", "demo", ["lr=0.5", "seed=3"])
    assert config.origins.of("policy.optimizer.kwargs.lr") == Source("command line", alias="lr")
    assert str(config.origins.of("policy.optimizer.kwargs.lr")) == "command line (as lr)"
    assert config.origins.of("seed") == Source("command line")
    assert str(config.origins.of("grpo.loss.kl_coefficient")) == f"file {tmp_path / 'mine.yaml'} (as beta)"
    assert str(config.origins.of("grpo.max_steps")) == f"file {tmp_path / 'mine.yaml'}"
    assert str(config.origins.of("policy.optimizer.kwargs.betas")) == "preset demo"
    assert config.origins.of("policy.precision") is None
    assert config == new_settings("grpo", tmp_path / "mine.yaml", "demo", ["learning_rate=0.5", "seed=3"])


def test_arguments_that_a_new_name_dropped_have_no_source():
    config = new_settings("grpo", preset="demo", overrides=["env.name=guessing"])
    assert not [key for key in config.origins if key.startswith("env.kwargs")]
    assert str(config.origins.of("env.name")) == "command line"


def test_a_resumed_run_knows_what_the_command_line_changed(tmp_path):
    (tmp_path / "config.yaml").write_text(new_settings("grpo").to_yaml())
    config = resumed_settings("grpo", tmp_path, ["max_steps=600"])
    assert config.grpo.max_steps == 600
    assert str(config.origins.of("grpo.max_steps")) == "command line (as max_steps)"
    assert str(config.origins.of("seed")) == f"run {tmp_path}"
