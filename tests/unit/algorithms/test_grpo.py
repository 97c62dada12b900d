"""The GRPO loop: what it records, what its options change, how it ends."""

from __future__ import annotations

import orjson
import pytest
import torch

from lucidrl.errors import DataError, EnvironmentFailure, TrainingError
from lucidrl.models.generation import engine
from lucidrl.models.policy.policy import Policy


def test_a_run_records_training_time_validation_and_samples(run):
    folder, last_step = run("grpo", "run", "validation.every=2")
    assert last_step == 4
    records = [orjson.loads(line) for line in (folder.path / "metrics.jsonl").read_bytes().splitlines()]
    trained = [record for record in records if "train/reward" in record]
    assert [record["step"] for record in trained] == [1, 2, 3, 4]
    assert [record["step"] for record in records if "validation/accuracy" in record] == [0, 2, 4]
    for name in ("train/loss", "train/grad_norm", "train/tokens_per_s", "train/lr", "time/step_s", "time/generate_s"):
        assert all(record[name] > 0 or name == "train/loss" for record in trained), name
    assert [record["train/policy_version"] for record in trained] == [0, 1, 2, 3]
    dumped = sorted(path.name for path in (folder.path / "samples").iterdir())
    assert dumped == [*(f"step_{n}.jsonl" for n in (1, 2, 3, 4)), *(f"validation_{n}.jsonl" for n in (0, 2, 4))]
    rows = [orjson.loads(line) for line in (folder.path / "samples/step_1.jsonl").read_bytes().splitlines()]
    assert len(rows) == 16
    assert rows[0]["messages"][0]["role"] == "user"
    assert [row["group"] for row in rows] == [number // 4 for number in range(16)]


def test_written_samples_have_log_probabilities_of_generation_and_training_by_token(run):
    def completions(name, *settings):
        folder, _ = run("grpo", name, *settings)
        rows = [orjson.loads(line) for line in (folder.path / "samples/step_2.jsonl").read_bytes().splitlines()]
        return [row["messages"][-1] for row in rows]

    for completion in completions("on-policy"):
        assert "".join(completion["tokens"]).startswith(completion["content"])
        assert len(completion["tokens"]) == len(completion["generation_logprobs"])
        assert completion["training_logprobs"] == pytest.approx(completion["generation_logprobs"], abs=1e-4)
        assert max(completion["generation_logprobs"]) <= 0
    off_policy = completions("off-policy", "policy.train_global_batch_size=16", "grpo.num_epochs=2")
    assert all("training_logprobs" in completion for completion in off_policy)


@pytest.mark.slow
def test_plots_and_shown_samples_come_at_the_requested_steps_and_change_nothing(run):
    plain, _ = run("grpo", "plain", "tracking.plot_mismatch_every=0")
    folder, _ = run("grpo", "run", "tracking.plot_mismatch_every=2", "tracking.print_samples_every=4")
    plots = sorted(path.name for path in (folder.path / "plots" / "train").iterdir())
    assert plots == ["token_mult_prob_error_2.png", "token_mult_prob_error_4.png"]
    assert sorted(folder.watcher.samples_of) == [0, 4]
    logs, rewards = folder.watcher.samples_of[4]
    assert len(logs) == len(rewards) > 0
    assert folder.lines() == plain.lines()
    assert not (plain.path / "plots").exists()


def test_the_machine_is_recorded_beside_the_steps(run):
    folder, _ = run("grpo", "run", "tracking.monitor_interval_s=0.2")
    records = [orjson.loads(line) for line in (folder.path / "metrics.jsonl").read_bytes().splitlines()]
    assert [record for record in records if record.get("machine/node.0.mem_gb", 0) > 0 and "step" not in record]


def test_what_logging_costs_is_recorded_at_every_step(run):
    folder, _ = run("grpo", "run")
    records = [orjson.loads(line) for line in (folder.path / "metrics.jsonl").read_bytes().splitlines()]
    trained = [record for record in records if "train/reward" in record]
    assert all(0 < record["logger/caller_s"] < record["time/step_s"] for record in trained)
    assert [record["logger/lost_records"] for record in trained] == [0] * 4


def test_one_update_a_step_is_on_policy_at_every_step(run):
    folder, _ = run("grpo", "run")
    assert folder.train_metric("ratio/min") == folder.train_metric("ratio/max") == [1.0] * 4
    assert max(folder.train_metric("generation_mismatch/max_abs_logprob_difference")) < 1e-4


@pytest.mark.slow
def test_several_updates_a_step_compare_with_the_policy_before_the_first(run):
    def ratios(name, rate):
        settings = ["policy.train_global_batch_size=4", f"policy.optimizer.kwargs.lr={rate}"]
        folder, _ = run("grpo", name, *settings)
        return folder.train_metric("ratio/min") + folder.train_metric("ratio/max")

    # Without learning every update is the first one; with it the later ones are off policy.
    assert ratios("still", 1e-30) == pytest.approx([1.0] * 8, abs=1e-4)
    assert max(ratios("learning", 1e-2)) > 1.001


def test_tokens_out_of_bounds_leave_the_loss_and_its_count(run):
    # Rounding alone puts weights outside bounds this narrow.
    bounds = ("grpo.loss.importance_cap=1.0000001", "grpo.loss.importance_floor=0.9999999", "grpo.max_steps=1")
    free, _ = run("grpo", "free", *bounds)
    masked, _ = run("grpo", "masked", *bounds, "grpo.loss.importance_correction=mask")
    [outside] = [
        over + under
        for over, under in zip(
            masked.train_metric("importance/over_cap_fraction"),
            masked.train_metric("importance/under_floor_fraction"),
            strict=True,
        )
    ]
    [sampled] = free.train_metric("num_valid_tokens")
    assert 0 < outside < 1
    assert masked.train_metric("num_valid_tokens") == [round((1 - outside) * sampled)]
    # The metrics before the correction see the excluded tokens too.
    [before], [after] = (
        masked.train_metric(f"generation_mismatch/{name}max_abs_logprob_difference") for name in ("", "corrected_")
    )
    assert after < 1e-7 < before


def test_a_mismatch_of_generation_is_a_warning_with_its_fault_and_a_gross_one_stops_the_run(run, monkeypatch):
    plain = engine.draw
    monkeypatch.setattr(engine, "draw", lambda logits, *args, **kwargs: plain(2 * logits, *args, **kwargs))
    limits = ("policy.generation.temperature=2.0", "grpo.loss.entropy_coefficient=0")
    folder, last_step = run("grpo", "run", *limits, "policy.generation.mismatch.stop=null")
    assert last_step == 4
    warnings = [orjson.loads(line) for line in (folder.path / "warnings.jsonl").read_bytes().splitlines()]
    [warning] = [warning for warning in warnings if "nats per token, limit 0.01" in str(warning)]
    assert "those of temperature=1, but the settings are temperature=2" in str(warning)
    with pytest.raises(TrainingError, match=r"step 1: generation: temperature .* was not trained on these samples"):
        run("grpo", "stopped", *limits, "policy.generation.mismatch.stop=0.02")


def test_the_divergence_from_the_reference_starts_at_zero_and_grows(run):
    folder, _ = run("grpo", "run", "grpo.loss.kl_coefficient=0.1")
    kl = folder.train_metric("kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-9)
    assert kl[-1] > 1e-6


@pytest.mark.slow
def test_the_reference_of_a_resumed_run_is_still_the_model_it_started_from(run):
    settings = ("grpo.loss.kl_coefficient=0.1",)
    whole, _ = run("grpo", "whole", *settings)
    run("grpo", "broken", *settings, interrupt_at=2)
    broken, _ = run("grpo", "broken", *settings, resume=True)
    assert broken.train_metric("kl") == whole.train_metric("kl")


def test_truncated_completions_can_be_masked(run):
    cut = ("policy.generation.max_new_tokens=2", "validation.num_prompts=0", "grpo.max_steps=1")
    masked, _ = run("grpo", "masked", *cut, "grpo.mask_truncated=true")
    kept, _ = run("grpo", "kept", *cut)
    [truncated] = [round(fraction * 16) for fraction in kept.train_metric("truncated_fraction")]
    assert 0 < truncated < 16
    # A truncated completion has both tokens that it was allowed.
    [difference] = [
        all_tokens - left
        for all_tokens, left in zip(*(r.train_metric("num_valid_tokens") for r in (kept, masked)), strict=True)
    ]
    assert difference == 2 * truncated


def test_a_run_without_held_out_prompts_validates_nothing(run):
    folder, last_step = run("grpo", "run", "data.validation_fraction=0", "grpo.max_steps=1")
    assert last_step == 1
    assert [line["step"] for line in folder.lines()] == [1]


ENVS = """
from lucidrl.envs.text.interfaces import EnvReply

class Refusing:
    async def step(self, batch):
        raise RuntimeError("no reward")

class Equal:
    async def step(self, batch):
        return [EnvReply(1.0) for _ in batch]

class Huge:
    async def step(self, batch):
        rewards = [3e38 if request.sample_id.endswith("#1") else 0.0 for request in batch]
        return [EnvReply(reward, metrics={"of a float's size": 1e308}) for reward in rewards]

class Different:
    async def step(self, batch):
        return [EnvReply(float(request.sample_id[-1])) for request in batch]
"""


@pytest.fixture
def own_env(tmp_path, monkeypatch):
    """Settings for an environment of the module above, by its name."""
    (tmp_path / "grpo_envs.py").write_text(ENVS)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{n}+1="}}\n' for n in range(30)))
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name: (f"env.name=grpo_envs:{name}", f"data.file={tmp_path / 'prompts.jsonl'}")


def test_an_environment_that_scores_nothing_stops_the_run(run, own_env):
    with pytest.raises(EnvironmentFailure, match="no reward"):
        run("grpo", "run", *own_env("Refusing"))


def test_a_step_without_a_single_scored_sample_stops_the_run(run, own_env):
    with pytest.raises(EnvironmentFailure, match=r"none of the step's 16 samples .*raised"):
        run("grpo", "run", *own_env("Refusing"), "env.on_error=drop", "grpo.max_steps=1")


def test_rewards_beyond_the_limit_end_the_run_with_the_names_of_their_samples(run, own_env):
    with pytest.raises((DataError, EnvironmentFailure), match=r"#1"):
        run("grpo", "run", *own_env("Huge"), "grpo.max_steps=1", "validation.num_prompts=0")


@pytest.mark.parametrize("name", ["Equal", "Different"])
def test_groups_without_signal_can_be_left_out_of_the_loss(run, own_env, name):
    settings = (*own_env(name), "grpo.max_steps=1", "validation.num_prompts=0")
    kept, _ = run("grpo", "kept", *settings)
    left_out, _ = run("grpo", "left_out", *settings, "grpo.drop_groups_without_signal=true")
    if name == "Different":
        assert left_out.lines() == kept.lines()
    else:
        assert kept.train_metric("num_valid_tokens")[0] > 0
        assert left_out.train_metric("num_valid_tokens") in ([], [0.0])


@pytest.fixture
def scored_rows(monkeypatch):
    """Names of the rows that reach the policy to be scored, and their scores, by column."""
    seen: dict[str, dict[str, torch.Tensor]] = {}
    with_scores = Policy.with_scores

    def recorded(policy, data, *, previous, reference):
        scored = with_scores(policy, data, previous=previous, reference=reference)
        for column in ("prev_logprobs", "reference_policy_logprobs"):
            if column in scored:
                seen.setdefault(column, {}).update(zip(scored["idx"], scored[column], strict=True))
        return scored

    monkeypatch.setattr(Policy, "with_scores", recorded)
    return seen


def test_masked_rows_are_not_scored_and_the_scores_of_the_others_stay(run, scored_rows):
    settings = ("policy.generation.max_new_tokens=2", "validation.num_prompts=0", "grpo.max_steps=1")
    settings = (*settings, "grpo.loss.kl_coefficient=0.1", "policy.train_global_batch_size=8")
    kept, _ = run("grpo", "kept", *settings)
    everything = {column: dict(scores) for column, scores in scored_rows.items()}
    scored_rows.clear()
    run("grpo", "masked", *settings, "grpo.mask_truncated=true")
    [truncated] = kept.train_metric("truncated_fraction")
    assert 0 < truncated < 1
    assert everything.keys() == scored_rows.keys() == {"prev_logprobs", "reference_policy_logprobs"}
    for column, scores in scored_rows.items():
        assert len(everything[column]) == 16
        assert len(scores) == round(16 * (1 - truncated))
        for name, row in scores.items():
            torch.testing.assert_close(row, everything[column][name], atol=1e-5, rtol=0)


def test_a_step_whose_rows_are_all_masked_scores_nothing(run, own_env, scored_rows):
    settings = (*own_env("Equal"), "grpo.max_steps=1", "validation.num_prompts=0", "grpo.loss.kl_coefficient=0.1")
    folder, _ = run("grpo", "run", *settings, "grpo.drop_groups_without_signal=true")
    assert scored_rows == {}
    assert folder.train_metric("loss") == [0.0]
