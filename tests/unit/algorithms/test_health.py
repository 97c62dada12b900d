"""Runs that do not learn are warned of, with the setting to change, and not too often."""

from __future__ import annotations

import math

import orjson
import pytest

from lucidrl.algorithms.health import HealthMonitor, HealthSettings

SETTINGS = HealthSettings(max_new_tokens=64, samples_per_prompt=8, rows_per_step=32, temperature=1.0)
HEALTHY = {
    "reward": 0.5,
    "reward_min": 0.0,
    "reward_max": 1.0,
    "groups_with_signal_fraction": 0.5,
    "truncated_fraction": 0.1,
    "dropped_samples": 0.0,
    "entropy_estimate": 1.0,
}


def warned(*steps, settings=SETTINGS):
    """(Step, rule) of every warning about these steps, each given by what differs from a healthy one."""
    monitor = HealthMonitor(settings)
    return [
        (step, warning.name, warning.message)
        for step, changes in enumerate(steps, start=1)
        for warning in monitor.observe(step, {**HEALTHY, **changes})
    ]


def names(*steps, settings=SETTINGS):
    return [(step, name) for step, name, _ in warned(*steps, settings=settings)]


def test_a_healthy_run_is_not_warned_of():
    assert warned(*[{}] * 100) == []


SILENT = {"groups_with_signal_fraction": 0.0}
CONSTANT = {**SILENT, "reward": 0.0, "reward_min": 0.0, "reward_max": 0.0}


def test_a_constant_reward_is_named_after_five_steps_and_not_also_as_missing_signal():
    assert names(*[{}] * 3, *[CONSTANT] * 4) == []
    [(step, name, message)] = warned(*[CONSTANT] * 20)
    assert (step, name) == (5, "constant_reward")
    assert "got the reward 0" in message
    assert "env.name" in message
    changing = [{**CONSTANT, "reward_min": float(n), "reward_max": float(n)} for n in range(9)]
    assert names(*changing) == []


def test_groups_without_signal_are_named_after_ten_steps():
    assert names(*[SILENT] * 9, {}, *[SILENT] * 9) == []
    [(step, name, message)] = warned(*[SILENT] * 12)
    assert (step, name) == (10, "no_signal")
    assert "collector.samples_per_prompt=8" in message
    assert "policy.generation.temperature=1" in message
    single = HealthSettings(max_new_tokens=64, samples_per_prompt=1, rows_per_step=32, temperature=1.0)
    assert "set collector.samples_per_prompt=8" in warned(*[SILENT] * 10, settings=single)[0][2]
    plain = HealthSettings(64, 1, 32, 1.0, has_group_baseline=False)
    assert warned(*[SILENT] * 20, settings=plain) == []


def test_truncated_completions_are_named_at_once():
    assert names({"truncated_fraction": 0.25}) == []
    [(step, name, message)] = warned({"truncated_fraction": 0.375})
    assert (step, name) == (1, "truncated")
    assert message.startswith("38% of completions were truncated at policy.generation.max_new_tokens=64 ")


def test_dropped_samples_are_named():
    assert names({"dropped_samples": 8.0}) == []
    assert names({"dropped_samples": 9.0}) == [(1, "dropped")]


def test_entropy_collapse_is_named_unless_the_task_is_solved():
    collapsed = {"entropy_estimate": 0.05}
    found = warned(*[{}] * 10, *[collapsed] * 10)
    assert [name for _, name, _ in found] == ["entropy_collapse"]
    assert "grpo.loss.entropy_coefficient=0" in found[0][2]
    assert names(*[{}] * 10, *[{**collapsed, "reward": 0.95}] * 10) == []
    assert names(*[{}] * 10, *[{"entropy_estimate": 0.2}] * 10) == []


def test_a_warning_is_repeated_ever_more_rarely():
    steps = [step for step, _ in names(*[{"truncated_fraction": 1.0}] * 800)]
    assert steps == [1, 51, 151, 351, 751]


def test_metrics_that_are_missing_or_not_a_number_warn_of_nothing():
    monitor = HealthMonitor(SETTINGS)
    assert [monitor.observe(step, {}) for step in range(1, 30)] == [[]] * 29
    assert warned(*[dict.fromkeys(HEALTHY, math.nan)] * 30) == []


def test_a_run_that_cannot_learn_is_warned_of_in_log_and_folder(run, caplog):
    overrides = ("collector.samples_per_prompt=1", "max_tokens=1", "validation.num_prompts=0", "max_steps=1")
    folder, _ = run("grpo", "run", *overrides)
    records = [orjson.loads(line) for line in (folder.path / "warnings.jsonl").read_bytes().splitlines()]
    assert [(record["step"], record["name"]) for record in records] == [(0, "cannot_learn"), (1, "truncated")]
    assert "set collector.samples_per_prompt=8, or grpo.advantages.estimator=plain" in records[0]["message"]
    assert f"step 1: {records[1]['message']}" in caplog.text


@pytest.mark.slow
def test_rewards_and_entropy_of_a_step_are_recorded(run):
    folder, _ = run("grpo", "run", "validation.num_prompts=0", "max_steps=1", "temperature=2")
    rows = [orjson.loads(line) for line in (folder.path / "samples/step_1.jsonl").read_bytes().splitlines()]
    rewards = [row["reward"] for row in rows]
    assert folder.train_metric("reward_min") == [min(rewards)]
    assert folder.train_metric("reward_max") == [max(rewards)]
    mean = sum(rewards) / len(rewards)
    assert folder.train_metric("reward_std") == pytest.approx(
        [math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))]
    )
    # The estimate is unbiased; with few tokens it is near the entropy that the loss computes.
    [entropy], [estimate] = folder.train_metric("entropy"), folder.train_metric("entropy_estimate")
    assert estimate == pytest.approx(entropy, rel=0.5)


@pytest.mark.parametrize(("every", "dumped"), [(0, [1]), pytest.param(3, [1, 3], marks=pytest.mark.slow)])
def test_samples_of_the_first_step_are_always_written(run, every, dumped):
    folder, _ = run("grpo", "run", f"tracking.dump_samples_every={every}", "validation.num_prompts=0")
    written = sorted(path.name for path in (folder.path / "samples").iterdir())
    assert written == [f"step_{step}.jsonl" for step in dumped]
