"""Tensors are distributed evenly over files, and a wrong index is refused."""

import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from lucidrl.checkpoint.tensors import index_name, index_text, open_tensors, plan_shards, shard_file_names
from lucidrl.errors import CheckpointError

SIZES = st.dictionaries(st.text("abcdef", min_size=1, max_size=4), st.integers(0, 100), max_size=30)


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(1, 5), st.integers(1, 150))
def test_every_tensor_is_in_one_file_none_too_large_and_every_writer_has_some(sizes, num_writers, largest):
    shards = plan_shards(sizes, num_writers, largest)
    assert sorted(name for shard in shards for name in shard) == sorted(sizes)
    assert all(sum(sizes[name] for name in shard) <= largest or len(shard) == 1 for shard in shards)
    assert len(shards) >= min(num_writers, len(sizes))
    assert all(shards) or shards == [[]]


def test_files_are_of_about_equal_size_and_equally_many_per_writer():
    sizes = {"embedding": 60, **{f"layer_{number}": 10 for number in range(30)}}
    shards = plan_shards(sizes, 2, largest_bytes=130)
    assert [sum(sizes[name] for name in shard) for shard in shards] == [90, 90, 90, 90]


def test_one_file_needs_no_number():
    assert shard_file_names("model", 1) == ["model.safetensors"]
    assert shard_file_names("model", 2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def folder(tmp_path):
    """Two shards and their index."""
    shards = dict(zip(shard_file_names("model", 2), (["a", "c"], ["b"]), strict=True))
    for file, names in shards.items():
        save_file({name: torch.full((4,), ord(name)) for name in names}, tmp_path / file)
    (tmp_path / index_name("model")).write_text(index_text(shards, {"a": 32, "b": 32, "c": 32}))
    return tmp_path


def edit_index(folder, change):
    path = folder / index_name("model")
    content = json.loads(path.read_text())
    change(content["weight_map"])
    path.write_text(json.dumps(content))


def test_all_shards_are_opened(folder):
    assert {name: int(tensor[0]) for name, tensor in open_tensors(folder, "model").items()} == {
        name: ord(name) for name in "abc"
    }


def test_changing_an_opened_tensor_leaves_the_file_alone(folder):
    open_tensors(folder, "model")["a"].fill_(1)
    assert int(open_tensors(folder, "model")["a"][0]) == ord("a")


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", "..", ""])
def test_an_index_that_leaves_the_folder_is_refused(folder, file):
    edit_index(folder, lambda index: index.update(a=file))
    with pytest.raises(CheckpointError, match="is not the name of a safetensors file in that folder"):
        open_tensors(folder, "model")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda index: index.update(d="model-00002-of-00002.safetensors"), "00002.safetensors .*: d is missing"),
        (lambda index: index.update(a="model-00002-of-00002.safetensors"), "a is stored in model-00001-of-00002"),
        (lambda index: index.pop("c"), "c is stored in model-00001-of-00002.safetensors, but the index says nothing"),
        (lambda index: index.update(d="gone.safetensors"), "gone.safetensors cannot be used: it is missing"),
        (lambda index: index.update(d=7), "no weight_map from names to files"),
    ],
)
def test_an_index_that_does_not_match_its_files_is_refused(folder, change, complaint):
    edit_index(folder, change)
    with pytest.raises(CheckpointError, match=complaint):
        open_tensors(folder, "model")


def test_a_tensor_that_is_stored_twice_is_refused(folder):
    save_file({name: torch.zeros(4) for name in "ab"}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="a is stored twice"):
        open_tensors(folder, "model")


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": ["a"]}', "[" * 100_000, "\ud800".encode("utf-8", "ignore")])
def test_a_damaged_index_is_refused(folder, text):
    (folder / index_name("model")).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_tensors(folder, "model")


@pytest.mark.parametrize("size", [0, 7, 100])
def test_a_truncated_shard_is_refused(folder, size):
    os.truncate(folder / "model-00001-of-00002.safetensors", size)
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors .*not a readable safetensors file"):
        open_tensors(folder, "model")


def test_a_missing_file_is_named_and_a_pipe_is_not_opened(tmp_path):
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be used: it is missing"):
        open_tensors(tmp_path, "model")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="it is not a regular file"):
        open_tensors(tmp_path, "model")
