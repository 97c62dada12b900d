"""Runs on preferences: what they learn, their reference policy, and resume."""

from __future__ import annotations

import json
import math

import pytest
import torch

from lucidrl.algorithms.preferences import PreferenceRows
from lucidrl.algorithms.reference_cache import FILE_NAME, CachedReference
from lucidrl.data.datasets import Preference
from lucidrl.data.messages import supervised_example
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import CheckpointError, DataError
from lucidrl.models.embedded import embedded_tokenizer
from tests.faults.records import digests
from tests.tiers import slow_except

LOSSES = ["dpo", "ipo", "kto"]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def preference(number: int, chosen: str | None = "yes", rejected: str | None = "no") -> Preference:
    prompt = (message("user", f"{number}?"), message("assistant", "what?"), message("user", f"{number}!"))
    both = ((message("assistant", text),) if text is not None else None for text in (chosen, rejected))
    return Preference(f"p{number}", prompt, *both, key=str(number))


def rows_of() -> PreferenceRows:
    tokenizer = embedded_tokenizer()
    return PreferenceRows(
        lambda one, completion: supervised_example(tokenizer, [*one.prompt, *completion]), tokenizer.pad_token_id
    )


def learned(batch: BatchedDataDict) -> list[str]:
    """The text of each row that counts in the loss."""
    ids = [row[mask.bool()] for row, mask in zip(batch["input_ids"], batch["token_mask"], strict=True)]
    return [embedded_tokenizer().decode(row) for row in ids]


def test_only_the_tokens_of_the_completion_count():
    batch = rows_of().batch([preference(1), preference(2, "maybe")])
    assert learned(batch) == ["yes<|end|>", "no<|end|>", "maybe<|end|>", "no<|end|>"]
    assert batch["preference"].tolist() == [1, -1, 1, -1]
    assert batch["pair_ids"].tolist() == [0, 0, 1, 1]


def test_single_completions_are_rows_without_a_partner():
    batch = rows_of().batch([preference(1, rejected=None), preference(2), preference(3, chosen=None)])
    assert learned(batch) == ["yes<|end|>", "yes<|end|>", "no<|end|>", "no<|end|>"]
    assert batch["pair_ids"].tolist() == [0, 1, 1, 2]


def test_mismatched_rows_have_the_completions_of_another_prompt():
    batch = rows_of().mismatched([preference(1, "a", None), preference(2, "b", "c")])
    texts = [embedded_tokenizer().decode(row) for row in batch["input_ids"]]
    assert ["1!" in text for text in texts] == [True, True, False]
    assert learned(batch) == ["b<|end|>", "c<|end|>", "a<|end|>"]


@pytest.fixture
def separable(tmp_path) -> str:
    """Settings of a run on pairs that prefer short completions."""
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n}+{n}=", "chosen": f"{2 * n}", "rejected": f"{2 * n}, dear friend"} for n in range(10, 90)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return f"data.file={path}"


@pytest.mark.parametrize("options", slow_except([*LOSSES, "dpo policy.lora.rank=4 lr=3e-3"], "dpo", "kto"))
def test_held_out_accuracy_rises(run, separable, options):
    loss, *others = options.split()
    settings = (f"dpo.loss={loss}", "lr=3e-4", *others, "dpo.max_steps=6", "env.kwargs={}")
    validation = ("validation.every=0", "validation.num_prompts=30", "data.validation_fraction=0.4")
    folder, _ = run("dpo", "run", separable, *settings, *validation)
    accuracies = [line["validation/accuracy"] for line in folder.lines() if "validation/accuracy" in line]
    assert accuracies[0] == 0.5  # the policy is the reference policy, bit by bit
    assert accuracies[-1] > 0.9, accuracies


def test_the_first_step_compares_equal_policies(run):
    for loss, expected in (("dpo", math.log(2)), ("ipo", 25.0), ("kto", 0.5)):
        folder, _ = run("dpo", loss, f"dpo.loss={loss}", "dpo.max_steps=1", "validation.num_prompts=0")
        assert folder.train_metric("loss")[0] == pytest.approx(expected, rel=1e-4)
        assert folder.train_metric("reward_margin")[0] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("loss", slow_except(["dpo", "kto"]))
def test_a_cached_reference_trains_as_a_swapped_one(run, loss):
    settings = (f"dpo.loss={loss}", "policy.precision=float64", "dpo.max_steps=3")
    swapped, _ = run("dpo", "swapped", *settings)
    cached, _ = run("dpo", "cached", *settings, "dpo.reference=cached")
    assert (cached.path / FILE_NAME).exists()
    for name in ("loss", "grad_norm", "reward_margin"):
        assert cached.train_metric(name) == pytest.approx(swapped.train_metric(name), rel=1e-3, abs=1e-5)
    losses = [
        [line["validation/loss"] for line in each.lines() if "validation/loss" in line] for each in (swapped, cached)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("loss", slow_except(LOSSES, "kto"))
def test_a_resumed_run_with_a_cached_reference_is_bit_identical_and_scores_only_new_rows(run, loss):
    settings = (f"dpo.loss={loss}", "dpo.reference=cached")
    whole, _ = run("dpo", "whole", *settings)
    broken, last_step = run("dpo", "broken", *settings, interrupt_at=2)
    assert last_step == 2
    broken, _ = run("dpo", "broken", *settings, resume=True)
    assert broken.lines() == whole.lines()
    assert digests(broken.path) == digests(whole.path)
    assert not [text for text in broken.watcher.messages if "with the reference policy" in text]
    longer, last_step = run("dpo", "broken", *settings, "dpo.max_steps=6", resume=True)
    assert last_step == 6
    assert len([text for text in longer.watcher.messages if "with the reference policy" in text]) == 1


def test_new_rows_of_a_resumed_run_are_scored_with_the_initial_weights(run):
    common = ("lr=0.01", "validation.num_prompts=0", "policy.precision=float64")
    whole, _ = run("dpo", "whole", *common, "dpo.max_steps=4")
    broken, _ = run("dpo", "broken", *common, "dpo.reference=cached", "dpo.max_steps=2")
    broken, _ = run("dpo", "broken", *common, "dpo.reference=cached", "dpo.max_steps=4", resume=True)
    assert broken.train_metric("loss") == pytest.approx(whole.train_metric("loss"), rel=1e-4)


def test_a_damaged_cache_is_named_and_one_of_another_model_is_not_used(tmp_path):
    path, batch = tmp_path / FILE_NAME, rows_of().batch([preference(1)])
    cache = CachedReference(path, "one")
    assert cache.add([batch, batch], lambda rows: torch.arange(rows.size).double()) == 2
    assert CachedReference(path, "one").sums(batch).tolist() == [0, 1]
    assert CachedReference(path, "one").add([batch], torch.clone) == 0
    with pytest.raises(KeyError):
        CachedReference(path, "another").sums(batch)
    path.write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=r"is damaged .*; delete it"):
        CachedReference(path, "one")


def test_kto_learns_from_labels_in_a_file(run, tmp_path):
    path = tmp_path / "labels.jsonl"
    rows = [{"prompt": f"{n}+1=", "completion": str(n + n % 2), "label": n % 2 == 1} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    settings = (f"data.file={path}", "dpo.max_steps=2", "env.name=arithmetic", "env.kwargs={}")
    folder, _ = run("dpo", "run", *settings, "dpo.loss=kto")
    assert all(math.isfinite(loss) for loss in folder.train_metric("loss"))
    assert not [line for line in folder.lines() if "validation/accuracy" in line and line["validation/accuracy"] == 0]
    with pytest.raises(DataError, match=r"labels.jsonl:\d+: has no column 'chosen' \(data.chosen\)"):
        run("dpo", "pairs", *settings)
