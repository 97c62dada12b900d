"""Every layout resumes from the checkpoints of every other layout, bit-exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lucidrl.checkpoint import writer as writer_module
from lucidrl.checkpoint.tensors import open_tensors
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import CheckpointError
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.policy import checkpoint as checkpoint_module
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from lucidrl.models.policy.fsdp1_policy_worker import FSDP1PolicyWorker
from lucidrl.models.policy.worker import PolicyWorker
from tests.tiers import slow_except

FIXED = {"sequence_packing": {"enabled": False}, "train_micro_batch_size": 2}
KINDS: dict[str, tuple[type[PolicyWorker], dict[str, Any]]] = {
    "alone": (DTensorPolicyWorker, {}),
    "dp2": (DTensorPolicyWorker, {}),
    "tp2": (DTensorPolicyWorker, {"dtensor_cfg": {"tensor_parallel_size": 2}}),
    "fsdp1": (FSDP1PolicyWorker, {}),
}
ON_TWO_RANKS = ("dp2", "tp2", "fsdp1")
Rows = dict[str, Any]


def make_worker(kind: str, **options: Any) -> PolicyWorker:
    worker_class, layout = KINDS[kind]
    optimizer = {"optimizer": {"kwargs": {"lr": 0.01}}}
    config = PolicyConfig(**{"precision": "bfloat16", **FIXED, **optimizer, **layout, **options})
    return worker_class(config, embedded_tokenizer(), init_reference_model=False)


def train(worker: PolicyWorker, rows: Rows, steps: int = 1) -> None:
    data, layout = BatchedDataDict(rows), worker.mesh.layout
    share = data.size // layout.dp
    start = layout.data_rank(worker.rank) * share
    for _ in range(steps):
        worker.train(data.slice(start, start + share), NLLLoss())


def train_and_save(kind: str, rows: Rows, folder: str, precision: str = "bfloat16") -> None:
    worker = make_worker(kind, precision=precision)
    train(worker, rows, 2)
    worker.save_checkpoint(f"{folder}/weights", f"{folder}/optimizer", f"{folder}/weights")


def load_and_save(kinds: list[str], source: str, target: str) -> None:
    """Load a checkpoint in workers of each kind, trained on other rows before, and save it again."""
    for kind in kinds:
        worker = make_worker(kind, model_name="embedded-untrained")
        worker.load_checkpoint(f"{source}/weights", f"{source}/optimizer")
        worker.save_checkpoint(f"{target}/{kind}/weights", f"{target}/{kind}/optimizer")


def content(folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    tensors = open_tensors(folder / "weights", "model") | open_tensors(folder / "optimizer", "optimizer")
    return tensors, json.loads((folder / "optimizer" / "optimizer.json").read_text())


@pytest.fixture
def rows(make_rows) -> Rows:
    return make_rows().get_dict()


@pytest.mark.slow
@pytest.mark.parametrize("source", KINDS)
def test_a_checkpoint_is_the_same_after_it_went_through_another_layout(two_ranks, rows, tmp_path, source):
    folder = tmp_path / "source"
    if source == "alone":
        train_and_save(source, rows, str(folder))
    else:
        two_ranks(train_and_save, source, rows, str(folder))
    load_and_save(["alone"], str(folder), str(tmp_path))
    two_ranks(load_and_save, list(ON_TWO_RANKS), str(folder), str(tmp_path))
    tensors, structure = content(folder)
    assert {tensor.dtype for name, tensor in tensors.items() if name.startswith("model.")} == {torch.bfloat16}
    assert {name.rpartition("/")[2] for name in tensors if "/" in name} == {"exp_avg", "exp_avg_sq", "step", "master"}
    for kind in KINDS:
        found, found_structure = content(tmp_path / kind)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items()), kind
        assert found_structure == structure


@pytest.mark.parametrize("kind", slow_except(ON_TWO_RANKS, "tp2"))
def test_transformers_reads_what_two_ranks_wrote_one_file_each(two_ranks, rows, tmp_path, kind):
    two_ranks(train_and_save, kind, rows, str(tmp_path), "float32")
    shards = sorted(path.name for path in (tmp_path / "weights").glob("model*.safetensors"))
    assert shards == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    assert model.dtype == torch.float32
    saved = open_tensors(tmp_path / "weights", "model")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.named_parameters())
    worker = make_worker("alone", precision="float32")
    worker.load_checkpoint(str(tmp_path / "weights"))
    ids = torch.arange(2, 12)[None]
    own = worker.model.model
    own.set_attn_implementation("sdpa")
    assert torch.equal(model(ids).logits, own(ids).logits)


def save_in_the_background(rows: Rows, folder: str) -> list[int]:
    """Save the same state blocking and in the background; return announced and written bytes."""
    worker = make_worker("dp2")
    train(worker, rows)
    worker.save_checkpoint(f"{folder}/now/weights", f"{folder}/now/optimizer")
    size_bytes = worker.checkpoints.begin(f"{folder}/later/weights", f"{folder}/later/optimizer")
    train(worker, rows)
    digests = worker.checkpoints.finish()
    assert worker.checkpoints.writer.is_done()
    return [size_bytes, sum(path.stat().st_size for path in digests)]


@pytest.mark.slow
def test_a_background_save_during_training_equals_a_blocking_save(two_ranks, rows, tmp_path):
    for announced, written in two_ranks(save_in_the_background, rows, str(tmp_path)):
        assert announced == written > 0
    files = [path for path in (tmp_path / "now").rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert len(files) >= 8
    for path in files:
        assert (tmp_path / "later" / path.relative_to(tmp_path / "now")).read_bytes() == path.read_bytes()


def refusals(folder: str, kind: str, fail_on_rank: int | None) -> list[str]:
    """Return this rank's error of each kind of call; the weights must not change."""
    worker = make_worker(kind)
    before = [weights.clone() for weights in worker.sharding.local_weights()]
    messages = []

    def attempt(call, *args):
        with pytest.raises(CheckpointError) as refused:
            call(*args)
        messages.append(str(refused.value))

    open_files = checkpoint_module.open_tensors
    if fail_on_rank == worker.rank:

        def fail(path, stem):
            raise CheckpointError(f"rank {worker.rank} does not see {path}")

        checkpoint_module.open_tensors = fail
    try:
        attempt(worker.load_checkpoint, f"{folder}/weights", f"{folder}/optimizer")
    finally:
        checkpoint_module.open_tensors = open_files
    attempt(worker.save_checkpoint, f"{folder}/foreign")
    assert all(map(torch.equal, worker.sharding.local_weights(), before))
    return messages


@pytest.mark.parametrize("fail_on_rank", [None, 0, 1])
def test_all_ranks_raise_the_error_of_the_rank_that_failed(two_ranks, rows, tmp_path, fail_on_rank):
    train_and_save("alone", rows, str(tmp_path))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").touch()
    if fail_on_rank is None:
        weights = tmp_path / "weights" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    first, second = two_ranks(refusals, str(tmp_path), "fsdp1", fail_on_rank)
    assert first == second
    assert ("its content does not match its SHA-256" if fail_on_rank is None else f"rank {fail_on_rank}") in first[0]
    assert "foreign exists and holds files that save_checkpoint did not write" in first[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign", "optimizer", "weights"]


def save_with_adafactor(rows: Rows, folder: str) -> str:
    worker = make_worker("dp2", optimizer={"name": "torch.optim.Adafactor", "kwargs": {"lr": 0.01}})
    train(worker, rows)
    with pytest.raises(CheckpointError) as refused:
        worker.save_checkpoint(f"{folder}/weights", f"{folder}/optimizer")
    worker.save_checkpoint(f"{folder}/weights")
    return str(refused.value)


def test_optimizer_state_that_cannot_be_gathered_is_refused(two_ranks, rows, tmp_path):
    for message in two_ranks(save_with_adafactor, rows, str(tmp_path)):
        assert "which cannot be gathered from several ranks" in message
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def fill_the_disk(folder: str) -> str:
    """Fill rank 1's disk while it writes; return this rank's error."""
    worker = make_worker("dp2")
    write = writer_module.TensorFile.write

    def full(file, path):
        raise OSError(28, "No space left on device")

    if worker.rank == 1:
        writer_module.TensorFile.write = full
    try:
        with pytest.raises(CheckpointError) as refused:
            worker.save_checkpoint(f"{folder}/weights")
    finally:
        writer_module.TensorFile.write = write
    return str(refused.value)


def test_a_disk_that_is_full_for_one_rank_stops_all_and_leaves_nothing(two_ranks, tmp_path):
    first, second = two_ranks(fill_the_disk, str(tmp_path))
    assert first == second
    assert "bytes are needed in all" in first
    assert list(tmp_path.iterdir()) == []
