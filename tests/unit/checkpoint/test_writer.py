"""A save writes the tensors as they were when it began, and reports a failing disk."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file

from lucidrl.checkpoint import writer as writer_module
from lucidrl.checkpoint.manifest import write_manifest
from lucidrl.checkpoint.tensors import TensorFile, TensorSpec, open_tensors
from lucidrl.checkpoint.writer import CheckpointWriter, TensorSet
from lucidrl.errors import CheckpointError


def tensor_set(folder, tensors, stem="model"):
    specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    return TensorSet(folder, stem, specs, lambda: tensors.items())


@pytest.fixture
def writer():
    return CheckpointWriter(0, 1, None, pin_memory=False)


@pytest.fixture
def held_back(monkeypatch):
    """Writing waits until the event is set."""
    event, write = threading.Event(), TensorFile.write

    def wait_and_write(file, path):
        assert event.wait(60)
        return write(file, path)

    monkeypatch.setattr(TensorFile, "write", wait_and_write)
    return event


def test_tensors_may_change_while_they_are_written(writer, held_back, tmp_path):
    tensors = {"a": torch.arange(5.0), "b": torch.arange(3)}
    size_bytes = writer.begin([tensor_set(tmp_path, tensors)], {tmp_path / "deep" / "note.txt": b"small"})
    assert not writer.is_done()
    for tensor in tensors.values():
        tensor.zero_()
    held_back.set()
    digests = writer.finish()
    assert writer.is_done()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], torch.arange(5.0))
    assert digests.keys() == {tmp_path / "model.safetensors", tmp_path / "deep" / "note.txt"}
    assert size_bytes == sum(path.stat().st_size for path in digests)
    write_manifest(tmp_path, digests)
    known = json.loads((tmp_path / "manifest.json").read_text())
    write_manifest(tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text()) == known


def test_a_second_save_waits_for_the_first_and_reuses_its_memory(writer, tmp_path):
    tensors = {"a": torch.ones(1000)}
    writer.begin([tensor_set(tmp_path / "1", tensors)], {})
    memory = writer._memory["model.safetensors"].data_ptr()
    tensors["a"].fill_(2)
    writer.begin([tensor_set(tmp_path / "2", tensors)], {})
    assert writer._memory["model.safetensors"].data_ptr() == memory
    writer.finish()
    assert [float(load_file(tmp_path / name / "model.safetensors")["a"][0]) for name in "12"] == [1, 2]


def test_several_files_have_an_index(writer, tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "plan_shards", lambda sizes, num_writers: [["a", "c"], ["b"]])
    tensors = {name: torch.full((2,), ord(name)) for name in "abc"}
    writer.begin([tensor_set(tmp_path, tensors)], {})
    writer.finish()
    opened = open_tensors(tmp_path, "model")
    assert all(torch.equal(opened[name], tensor) for name, tensor in tensors.items())


def test_finish_returns_at_once_if_no_save_was_begun(writer):
    assert writer.is_done()
    assert writer.finish() == {}


def test_too_little_disk_space_is_found_before_anything_is_written(writer, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 61, 39))
    complaint = r"no space left to save \S+step: 40 bytes are needed in all, 39 bytes are available"
    with pytest.raises(CheckpointError, match=complaint):
        writer.begin([tensor_set(tmp_path / "step", {"a": torch.ones(10)})], {})
    assert list((tmp_path / "step").iterdir()) == []
    assert writer.is_done()


@pytest.mark.parametrize(
    ("code", "complaint"), [(errno.ENOSPC, "8 bytes are needed in all"), (errno.EIO, "cannot write")]
)
def test_an_error_while_writing_is_raised_once(writer, tmp_path, monkeypatch, code, complaint):
    def fail(file, path):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(TensorFile, "write", fail)
    writer.begin([tensor_set(tmp_path, {"a": torch.ones(2)})], {})
    with pytest.raises(CheckpointError, match=rf"{complaint}.*unchanged"):
        writer.finish()
    assert writer.finish() == {}


def test_a_failed_save_raises_when_the_next_begins(writer, tmp_path):
    (tmp_path / "model.safetensors").write_text("in the way")
    writer.begin([tensor_set(tmp_path, {"a": torch.ones(2)})], {})
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint: .*model\.safetensors"):
        writer.begin([tensor_set(tmp_path / "next", {"a": torch.ones(2)})], {})


FULL_DISK = """
import collections, shutil, sys
from pathlib import Path
import torch
from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.checkpoint.tensors import TensorSpec
from lucidrl.checkpoint.writer import CheckpointWriter, TensorSet
from lucidrl.errors import CheckpointError
root = Path(sys.argv[1])
manager, writer = CheckpointManager(root), CheckpointWriter(0, 1, None, pin_memory=False)
def save(step, elements):
    pending = manager.begin(step)
    tensors = {"a": torch.ones(elements)}
    specs = {"a": TensorSpec.of(tensors["a"])}
    try:
        writer.begin([TensorSet(pending.folder, "model", specs, lambda: tensors.items())], {})
        pending.commit(writer.finish())
    except CheckpointError as error:
        pending.discard()
        print(error)
save(1, 1000)
save(2, 10**6)
usage = shutil.disk_usage
shutil.disk_usage = lambda path: usage(path)._replace(free=10**9)  # others take the space only now
save(3, 10**6)
print(sorted(path.name for path in root.iterdir()), manager.latest().step)
"""


def test_a_disk_that_is_really_full_keeps_the_earlier_checkpoint_complete(tmp_path):
    mount = [
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1"',
    ]
    if subprocess.run([*mount[:-1], "exit 0"], capture_output=True).returncode:
        pytest.skip("this machine does not allow mounting a small file system")
    done = subprocess.run(
        [*mount, "sh", str(tmp_path), sys.executable, FULL_DISK], capture_output=True, text=True, check=True
    )
    early, late, left = done.stdout.splitlines()
    assert f"no space left to save {tmp_path / 'step_2'}: 4000000 bytes are needed in all" in early
    assert "4000000 bytes are needed in all" in late
    assert left == "['step_1'] 1"
