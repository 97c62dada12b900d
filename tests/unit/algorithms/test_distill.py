"""Distillation is GRPO's loop with the scores of a teacher."""

from __future__ import annotations

import os
import signal

import orjson
import pytest
import torch

from lucidrl.algorithms.distill import Distillation
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import ConfigError, WorkerError
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.policy import Policy
from lucidrl.recipes.configs import DistillRunConfig
from lucidrl.recipes.distill import DistillRun, check_same_vocabulary
from lucidrl.utils.config import load_config
from tests.faults.records import digests
from tests.tiers import slow_except


def rows() -> BatchedDataDict:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([9, 5, 7])
    return BatchedDataDict(
        {
            "input_ids": torch.randint(2, 90, (3, 9), generator=generator),
            "input_lengths": lengths,
            "token_mask": ((torch.arange(9) >= 3) & (torch.arange(9) < lengths[:, None])).long(),
            "sample_mask": torch.tensor([1.0, 0.0, 1.0]),
        }
    )


def teacher(**options) -> Policy:
    config = PolicyConfig(model_name="embedded")
    return Policy(config, embedded_tokenizer(), init_optimizer=False, init_reference_model=False, **options)


STEPS = {"top_k": 16, "sampled": 40}


ASYNC = ("num_threads=1", "cluster.num_threads=1", "policy.generation.placement=separate")


def check_learning(run, divergence, *more):
    """Return the folder of a run in which the student approaches the teacher."""
    steps = f"distill.max_steps={STEPS[divergence]}"
    settings = (f"distill.divergence={divergence}", steps, "distill.reward_coefficient=0")
    sharper = ("policy.model_name=embedded", "teacher.temperature=0.5", "validation.num_prompts=0")
    # Single tokens that the teacher finds very unlikely dominate the divergence: it takes many samples and small steps.
    careful = ("collector.prompts_per_step=64", "collector.samples_per_prompt=8", "policy.optimizer.kwargs.lr=2e-5")
    betas = "policy.optimizer.kwargs.betas=[0.9,0.99]"
    folder, _ = run("distill", "run", *settings, *sharper, *careful, betas, *more)
    divergences = folder.train_metric("teacher_kl")
    assert sum(divergences[-4:]) < 0.7 * sum(divergences[:4]), divergences
    return folder


@pytest.mark.parametrize("divergence", slow_except(STEPS, "top_k"))
def test_a_student_approaches_its_teacher(run, divergence):
    check_learning(run, divergence)


@pytest.mark.slow
@pytest.mark.parametrize("divergence", STEPS)
def test_a_student_learns_from_samples_that_are_made_while_it_trains(run, monkeypatch, divergence):
    staleness = []
    prepare = Distillation.prepare

    def noted(self, rollouts, *args, **kwargs):
        staleness.extend(rollouts.policy_version - version for one in rollouts.samples for version in one.version_range)
        return prepare(self, rollouts, *args, **kwargs)

    monkeypatch.setattr(Distillation, "prepare", noted)
    folder = check_learning(run, divergence, *ASYNC, "distill.async.max_staleness=1")
    assert set(staleness) == {0, 1}
    assert 0 < max(folder.train_metric("staleness")) <= 1
    assert all(0 < weight <= 2 for weight in folder.train_metric("importance/mean_weight_late"))


@pytest.mark.slow
def test_a_stopped_asynchronous_distillation_resumes_and_repeats_no_sample(run):
    settings = (*ASYNC, "distill.async.max_staleness=1", "distill.max_steps=8", "validation.num_prompts=0")
    _, last_step = run("distill", "run", *settings, interrupt_at=4)
    assert last_step == 4
    folder, last_step = run("distill", "run", *settings, resume=True)
    assert last_step == 8
    files = [folder.path / f"samples/step_{step}.jsonl" for step in range(1, 9)]
    samples = [orjson.loads(line)["sample"] for file in files for line in file.read_bytes().splitlines()]
    assert len(samples) == len(set(samples)) == 8 * 16


@pytest.mark.slow
def test_without_staleness_nothing_is_asynchronous_and_it_equals_one_whose_policy_generates(run, asynchronous_parts):
    settings = (*ASYNC, "distill.max_steps=2", "checkpoint.metric=null")
    plain, _ = run("distill", "plain", *settings, "policy.generation.placement=policy")
    folder, _ = run("distill", "run", *settings, "distill.async.max_staleness=0")
    assert asynchronous_parts == []
    for kind in ("parameters", "optimizer", "samples"):
        assert digests(folder.path)[kind] == digests(plain.path)[kind], kind


@pytest.mark.slow
def test_without_the_teacher_it_is_grpo(run):
    common = ("policy.model_name=embedded", "validation.num_prompts=0", "checkpoint.metric=null")
    grpo, _ = run("grpo", "grpo", *common, "grpo.loss.entropy_coefficient=0")
    coefficients = ("distill.teacher_coefficient=0", "distill.reward_coefficient=1")
    distilled, _ = run("distill", "distill", *common, *coefficients)
    assert digests(distilled.path)["parameters"] == digests(grpo.path)["parameters"]


def test_a_teacher_equal_to_the_student_is_no_divergence(run):
    settings = ("policy.model_name=embedded", "distill.max_steps=1", "distill.reward_coefficient=0")
    for divergence in ("sampled", "top_k"):
        folder, _ = run(
            "distill", divergence, f"distill.divergence={divergence}", *settings, "validation.num_prompts=0"
        )
        assert folder.train_metric("teacher_kl")[0] == pytest.approx(0, abs=1e-6)
        assert folder.train_metric("grad_norm")[0] == pytest.approx(0, abs=1e-4)


def test_a_step_without_a_valid_sample_changes_nothing(run):
    settings = ("policy.model_name=embedded", "distill.max_steps=1", "validation.num_prompts=0")
    masked = ("distill.mask_truncated=true", "policy.generation.max_new_tokens=1", "distill.divergence=top_k")
    folder, _ = run("distill", "run", *settings, *masked)
    assert folder.train_metric("grad_norm") == [0]


def test_the_likeliest_tokens_are_those_of_the_whole_vocabulary():
    data = rows()
    with teacher() as policy:
        ids, logprobs = policy.top_logprobs(data, 4, 102)
        data["input_ids"] = data["input_ids"].clone()
        for column in range(4):  # score each candidate in place of the token at position 4
            data["input_ids"][:, 4] = ids[:, 4, column]
            scored = policy.get_logprobs(data)[:, 4]
            torch.testing.assert_close(logprobs[[0, 2], 4, column], scored[[0, 2]], rtol=1e-5, atol=1e-5)
    is_sampled = data["token_mask"].bool() & data["sample_mask"].bool()[:, None]
    assert (logprobs[is_sampled].exp().sum(-1) - 1).abs().max() < 1e-5
    assert not logprobs[~is_sampled].any()
    assert not ids[~is_sampled].any()


@pytest.mark.slow
def test_a_separate_teacher_scores_alike_and_is_named_when_it_is_killed(tmp_path):
    with teacher() as policy, teacher(name="teacher", own_processes=True, log_dir=tmp_path) as separate:
        assert torch.equal(separate.get_logprobs(rows()), policy.get_logprobs(rows()))
        for found, expected in zip(
            separate.top_logprobs(rows(), 4, 102), policy.top_logprobs(rows(), 4, 102), strict=True
        ):
            assert torch.equal(found, expected)
        os.kill(separate.group.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"teacher rank 0 of 1 was killed by SIGKILL.* in scorer.logprobs"):
            separate.get_logprobs(rows())
    assert (tmp_path / "teacher_rank_0.log").exists()


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", slow_except([1, 2], 2))
def test_a_run_with_a_separate_teacher_is_that_with_one_in_the_driver(run, num_workers):
    settings = ("distill.divergence=top_k", "validation.num_prompts=0", "checkpoint.metric=null", "distill.max_steps=2")
    alone, _ = run("distill", "alone", *settings)
    workers = ("teacher.placement=separate", f"teacher.num_workers={num_workers}")
    separate, _ = run("distill", "separate", *settings, *workers)
    names = ("teacher_kl", "loss", "grad_norm")
    for name in names:
        assert separate.train_metric(name) == pytest.approx(alone.train_metric(name), rel=1e-4, abs=1e-6)


def test_a_teacher_has_the_students_temperature_unless_it_has_its_own():
    config = load_config(DistillRunConfig, {}, overrides=["teacher.model_name=x", "policy.generation.temperature=1.5"])
    assert config.teacher.policy(config.policy).generation.temperature == 1.5
    own = config.teacher.model_copy(update={"temperature": 0.7})
    assert own.policy(config.policy).generation.temperature == 0.7


def test_the_first_difference_of_the_vocabularies_is_named():
    student, other, longer = embedded_tokenizer(), embedded_tokenizer(), embedded_tokenizer()
    check_same_vocabulary(student, other)
    longer.add_tokens(["<tool>"])
    number = len(student)
    with pytest.raises(ConfigError, match=f"token {number} is '<tool>', but in the student missing"):
        check_same_vocabulary(student, longer)
    with pytest.raises(ConfigError, match=f"token {number} is missing, but in the student '<tool>'"):
        check_same_vocabulary(longer, student)


def test_another_vocabulary_is_refused_before_the_run(tmp_path, embedded_folder):
    import shutil

    folder = tmp_path / "other"
    shutil.copytree(embedded_folder, folder)
    tokenizer = embedded_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(folder)
    config = load_config(DistillRunConfig, {}, overrides=[f"teacher.model_name={folder}", f"run.root={tmp_path}"])
    run = DistillRun(config)
    with pytest.raises(ConfigError, match="another vocabulary than the student: token"):
        run.preflight()
    run.close()
