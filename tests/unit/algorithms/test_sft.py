"""The supervised loop: it learns what is written, and validates on what it does not train on."""

from __future__ import annotations

import orjson


def test_the_loss_falls_on_what_is_learned(run):
    folder, _ = run("sft", "run", "sft.max_steps=8", "policy.model_name=embedded-untrained")
    losses = folder.train_metric("nll")
    assert losses[-1] < losses[0] - 0.5
    held_out = [line["validation/loss"] for line in folder.lines() if "validation/loss" in line]
    assert held_out[-1] < held_out[0] - 0.5


def test_validation_measures_loss_and_reward_of_the_environments_prompts(run):
    folder, _ = run("sft", "run", "sft.max_steps=1")
    before = folder.lines()[0]
    assert before["step"] == 0
    assert 0 <= before["validation/accuracy"] <= 1


def test_validation_needs_no_particular_number_of_examples(run):
    _, last_step = run("sft", "run", "sft.max_steps=1", "policy.train_global_batch_size=8", "validation.num_prompts=5")
    assert last_step == 1


def test_examples_come_from_a_file(run, tmp_path):
    path = tmp_path / "talk.jsonl"
    rows = [{"prompt": f"say {n}", "completion": f"{n}"} for n in range(30)]
    path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    folder, _ = run("sft", "run", "sft.max_steps=2", f"data.file={path}")
    assert len(folder.train_metric("nll")) == 2
    assert "validation/loss" in folder.lines()[0]
    assert "validation/accuracy" not in folder.lines()[0]


def test_a_file_may_hold_nothing_out(run, tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text('{"prompt": "say 1", "completion": "1"}\n')
    folder, last_step = run("sft", "run", "sft.max_steps=1", f"data.file={path}", "data.validation_fraction=0")
    assert last_step == 1
    assert [line["step"] for line in folder.lines()] == [1]
