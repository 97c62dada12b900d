"""A run with a separate generator equals the run that generates with the policy."""

from __future__ import annotations

import pytest
import torch

from tests.faults.records import digests

ONE_THREAD = ("num_threads=1", "cluster.num_threads=1")
SEPARATE = (*ONE_THREAD, "policy.generation.placement=separate", "policy.generation.verify_refit=true")


@pytest.fixture(autouse=True)
def _threads():
    """Runs set the number of threads of this process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_a_separate_generator_changes_nothing_even_after_a_resume(run):
    alone, _ = run("grpo", "alone", *ONE_THREAD, "grpo.max_steps=3")
    separate, last_step = run("grpo", "separate", *SEPARATE, "grpo.max_steps=3", interrupt_at=2)
    assert last_step == 2
    separate, last_step = run("grpo", "separate", *SEPARATE, "grpo.max_steps=3", resume=True)
    assert last_step == 3
    assert separate.train_metric("policy_version") == [0, 1, 2]
    assert separate.train_metric("staleness") == [0, 0, 0]
    assert separate.lines() == alone.lines()
    assert digests(separate.path) == digests(alone.path)


@pytest.mark.slow
def test_nor_does_one_that_is_reached_over_a_process_group(run):
    alone, _ = run("grpo", "alone", *ONE_THREAD, "grpo.max_steps=2")
    separate, _ = run("grpo", "separate", *SEPARATE, "policy.generation.refit=collective", "grpo.max_steps=2")
    starting, started, *_ = separate.watcher.messages
    assert starting == f"starting 1 builtin replica; logs: {separate.path / 'logs' / 'generation'}"
    assert started.startswith("started 1 builtin replica in ")
    assert (separate.path / "logs" / "generation").is_dir()
    assert separate.lines() == alone.lines()
    assert digests(separate.path) == digests(alone.path)


@pytest.mark.slow
def test_supervised_runs_validate_with_the_weights_of_the_step(run):
    alone, _ = run("sft", "alone", *ONE_THREAD, "sft.max_steps=2")
    separate, _ = run("sft", "separate", *SEPARATE, "sft.max_steps=2")
    assert separate.lines() == alone.lines()
