"""Settings: they come together from layers, survive the trip through YAML, and are refused with a way out."""

from __future__ import annotations

import pytest

import lucidrl.envs.text.registry
from lucidrl.errors import ConfigError
from lucidrl.recipes.configs import DistillRunConfig, GRPORunConfig, PPORunConfig, SFTRunConfig
from lucidrl.recipes.preference_configs import DPORunConfig, RewardModelRunConfig
from lucidrl.recipes.settings import PRESETS, new_settings, preset_path
from lucidrl.utils.config import Config, dump_yaml, load_config

SCHEMAS = {
    "calculator-warm-start": SFTRunConfig,
    "distill": DistillRunConfig,
    "distill-demo": DistillRunConfig,
    "dpo": DPORunConfig,
    "dpo-demo": DPORunConfig,
    "reward-model": RewardModelRunConfig,
    "reward-model-demo": RewardModelRunConfig,
    "embedded-warm-start": SFTRunConfig,
    "word-problems-sft": SFTRunConfig,
    "cartpole": PPORunConfig,
    "pendulum": PPORunConfig,
}
"""Of presets that are not for GRPO."""


def all_config_classes(base: type[Config] = Config) -> set[type[Config]]:
    assert lucidrl.envs.text.registry.ENVS, "its import defines the environments' configs"
    return {base}.union(*(all_config_classes(child) for child in base.__subclasses__()))


def refusal(*overrides: str, schema: type[Config] = GRPORunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(schema, overrides=overrides)
    return str(caught.value)


def test_every_field_of_every_config_is_explained():
    classes = {cls for cls in all_config_classes() if cls.__module__.startswith("lucidrl.")}
    assert len(classes) > 15
    unexplained = [
        f"{cls.__name__}.{name}"
        for cls in classes
        for name, field in cls.model_fields.items()
        if not (field.description or "").strip()
    ]
    assert unexplained == []


@pytest.mark.parametrize("preset", [None, *(path.stem for path in PRESETS.glob("*.yaml"))])
def test_a_config_survives_the_trip_through_yaml(preset, tmp_path):
    schema = SCHEMAS.get(preset, GRPORunConfig)
    config = load_config(schema, *([preset_path(preset)] if preset else []))
    (tmp_path / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
    assert load_config(schema, tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    "text", ["no", "1e-4", "null", "", "a: b", "[x]", "two\nlines", "é 日本", "#1", "'", '"', " x "]
)
def test_awkward_text_survives_the_trip_through_yaml(text, tmp_path):
    config = load_config(GRPORunConfig, {"run": {"name": text}, "env": {"kwargs": {"template": text}}})
    (tmp_path / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
    assert load_config(GRPORunConfig, tmp_path / "config.yaml") == config


def test_later_layers_win_and_overrides_win_over_all(tmp_path):
    (tmp_path / "mine.yaml").write_text("grpo: {max_steps: 7}\nseed: 3\n")
    config = load_config(GRPORunConfig, preset_path("demo"), tmp_path / "mine.yaml", overrides=["seed=4"])
    assert (config.grpo.max_steps, config.seed, config.policy.generation.max_new_tokens) == (7, 4, 8)


def test_another_name_comes_without_the_arguments_of_the_old_one():
    demo = preset_path("demo")
    changed = load_config(GRPORunConfig, demo, overrides=["env.kwargs.max_number=9", "env.name=guessing"])
    assert changed.env.kwargs == {"max_number": 9}
    same = load_config(GRPORunConfig, demo, overrides=["env.name=arithmetic", "env.kwargs.max_operand=5"])
    assert same.env.kwargs == {"operations": ["+"], "max_operand": 5}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sed=1", ["unknown key sed;", "did you mean seed?"]),
        ("policy.optimizr.name=x", ["unknown key policy.optimizr;", "did you mean policy.optimizer?"]),
        ("grpo.loss.clip_hihg=0.1", ["unknown key grpo.loss.clip_hihg;", "did you mean grpo.loss.clip_high?"]),
        ("validation.zzz=1", ["unknown key validation.zzz;", "known here: every, num_prompts"]),
        ("grpo.max_steps=0", ["grpo.max_steps=0", "greater than 0"]),
        ("grpo.max_steps=many", ["grpo.max_steps='many'", "valid integer"]),
        ("policy.precision=int8", ["policy.precision='int8'", "'bfloat16'"]),
        ("data.validation_fraction=1.5", ["data.validation_fraction=1.5", "less than 1"]),
        ("policy.optimizer.kwargs.lr=-1", ["policy.optimizer.kwargs", "lr=-1", "positive number"]),
        ("policy.dynamic_batching.enabled=true", ["dynamic_batching.enabled", "turn one of them off"]),
        ("policy.scheduler=[{nam: x}]", ["policy.scheduler.0.nam;", "did you mean policy.scheduler.0.name?"]),
        ("policy.train_global_batch_size=100", ["256 rows", "policy.train_global_batch_size=100", "multiple of it"]),
        ("grpo.max_steps", ["'grpo.max_steps'", "key=value"]),
        ("=3", ["'=3'", "key=value"]),
        ("--fast=3", ["'--fast=3'", "key=value"]),
        ("run.name=[x", ["'run.name=[x'", "not valid YAML"]),
    ],
)
def test_a_wrong_setting_is_named_with_its_path_and_the_rule(override, said):
    message = refusal(override)
    assert all(part in message for part in said), message


def test_several_wrong_settings_are_all_reported():
    assert refusal("grpo.max_steps=0", "sed=1").count("\n") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [("- 1\n", "top level must be a mapping"), ("a: [", "not valid YAML"), (None, "does not exist")],
)
def test_an_unusable_config_file_is_named(tmp_path, content, said):
    path = tmp_path / "mine.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(GRPORunConfig, path)
    assert "mine.yaml" in str(caught.value)


def test_an_unknown_preset_lists_those_there_are():
    with pytest.raises(ConfigError, match=r"no preset 'demon'.*chat, demo, distill-demo, distill, dpo-demo, dpo, em"):
        preset_path("demon")


@pytest.mark.parametrize(
    ("algorithm", "overrides", "preset"),
    [
        ("grpo", [], "demo"),
        ("grpo", ["policy.model_name=embedded-untrained"], "demo"),
        ("grpo", ["policy.model_name=/models/x"], "chat"),
        ("grpo", ["policy.model_name=/models/x", "policy.model_name=embedded"], "demo"),
        ("ppo", [], "cartpole"),
    ],
)
def test_the_preset_follows_the_model(algorithm, overrides, preset):
    named = new_settings(algorithm, preset=preset, overrides=overrides)
    assert new_settings(algorithm, overrides=overrides) == named


def test_another_control_env_starts_from_the_defaults():
    assert new_settings("ppo", overrides=["env.name=Acrobot-v1"]).ppo == PPORunConfig().ppo


def test_the_arithmetic_of_a_step_is_spelled_out():
    config = load_config(GRPORunConfig, overrides=["policy.train_global_batch_size=64"])
    found = {quantity: value for quantity, value, _ in config.arithmetic()}
    assert found["rows per step"] == 256
    assert found["rows per optimizer step"] == 64
    assert found["optimizer steps per step"] == 4
    assert config.updates_per_step == 4


@pytest.mark.parametrize(
    ("overrides", "row"),
    [
        ([], ("tokens per micro-batch", "up to 4096", "policy.sequence_packing.train_mb_tokens")),
        (
            ["policy.sequence_packing.enabled=false", "policy.dynamic_batching.enabled=true"],
            ("tokens per micro-batch", "up to 4096", "policy.dynamic_batching.train_mb_tokens"),
        ),
        (
            ["policy.sequence_packing.enabled=false"],
            ("rows per micro-batch", 32, "policy.train_micro_batch_size"),
        ),
    ],
)
def test_the_arithmetic_says_what_fills_a_micro_batch(overrides, row):
    assert load_config(SFTRunConfig, overrides=overrides).arithmetic()[-1] == row


def test_a_list_replaces_a_mapping_and_the_other_way_round():
    one = {"policy": {"scheduler": {"name": "a.B"}}}
    two = {"policy": {"scheduler": [{"name": "c.D"}, {"name": "e.F"}], "scheduler_milestones": [5]}}
    assert [entry.name for entry in load_config(GRPORunConfig, one, two).policy.scheduler] == ["c.D", "e.F"]
    back = {"policy": {"scheduler": {"name": "a.B"}, "scheduler_milestones": []}}
    assert [entry.name for entry in load_config(GRPORunConfig, two, back).policy.scheduler] == ["a.B"]


def test_the_arithmetic_of_a_control_step_is_spelled_out():
    config = load_config(PPORunConfig, preset_path("cartpole"))
    found = {quantity: value for quantity, value, _ in config.arithmetic()}
    assert found["frames per env"] == 256
    assert found["optimizer steps per step"] == 10 * 2048 // 256
    assert found["frames per run"] == 2048 * config.ppo.max_steps


def test_the_annealing_of_a_preset_follows_the_number_of_steps():
    config = load_config(PPORunConfig, preset_path("cartpole"), overrides=["ppo.max_steps=7"])
    for role in (config.policy, config.critic):
        assert role.scheduler[0].kwargs["total_iters"] == 7


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("ppo.minibatch_frames=100", ["frames_per_batch=2048", "ppo.minibatch_frames=100", "multiple"]),
        ("env.num_envs=3", ["frames_per_batch=2048", "env.num_envs=3", "multiple"]),
        ("critic.hiden_sizes=[1]", ["did you mean critic.hidden_sizes?"]),
        ("policy.precision=float16", ["policy.precision='float16'", "'float64'"]),
        ("ppo.discount=1.5", ["ppo.discount=1.5", "less than or equal to 1"]),
        ("ppo.clip=0", ["ppo.clip=0", "greater than 0"]),
        ("tracking.print_samples_every=3", ["unknown key tracking.print_samples_every"]),
        ("cluster.num_workers=2", ["unknown key cluster"]),
    ],
)
def test_a_wrong_setting_of_a_control_run_is_named(override, said):
    message = refusal(override, schema=PPORunConfig)
    assert all(part in message for part in said), message


@pytest.mark.parametrize("schema", [GRPORunConfig, SFTRunConfig])
def test_workers_of_the_environment_need_calls_and_keep_their_old_name(schema):
    assert "num_workers=9 is more than max_concurrency=8" in refusal("env.num_workers=9", schema=schema)
    config = load_config(schema, overrides=["env.num_actors=2", "cluster.address=auto"])
    assert (config.env.num_workers, config.env.max_restarts) == (2, 3)


def test_a_file_of_examples_starts_no_workers_for_completions():
    on_ray = ("data.file=talks.jsonl", "cluster.launcher=ray")
    text = refusal(*on_ray, "env.num_workers=2", "policy.generation.placement=separate", schema=SFTRunConfig)
    assert "env.num_workers=2 and policy.generation.placement=separate would start workers" in text
    assert "data.file=talks.jsonl needs none; remove the setting, or data.file" in text
    load_config(SFTRunConfig, overrides=[*on_ray])


@pytest.mark.parametrize("key", ["num_threads", "cluster.num_threads"])
def test_more_threads_than_any_machine_has_are_refused_with_the_rule(key):
    with pytest.raises(ConfigError, match=rf"{key}=100000 is not valid: .* less than or equal to 1024"):
        load_config(GRPORunConfig, overrides=[f"{key}=100000"])
    load_config(GRPORunConfig, overrides=[f"{key}=1024"])


def test_the_title_of_a_supervised_run_names_its_data():
    assert load_config(SFTRunConfig, overrides=["data.file=talks.jsonl"]).title == "embedded on talks.jsonl"
    assert load_config(SFTRunConfig).title == "embedded on arithmetic"


@pytest.mark.parametrize(
    ("file", "override", "timeout_s"),
    [
        ({"deadline_s": 5}, "seed=1", 5),
        ({"timeout_s": 60}, "env.deadline_s=5", 5),
        ({"deadline_s": 60}, "env.timeout_s=5", 5),
    ],
)
def test_a_later_layer_wins_also_by_the_old_name_of_a_setting(file, override, timeout_s, caplog):
    config = load_config(GRPORunConfig, {"env": file}, overrides=[override])
    assert config.env.timeout_s == timeout_s
    assert "the setting env.deadline_s is now called env.timeout_s; rename it" in caplog.text
