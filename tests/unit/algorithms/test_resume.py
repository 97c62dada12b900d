"""A run that was stopped and resumed ends exactly where an unbroken one ends."""

from __future__ import annotations

import pytest
import torch

from lucidrl.errors import CheckpointError


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_stopped_and_resumed_run_equals_an_unbroken_one_to_the_bit(run, algorithm, precision):
    setting = f"policy.precision={precision}"
    whole, _ = run(algorithm, "whole", setting)
    broken, last_step = run(algorithm, "broken", setting, interrupt_at=2)
    assert last_step == 2
    broken, last_step = run(algorithm, "broken", setting, resume=True)
    assert last_step == 4
    assert broken.lines() == whole.lines()
    assert min(whole.train_metric("grad_norm")) > 0
    expected, found = whole.tensors(), broken.tensors()
    assert expected.keys() == found.keys()
    assert any(name.startswith("optimizer/") for name in expected)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_the_same_seed_gives_the_same_metrics_and_weights(run, algorithm):
    first, _ = run(algorithm, "first")
    again, _ = run(algorithm, "again")
    other, _ = run(algorithm, "other", "seed=1")
    assert first.lines() == again.lines()
    expected, found = first.tensors(), again.tensors()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert first.lines() != other.lines()


def test_a_longer_run_goes_on_from_a_finished_one(run):
    whole, _ = run("grpo", "whole", "grpo.max_steps=4")
    run("grpo", "short", "grpo.max_steps=2")
    longer, last_step = run("grpo", "short", "grpo.max_steps=4", resume=True)
    assert last_step == 4
    assert longer.lines() == whole.lines()


def test_checkpoints_come_at_their_interval_and_at_the_end(run):
    folder, _ = run("grpo", "run", "grpo.max_steps=3", "checkpoint.every=2", "checkpoint.keep_last=5")
    assert sorted(path.name for path in (folder.path / "checkpoints").iterdir()) == ["step_2", "step_3"]


def test_there_is_nothing_to_resume_before_the_first_checkpoint(run):
    with pytest.raises(CheckpointError, match="no valid checkpoint to resume from"):
        run("grpo", "run", resume=True)
