"""A run that was stopped, or died, and was resumed ends bit-identical to an uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import signal

import numpy as np
import pytest
import torch

from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.collectors.text import TextCollector
from lucidrl.errors import CheckpointError, EnvironmentFailure
from tests.faults.records import digests, metrics
from tests.tiers import slow_except

DRAWING = (
    "env.name=tests.faults.drawing:DrawingEnv",
    "env.kwargs={}",
    "data.validation_fraction=0",
    "validation.num_prompts=0",
    "checkpoint.metric=null",
    "policy.optimizer.name=tests.faults.drawing.NoisyAdamW",
)
"""An environment and an optimizer that draw from all generators of the process; ten prompts."""


def changes_said(folder):
    return [message for message in folder.watcher.messages if message.startswith("resuming")]


@pytest.fixture(autouse=True)
def _shuffle_generators():
    """Nothing may depend on what ran before in this process."""
    random.seed()
    np.random.seed()
    torch.seed()


@pytest.fixture
def orders(monkeypatch):
    """Names of the examples of each training micro-batch of supervised runs."""
    from lucidrl.recipes import language

    seen: list[list[str]] = []

    class Recording(language.NLLLoss):
        def __call__(self, outputs, data, *counts):
            if torch.is_grad_enabled():
                seen.append(list(data["idx"]))
            return super().__call__(outputs, data, *counts)

    monkeypatch.setattr(language, "NLLLoss", Recording)
    return seen


@pytest.mark.parametrize("algorithm", slow_except(["grpo", "distill", "sft", "dpo", "reward_model"], "grpo"))
@pytest.mark.parametrize("precision", slow_except(["float32", "bfloat16"], "bfloat16"))
def test_a_stopped_and_resumed_run_is_bit_identical_to_an_uninterrupted_run(run, algorithm, precision):
    setting = f"policy.precision={precision}"
    whole, _ = run(algorithm, "whole", setting)
    broken, last_step = run(algorithm, "broken", setting, interrupt_at=2)
    assert last_step == 2
    broken, last_step = run(algorithm, "broken", setting, resume=True)
    assert last_step == 4
    assert broken.lines() == whole.lines()
    assert min(whole.train_metric("grad_norm")) > 0
    assert digests(broken.path) == digests(whole.path)
    assert changes_said(broken) == []


@pytest.mark.parametrize("steps", slow_except([1, 2, 4], 2))
def test_grpo_that_died_after_a_checkpoint_ends_as_an_uninterrupted_run_even_within_an_epoch(run, steps):
    settings = (*DRAWING, f"grpo.max_steps={2 * steps}", f"checkpoint.every={steps}", "policy.train_micro_batch_size=3")
    settings = (*settings, "policy.sequence_packing.enabled=false", "collector.samples_per_prompt=2")
    whole, _ = run("grpo", "whole", *settings)
    with pytest.raises(RuntimeError, match="died"):
        run("grpo", "broken", *settings, die_at=steps + 1)
    broken, last_step = run("grpo", "broken", *settings, resume=True)
    assert last_step == 2 * steps
    assert digests(broken.path) == digests(whole.path)
    assert min(whole.train_metric("grad_norm")) > 0


@pytest.mark.parametrize("steps", slow_except([1, 3], 3))
def test_sft_that_died_after_a_checkpoint_uses_the_same_examples_in_the_same_order(run, orders, steps):
    settings = (*DRAWING, f"sft.max_steps={2 * steps}", f"checkpoint.every={steps}", "sft.examples_per_step=7")
    whole, _ = run("sft", "whole", *settings)
    expected = list(orders)
    orders.clear()
    with pytest.raises(RuntimeError, match="died"):
        run("sft", "broken", *settings, die_at=steps + 1)
    del orders[steps:]
    broken, _ = run("sft", "broken", *settings, resume=True)
    assert orders == expected
    assert len(expected) == 2 * steps
    assert digests(broken.path) == digests(whole.path)


def test_other_numbers_of_examples_a_step_skip_and_repeat_none(run, orders):
    settings = (*DRAWING, "sft.examples_per_step=4", "sft.max_steps=2")
    run("sft", "run", *settings)
    run("sft", "run", *DRAWING, "sft.examples_per_step=2", "sft.max_steps=3", resume=True)
    names = [name for batch in orders for name in batch]
    assert len(names) == len(set(names)) == 10


@pytest.mark.parametrize("algorithm", slow_except(["grpo", "sft"], "grpo"))
def test_the_same_seed_gives_the_same_metrics_and_weights(run, algorithm):
    first, _ = run(algorithm, "first")
    again, _ = run(algorithm, "again")
    other, _ = run(algorithm, "other", "seed=1")
    assert digests(first.path) == digests(again.path)
    assert metrics(first.path) != metrics(other.path)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_draws_of_environment_and_optimizer(run):
    first, again, other = (run("grpo", f"run {n}", *DRAWING, f"seed={seed}")[0] for n, seed in enumerate((1, 1, 2)))
    assert digests(first.path) == digests(again.path)
    assert first.train_metric("reward") != other.train_metric("reward")


@pytest.mark.slow
def test_a_longer_run_continues_a_finished_one(run):
    whole, _ = run("grpo", "whole", "grpo.max_steps=4")
    run("grpo", "short", "grpo.max_steps=2")
    longer, last_step = run("grpo", "short", "grpo.max_steps=4", resume=True)
    assert last_step == 4
    assert longer.lines() == whole.lines()


def test_trackers_continue_with_the_step_after_the_checkpoint(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run("grpo", "run", "tracking.tensorboard=true", interrupt_at=2)
    resumed, _ = run("grpo", "run", "tracking.tensorboard=true", resume=True)
    events = EventAccumulator(str(resumed.path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]


def test_other_numbers_of_threads_are_said(run, monkeypatch):
    num_threads = torch.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 64)
        run("grpo", "run", "grpo.max_steps=1")
    resumed, _ = run("grpo", "run", "grpo.max_steps=2", resume=True)
    assert changes_said(resumed) == [
        f"resuming with other numbers of CPU threads ([{num_threads}], saved with [64]): results will not be bit-exact"
    ]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("arithmetic", "has a state of the environment, but ArithmeticEnv has no state"),
        ("tests.faults.drawing:Picky", r"Picky\.load_state_dict raised KeyError: 'level'"),
    ],
)
def test_the_state_of_another_environment_is_refused(run, env, message):
    run("grpo", "run", *DRAWING, "grpo.max_steps=1")
    with pytest.raises(CheckpointError, match=message):
        run("grpo", "run", *DRAWING, "grpo.max_steps=2", f"env.name={env}", resume=True)


def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(run):
    with pytest.raises(EnvironmentFailure, match=r"Unsavable\.state_dict failed"):
        run("grpo", "run", *DRAWING, "env.name=tests.faults.drawing:Unsavable")


def test_checkpoints_come_at_their_interval_and_at_the_end(run):
    folder, _ = run("grpo", "run", "grpo.max_steps=3", "checkpoint.every=2", "checkpoint.keep_last=5")
    assert sorted(path.name for path in (folder.path / "checkpoints").iterdir()) == ["step_2", "step_3"]


def saved_with(folder, step):
    """The saved state of a step."""
    return CheckpointManager(folder.path / "checkpoints").load(step).state


@pytest.mark.parametrize("algorithm", slow_except(["grpo", "sft"], "grpo"))
def test_a_stop_skips_the_validation_that_is_due_and_a_resume_makes_up_for_it(run, algorithm):
    whole, _ = run(algorithm, "whole")
    stopped, last_step = run(algorithm, "run", interrupt_at=2)
    assert (last_step, stopped.watcher.validated, checkpoints(stopped)) == (2, [0], ["step_2"])
    assert saved_with(stopped, 2)["is_validation_skipped"]
    resumed, _ = run(algorithm, "run", resume=True)
    assert resumed.watcher.validated == [2, 4]
    assert resumed.lines() == whole.lines()


@pytest.fixture
def stop_in_batch(monkeypatch):
    """stop_in_batch(n): Ctrl-C while the n-th batch of validation prompts is completed; returns the batches so far."""

    def arm(number):
        sizes: list[int] = []
        run_groups = TextCollector._run_groups

        def counted(collector, prompts, samples, asked, batch, greedy=False):
            if greedy:
                sizes.append(len(prompts))
                if len(sizes) == number:
                    os.kill(os.getpid(), signal.SIGINT)
            return run_groups(collector, prompts, samples, asked, batch, greedy)

        monkeypatch.setattr(TextCollector, "_run_groups", counted)
        return sizes

    return arm


def test_a_stop_ends_the_validation_that_is_going_on(run, stop_in_batch):
    sizes = stop_in_batch(3)  # the first of two of the second validation
    folder, last_step = run("grpo", "run", "validation.prompts_per_batch=3")
    assert sizes == [3, 3, 3]
    assert (last_step, folder.watcher.validated, checkpoints(folder)) == (2, [0], ["step_2"])
    assert not (folder.path / "samples/validation_2.jsonl").exists()


def test_a_stop_in_the_validation_before_the_first_step_ends_the_run_with_nothing_to_save(run, stop_in_batch):
    sizes = stop_in_batch(1)
    folder, last_step = run("grpo", "run", "validation.prompts_per_batch=3")
    assert (last_step, sizes) == (0, [3])
    assert "nothing new to save" in folder.watcher.messages[-1]
    assert not (folder.path / "checkpoints").exists()


def test_the_size_of_validation_batches_changes_nothing(run):
    whole, _ = run("grpo", "whole", "grpo.max_steps=1")
    parts, _ = run("grpo", "parts", "grpo.max_steps=1", "validation.prompts_per_batch=3")
    assert parts.lines() == whole.lines()


def checkpoints(folder):
    return sorted(path.name for path in (folder.path / "checkpoints").glob("step_*"))


def test_the_checkpoint_at_the_end_can_be_left_out_but_not_that_of_a_stopped_run(run):
    settings = ("grpo.max_steps=3", "checkpoint.every=2", "checkpoint.final=false")
    folder, _ = run("grpo", "whole", *settings)
    assert checkpoints(folder) == ["step_2"]
    stopped, last_step = run("grpo", "stopped", *settings, interrupt_at=1)
    assert (checkpoints(stopped), last_step) == (["step_1"], 1)


@pytest.mark.parametrize("algorithm", slow_except(["grpo", "sft"], "grpo"))
def test_weights_can_be_saved_alone_and_then_a_resume_is_refused(run, algorithm):
    whole, _ = run(algorithm, "whole", f"{algorithm}.max_steps=2")
    alone, _ = run(algorithm, "alone", f"{algorithm}.max_steps=2", "checkpoint.weights_only=true")
    ours, theirs = (folder.path / "checkpoints/step_2" for folder in (alone, whole))
    assert not (ours / "optimizer").exists()
    assert (ours / "policy/model.safetensors").read_bytes() == (theirs / "policy/model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"step_2 has no optimizer .*checkpoint\.weights_only=true.*start a new"):
        run(algorithm, "alone", resume=True)


def test_there_is_nothing_to_resume_before_the_first_checkpoint(run):
    with pytest.raises(CheckpointError, match="no valid checkpoint to resume from"):
        run("grpo", "run", resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", slow_except(["grpo", "sft"], "grpo"))
def test_a_run_on_a_filtered_mixture_resumes_bit_identical(run, tmp_path, algorithm):
    rows = [{"question": f"{n}+1=", "answer": n + 1, "completion": str(n + 1), "level": n % 3} for n in range(60)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = ["question,answer,completion,level", *(f"{n}+2=,{n + 2},{n + 2},1" for n in range(30))]
    (tmp_path / "sums.csv").write_text("\n".join(lines))
    settings = (
        f"data.file=[{{file: {tmp_path}/sums.jsonl, weight: 2}}, {tmp_path}/sums.csv]",
        "data.prompt=question",
        "data.where={level: [1, 2]}",
        f"data.max_prompt_tokens={6 if algorithm == 'grpo' else 9}",
        "data.validation_fraction=0.2",
    )
    whole, _ = run(algorithm, "whole", *settings)
    run(algorithm, "broken", *settings, interrupt_at=2)
    broken, last_step = run(algorithm, "broken", *settings, resume=True)
    assert last_step == 4
    assert broken.lines() == whole.lines()
    assert digests(broken.path) == digests(whole.path)
    if algorithm == "grpo":
        assert sum(whole.train_metric("filtered_rows")) > 0
