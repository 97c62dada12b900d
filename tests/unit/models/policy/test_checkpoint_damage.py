"""Damaged and hostile checkpoints are refused, naming file and reason, before any weight changes."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.checkpoint.manifest import write_manifest
from lucidrl.errors import CheckpointError
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.policy import Policy


@pytest.fixture
def checkpoint(tiny_model, tokenizer, make_rows, tmp_path) -> Path:
    """A committed checkpoint of a run."""
    policy = Policy(PolicyConfig(model_name=tiny_model("llama")), tokenizer)
    policy.train(make_rows(), NLLLoss())
    manager = CheckpointManager(tmp_path / "checkpoints")
    pending = manager.begin(1)
    policy.begin_save(pending.folder)
    pending.commit(policy.finish_save())
    return manager.load(1).path


@pytest.fixture
def refuses(make_worker, weights_of):
    """Check that a fresh worker refuses a checkpoint and does not change; return the message."""
    worker = make_worker()
    before = weights_of(worker)

    def refuse(checkpoint: Path, method: str = "load_checkpoint") -> str:
        with pytest.raises(CheckpointError) as refused:
            getattr(worker, method)(str(checkpoint / "policy"), str(checkpoint / "optimizer"))
        after = weights_of(worker)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        return str(refused.value)

    return refuse


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def link(path: Path) -> None:
    path.symlink_to(path.rename(path.parent.parent.parent / "elsewhere"))


DAMAGES = {
    truncate: "bytes instead of",
    flip_a_bit: "does not match its SHA-256",
    Path.unlink: "it is missing",
    link: "it is a symbolic link",
}


@pytest.mark.parametrize("name", ["policy/model.safetensors", "optimizer/optimizer.safetensors"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_worker_finds_damage_by_the_manifest_of_the_checkpoint(checkpoint, refuses, damage, name):
    damage(checkpoint / name)
    message = refuses(checkpoint)
    assert name in message
    assert DAMAGES[damage] in message


@pytest.mark.parametrize(
    "name", ["policy/model.safetensors", "optimizer/optimizer.safetensors", "optimizer/optimizer.json"]
)
@pytest.mark.parametrize("damage", [truncate, Path.unlink])
def test_damage_of_a_folder_without_a_manifest_is_found_by_its_headers(checkpoint, refuses, damage, name):
    (checkpoint / "manifest.json").unlink()
    damage(checkpoint / name)
    assert Path(name).name in refuses(checkpoint)


def test_verified_files_are_not_hashed_again(checkpoint, make_worker):
    flip_a_bit(checkpoint / "policy" / "model.safetensors")
    make_worker().checkpoints.load(str(checkpoint / "policy"), str(checkpoint / "optimizer"), verify=False)


def edit(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


HOSTILE = {
    "another optimizer": (lambda s: s["settings"].update(kind="SGD"), "saved with SGD, but this policy uses AdamW"),
    "no groups": (lambda s: s["settings"].pop("param_groups"), "the file has no param_groups"),
    "many groups": (
        lambda s: s["settings"].update(param_groups=[{}, {}]),
        "2 param_groups without pattern, not 1",
    ),
    "another model": (lambda s: s["shapes"].update({"lm_head.weight": [7]}), r"from another model: lm_head\.weight"),
    "a tensor that is not there": (lambda s: s.update(state={"x": {"y": {"$tensor": "gone"}}}), "'gone'"),
    "a name that is a list": (lambda s: s.update(state={"$tensor": ["a"]}), "does not fit this policy's optimizer"),
    "no dictionary": (lambda s: s.update(state=[1]), "does not fit this policy's optimizer"),
    "an unknown weight": (lambda s: s["state"].update({"lm_head.weight": {"exp_avg": 1}}), "does not fit this policy"),
    "swapped shapes": (
        lambda s: s["state"]["model.norm.weight"].update(s["state"]["model.embed_tokens.weight"]),
        r"exp_avg(_sq)? of model\.norm\.weight has shape \[\d+, 32\] instead of \[32\]",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_structure_of_the_optimizer_is_refused(checkpoint, refuses, case):
    change, message = HOSTILE[case]
    edit(checkpoint / "optimizer" / "optimizer.json", change)
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint)
    assert re.search(message, refuses(checkpoint))


class Canary:
    """Unpickling it creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_no_pickle_in_any_file_is_ever_executed(checkpoint, make_worker, tmp_path):
    sung = tmp_path / "sung"
    song = pickle.dumps(Canary(sung))
    pickle.loads(song)
    assert sung.exists(), "the canary works"
    sung.unlink()
    originals = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    additions = [
        checkpoint / folder / name
        for folder in ("policy", "optimizer", ".")
        for name in ("pytorch_model.bin", "optimizer.pt", "x.pkl")
    ]
    manager, worker = CheckpointManager(checkpoint.parent), make_worker()
    loads = [
        lambda: manager.load(1),
        lambda: worker.load_checkpoint(str(checkpoint / "policy"), str(checkpoint / "optimizer")),
        lambda: worker.checkpoints.load(str(checkpoint / "policy"), str(checkpoint / "optimizer"), verify=False),
    ]
    refused = 0
    for path in [*originals, *additions]:
        for has_valid_manifest in (False, True):
            for content in (song, originals.get(path, b"") + song):
                path.write_bytes(content)
                if has_valid_manifest and path.name != "manifest.json":
                    write_manifest(checkpoint)
                for load in loads:
                    try:
                        load()
                    except CheckpointError:
                        refused += 1
                    assert not sung.exists(), f"a pickle in {path} was executed"
        path.unlink()
        for original, content in originals.items():
            original.write_bytes(content)
    assert refused > 2 * len(originals)


def test_only_folders_of_an_earlier_save_are_replaced(make_worker, tmp_path):
    worker, folder = make_worker(), tmp_path / "weights"
    worker.save_checkpoint(str(folder))
    worker.save_checkpoint(str(folder))
    (folder / "NOTES.md").write_text("mine")
    foreign = tmp_path / "extension"
    foreign.mkdir()
    (foreign / "manifest.json").write_text('{"name": "not ours"}')
    with CheckpointManager(tmp_path / "run").saving(1) as step:
        worker.save_checkpoint(str(step / "policy"))
    for taken in (folder, foreign, tmp_path / "run" / "step_1"):
        before = sorted(taken.rglob("*"))
        with pytest.raises(CheckpointError, match="holds files that save_checkpoint did not write"):
            worker.save_checkpoint(str(taken))
        assert sorted(taken.rglob("*")) == before


def test_integer_weights_are_refused(make_worker, tmp_path):
    worker = make_worker()
    worker.save_checkpoint(str(tmp_path / "weights"))
    (tmp_path / "weights" / "manifest.json").unlink()
    file = tmp_path / "weights" / "model.safetensors"
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(file).items()}, file)
    with pytest.raises(CheckpointError, match=r"is torch\.int8, but weights must be floating point"):
        worker.load_checkpoint(str(tmp_path / "weights"))
