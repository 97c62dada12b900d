"""Several optimizer epochs per GRPO batch, and SFT runs whose length is given in epochs."""

from __future__ import annotations

import pytest

from lucidrl.data.datasets import Prompt
from lucidrl.envs.text.interfaces import EnvReply

SAMPLED = ("validation.num_prompts=0", "lr=0.001", "temperature=2")  # so that some groups have different rewards
SEVERAL = ("grpo.num_epochs=3", *SAMPLED)
VARIED = (f"env.name={__name__}:Varied", "env.isolation=none", "data.validation_fraction=0", "grpo.max_steps=1")


class Varied:
    """Rewards the characters of a completion, so the samples of a prompt have different rewards in any order."""

    def prompts(self) -> list[Prompt]:
        return [Prompt(f"{number}", ({"role": "user", "content": f"{number}+1="},)) for number in range(8)]

    async def step(self, batch):
        return [EnvReply(float(sum(map(ord, each.completion)) % 7)) for each in batch]


def test_epochs_reuse_the_batch_and_make_the_ratio_move(run):
    one, _ = run("grpo", "one", *SAMPLED, "grpo.max_steps=1")
    three, _ = run("grpo", "three", *SEVERAL, "grpo.max_steps=1")
    assert one.train_metric("ratio/max") == [1.0]
    assert three.train_metric("ratio/max")[0] > 1.01
    assert three.train_metric("num_valid_tokens") == [3 * one.train_metric("num_valid_tokens")[0]]
    assert three.train_metric("reward") == one.train_metric("reward")


def test_clipping_takes_effect_from_the_second_epoch_on(run):
    def clipped(name, *settings):
        folder, _ = run("grpo", name, *SAMPLED, *VARIED, *settings)
        assert folder.train_metric("reward_std")[0] > 0
        shares = [folder.train_metric(f"clip_fraction/{side}")[0] for side in ("low", "high")]
        return sum(shares), folder.train_metric("loss")

    first_only, _ = clipped("one", "epsilon=0.0001")
    tight, tight_loss = clipped("tight", "epsilon=0.0001", "grpo.num_epochs=3")
    wide, wide_loss = clipped("wide", "epsilon=0.9", "grpo.num_epochs=3")
    assert first_only == 0
    assert tight > 0.1
    assert wide < tight
    assert wide_loss != tight_loss


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
