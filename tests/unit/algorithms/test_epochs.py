"""Several optimizer epochs per GRPO batch, and SFT runs whose length is given in epochs."""

from __future__ import annotations

import pytest

SAMPLED = ("validation.num_prompts=0", "lr=0.001", "temperature=2")  # so that some groups have different rewards
SEVERAL = ("grpo.num_epochs=3", *SAMPLED)


def test_epochs_reuse_the_batch_and_make_the_ratio_move(run):
    one, _ = run("grpo", "one", *SAMPLED, "grpo.max_steps=1")
    three, _ = run("grpo", "three", *SEVERAL, "grpo.max_steps=1")
    assert one.train_metric("ratio/max") == [1.0]
    assert three.train_metric("ratio/max")[0] > 1.01
    assert three.train_metric("num_valid_tokens") == [3 * one.train_metric("num_valid_tokens")[0]]
    assert three.train_metric("reward") == one.train_metric("reward")


@pytest.mark.slow
def test_without_learning_every_epoch_is_on_policy(run):
    still, _ = run("grpo", "still", "grpo.num_epochs=2", "validation.num_prompts=0", "lr=1e-30", "grpo.max_steps=2")
    ratios = still.train_metric("ratio/min") + still.train_metric("ratio/max")
    assert ratios == pytest.approx([1.0] * 4, abs=1e-4)


@pytest.mark.slow
def test_a_resumed_run_with_epochs_and_a_schedule_is_bit_identical(run):
    settings = (*SEVERAL, "policy.scheduler=cosine", "policy.warmup_steps=1", "policy.train_global_batch_size=8")
    whole, _ = run("grpo", "whole", *settings)
    run("grpo", "broken", *settings, interrupt_at=2)
    broken, last_step = run("grpo", "broken", *settings, resume=True)
    assert last_step == 4
    assert broken.lines() == whole.lines()
    rates = whole.train_metric("lr")
    assert rates[0] == pytest.approx(0.0005)
    assert rates[1] == pytest.approx(0.001)
    assert rates[1] > rates[2] > rates[3] > 0


def test_epochs_of_examples_become_steps(run):
    _, last_step = run("sft", "run", "sft.epochs=2", "data.num_examples=20", "sft.examples_per_step=8")
    assert last_step == 5
    settings = ("sft.epochs=0.5", "data.num_examples=20", "policy.scheduler=linear", "lr=0.001")
    half, last_step = run("sft", "half", *settings)
    assert last_step == 2
    assert half.train_metric("lr") == pytest.approx([0.001, 0.0005])


def test_held_out_examples_do_not_lengthen_an_epoch(run):
    arithmetic = ("env.kwargs.max_operand=9", "data.validation_fraction=0.5")  # about 50 of 100 examples to train on
    _, last_step = run("sft", "run", "sft.epochs=1", "sft.examples_per_step=8", *arithmetic)
    assert 4 <= last_step <= 9
