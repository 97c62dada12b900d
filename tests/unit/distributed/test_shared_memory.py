"""Memory without a name: others of the same user can open it, and nothing of it is left behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
from dataclasses import replace

import psutil
import pytest
import torch

from lucidrl.distributed.shared_memory import NAME_PREFIX, AttachedMemory, SharedMemory
from lucidrl.errors import ConfigError, RefitError

SIZE = 100_000


def open_files() -> list[str]:
    paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [os.readlink(path) for path in paths if os.path.islink(path)]


def segments() -> list[str]:
    return [name for name in open_files() if name.startswith(f"/memfd:{NAME_PREFIX}")]


@pytest.fixture
def memory():
    before = segments()
    shared = SharedMemory(SIZE)
    shared.tensor.copy_(torch.arange(SIZE).remainder(251))
    yield shared
    shared.close()
    assert segments() == before


def make_in_another_process(connection) -> None:
    shared = SharedMemory(SIZE)
    shared.tensor.fill_(7)
    connection.send(shared.handle)
    connection.recv()


@pytest.fixture
def other_process():
    """A process with memory of ours, and the handle of that."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=make_in_another_process, args=(theirs,))
    process.start()
    assert ours.poll(60)
    yield process, ours.recv()
    process.kill()
    process.join()


def test_what_another_process_wrote_is_read_even_after_it_was_killed(other_process):
    process, handle = other_process
    attached = AttachedMemory(handle)
    assert attached.tensor.eq(7).all()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert attached.tensor.eq(7).all()
    with pytest.raises(RefitError, match=rf"process {process.pid} cannot be opened .*No such file"):
        AttachedMemory(handle)


def test_a_handle_is_small_and_opens_the_same_memory(memory):
    attached = AttachedMemory(pickle.loads(pickle.dumps(memory.handle)))
    memory.tensor[5] = 200
    assert attached.tensor[5] == 200
    assert len(pickle.dumps(memory.handle)) < 300


def test_only_the_owner_may_open_it_and_it_has_no_name(memory):
    path = f"/proc/{os.getpid()}/fd/{memory.handle.descriptor}"
    assert os.readlink(path).endswith("(deleted)")
    assert os.stat(f"/proc/{os.getpid()}/fd").st_mode & 0o077 == 0
    assert not [name for name in os.listdir("/dev/shm") if NAME_PREFIX in name]


def test_no_process_can_shrink_it_under_a_reader(memory):
    for size in (SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.handle.descriptor, size)


def test_closing_twice_frees_it_when_the_last_reader_lets_go():
    before = open_files()
    memory = SharedMemory(SIZE)
    attached = AttachedMemory(memory.handle)
    memory.close()
    memory.close()
    assert len(segments()) == 2  # the reader's: open and mapped
    assert len(attached.tensor) == SIZE
    tensor = attached.tensor[1:]
    del attached
    assert len(segments()) == 1
    assert len(tensor) == SIZE - 1
    del tensor
    assert sorted(open_files()) == sorted(before)


def test_its_maker_knows_who_holds_it(memory):
    assert not memory.is_held
    first, second = AttachedMemory(memory.handle), AttachedMemory(memory.handle)
    assert not memory.is_held
    first.hold()
    second.hold()
    first.release()
    first.release()
    assert memory.is_held
    del second
    assert not memory.is_held


def test_another_file_under_the_same_number_is_not_taken_for_it(memory, tmp_path):
    with pytest.raises(RefitError, match="request new handles"):
        AttachedMemory(replace(memory.handle, size_bytes=SIZE - 1))
    with pytest.raises(RefitError, match="request new handles"):
        AttachedMemory(replace(memory.handle, token="0" * 16))
    with (tmp_path / "other").open("wb+") as other, pytest.raises(RefitError, match="request new handles"):
        AttachedMemory(replace(memory.handle, descriptor=other.fileno()))


def test_more_than_there_is_is_refused_with_the_numbers():
    before = open_files()
    too_much = psutil.virtual_memory().total * 2
    with pytest.raises(RefitError, match=rf"needs {too_much:,} bytes .* [\d,]+ are available .*free some memory"):
        SharedMemory(too_much)
    assert sorted(open_files()) == sorted(before)


def test_the_error_on_other_systems_names_the_collective_refit(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"this is darwin; set policy\.generation\.refit=collective"):
        SharedMemory(SIZE)
