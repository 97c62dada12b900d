"""Valid settings that make no sense are named before the run starts, and every value can be traced to its source."""

from __future__ import annotations

import pytest

from lucidrl.recipes.advice import advice
from lucidrl.recipes.explain import explained, explanation
from lucidrl.recipes.settings import new_settings, preset_of, resumed_settings
from lucidrl.utils.config import dump_yaml


def messages(algorithm, *overrides, **options):
    return [warning.message for warning in advice(new_settings(algorithm, overrides=overrides, **options))]


@pytest.mark.parametrize("algorithm", ["grpo", "distill", "sft", "dpo", "reward-model", "ppo"])
def test_default_runs_need_no_advice(algorithm):
    assert messages(algorithm) == []


@pytest.mark.parametrize("preset", ["chat", "task", "task-embedded"])
def test_presets_need_no_advice(preset):
    assert messages("grpo", preset=preset) == []


@pytest.mark.parametrize(
    ("algorithm", "overrides", "said"),
    [
        ("grpo", ["num_generations=1"], ["collector.samples_per_prompt=1", "grpo.advantages.estimator=plain"]),
        (
            "grpo",
            ["num_generations=1", "grpo.advantages.estimator=leave_one_out"],
            ["estimator=leave_one_out compares each sample with itself"],
        ),
        (
            "grpo",
            ["collector.prompts_per_step=1", "num_generations=1", "grpo.advantages.estimator=plain"],
            ["raise collector.prompts_per_step"],
        ),
        ("grpo", ["top_k=1"], ["policy.generation.top_k=0"]),
        (
            "grpo",
            ["scheduler=cosine", "warmup_steps=50", "max_steps=50"],
            ["policy.warmup_steps=50 is not less than"],
        ),
        (
            "grpo",
            ["epsilon=0.3"],
            [
                "clip_low=0.3 (as epsilon) and grpo.loss.clip_high=0.3 (as epsilon) have no effect",
                "num_epochs=2",
            ],
        ),
        ("grpo", ["grpo.loss.clip_high=0.2"], ["grpo.loss.clip_high=0.2 has no effect"]),
        ("grpo", ["grpo.loss.kl_estimator=k2"], ["grpo.loss.kl_estimator=k2 has no effect", "kl_coefficient is 0"]),
        ("grpo", ["grpo.loss.importance_cap=3"], ["grpo.loss.importance_correction"]),
        (
            "grpo",
            ["grpo.async.stale_samples=drop"],
            ["grpo.async.stale_samples=drop has no", "synchronous; set grpo.async.max_staleness=1"],
        ),
        (
            "distill",
            ["distill.async.group_fraction=0.5"],
            ["distill.async.group_fraction=0.5 has no effect", "set distill.async.max_staleness=1"],
        ),
        ("grpo", ["policy.generation.step_timeout_s=9"], ["policy.generation.step_timeout_s=9.0 has no effect"]),
        ("grpo", ["policy.train_micro_batch_size=8"], ["policy.sequence_packing.enabled=false"]),
        ("grpo", ["policy.dynamic_batching.train_mb_tokens=8"], ["policy.dynamic_batching.enabled is false"]),
        ("grpo", ["policy.generation.num_workers=2"], ["policy.generation.placement=separate"]),
        ("sft", ["tracking.wandb.group=x"], ["tracking.wandb.group=x has no effect: tracking.wandb.enabled is false"]),
        ("sft", ["validation.every=5", "validation.num_prompts=0"], ["validation.num_prompts is 0"]),
        ("sft", ["sft.max_steps=5", "sft.epochs=2"], ["sft.max_steps=5 has no effect"]),
        (
            "sft",
            ["data.file=a.csv", "env.name=guessing", "env.timeout_s=5"],
            ["env.name=guessing and env.timeout_s=5.0 have no effect", "uses no environment"],
        ),
        (
            "sft",
            ["data.file=a.csv", "data.validation_file=b.csv", "data.validation_fraction=0.2"],
            ["data.validation_fraction=0.2 has no effect: the validation rows are separate"],
        ),
        ("grpo", ["env.max_restarts=5"], ["env.max_restarts=5 has no effect: the environment runs in the driver"]),
        ("distill", ["distill.divergence=sampled", "distill.top_k=5"], ["distill.divergence is sampled"]),
        ("distill", ["distill.advantages.estimator=plain"], ["distill.reward_coefficient is 0"]),
        (
            "distill",
            ["num_generations=1", "distill.reward_coefficient=1"],
            ["cannot learn from rewards", "distill.advantages.estimator=plain"],
        ),
        ("dpo", ["dpo.desirable_weight=2"], ["dpo.desirable_weight=2.0 has no effect: dpo.loss is not kto"]),
        ("reward-model", ["validation.samples_per_prompt=4"], ["the run compares written completions"]),
        ("ppo", ["ppo.clip=0.1", "ppo.num_epochs=1", "ppo.minibatch_frames=2048"], ["ppo.clip=0.1 has no effect"]),
        ("ppo", ["tracking.monitor=false", "tracking.monitor_interval_s=3"], ["tracking.monitor is false"]),
    ],
)
def test_what_cannot_learn_or_has_no_effect_is_named(algorithm, overrides, said):
    [message] = messages(algorithm, *overrides)
    assert all(part in message for part in said), message


@pytest.mark.parametrize(
    "overrides",
    [
        ["epsilon=0.3", "grpo.num_epochs=2"],
        ["epsilon=0.3", "policy.train_global_batch_size=64"],
        ["grpo.loss.kl_estimator=k2", "beta=0.1"],
        ["num_generations=1", "grpo.advantages.estimator=plain"],
        ["tracking.wandb.enabled=true", "tracking.wandb.group=x"],
        ["env.max_restarts=5", "env.isolation=process"],
        ["data.file=a.csv", "data.validation_fraction=0.2", "reward=math"],
    ],
)
def test_settings_with_an_effect_are_not_named(overrides):
    assert messages("grpo", *overrides) == []


def test_the_file_of_another_run_is_not_accused_of_its_defaults(tmp_path):
    (tmp_path / "config.yaml").write_text(dump_yaml(new_settings("grpo")))
    assert messages("grpo", config_file=tmp_path / "config.yaml") == []
    assert advice(resumed_settings("grpo", tmp_path)) == []
    (tmp_path / "mine.yaml").write_text("grpo: {loss: {clip_high: 0.28}}\n")
    (tmp_path / "config.yaml").write_text(dump_yaml(new_settings("grpo", tmp_path / "mine.yaml")))
    assert advice(resumed_settings("grpo", tmp_path)) == []  # the run was warned at its start
    assert "clip_high=0.28 has no effect" in messages("grpo", config_file=tmp_path / "mine.yaml")[0]


def test_a_later_layer_decides_between_epochs_and_steps(tmp_path):
    (tmp_path / "mine.yaml").write_text("sft: {epochs: 3}\n")
    by_steps = new_settings("sft", tmp_path / "mine.yaml", overrides=["max_steps=7"])
    assert (by_steps.sft.epochs, by_steps.sft.max_steps) == (None, 7)
    by_epochs = new_settings("sft", preset="embedded-warm-start", overrides=["epochs=3"])
    assert by_epochs.sft.for_examples(700).max_steps == 17
    (tmp_path / "config.yaml").write_text(dump_yaml(by_epochs))
    resumed = resumed_settings("sft", tmp_path, ["sft.max_steps=40"])
    assert (resumed.sft.epochs, resumed.sft.max_steps) == (None, 40)
    assert resumed_settings("sft", tmp_path, ["sft.epochs=5"]).sft.for_examples(128).max_steps == 5
    assert resumed_settings("sft", tmp_path).sft.epochs == 3


def test_every_setting_is_explained_once_and_secrets_are_not_shown(tmp_path):
    (tmp_path / "mine.yaml").write_text("collector: {prompts_per_step: 4}\n")
    overrides = ["lr=0.5", "env.kwargs.api_key=hunter2hunter2"]
    config = new_settings("grpo", tmp_path / "mine.yaml", "demo", overrides)
    rows = {key: (value, source) for key, value, source in explained(config)}
    assert len(rows) == len(explained(config)) > 60
    assert rows["policy.optimizer.kwargs.lr"] == ("0.5", "command line (as lr)")
    assert rows["collector.prompts_per_step"] == ("4", f"file {tmp_path / 'mine.yaml'}")
    assert rows["collector.samples_per_prompt"] == ("8", "preset demo")
    assert rows["policy.precision"] == ("float32", "default")
    assert rows["run.name"] == ("null", "default")
    text = explanation(config).plain
    assert "hunter2" not in text
    assert "env.kwargs.operations=['+']" in text
    assert text.count("\n") == len(rows) - 1


def test_the_preset_is_said():
    assert preset_of(new_settings("grpo")) == "preset demo"
    assert preset_of(new_settings("sft")) == "no preset"
