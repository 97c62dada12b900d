"""What a killed program left in /tmp is removed by the next one; what a living one uses never is."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lucidrl.distributed.workers import ray_cluster
from lucidrl.distributed.workers.ray_cluster import OwnFolder
from lucidrl.errors import WorkerError

HOLDER = """
import sys, time
from pathlib import Path
from lucidrl.distributed.workers import ray_cluster
ray_cluster._PARENT = Path(sys.argv[1])
print(ray_cluster.OwnFolder().path, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def parent(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_cluster, "_PARENT", tmp_path)
    return tmp_path


def test_a_folder_is_removed_when_its_program_is_dead_and_not_before(parent):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(parent)], stdout=subprocess.PIPE, text=True)
    try:
        theirs = Path(holder.stdout.readline().strip())
        (theirs / "session").mkdir()
        OwnFolder().remove()
        assert theirs.exists()
        holder.kill()
        holder.wait(60)
        ours = OwnFolder()
        assert list(parent.iterdir()) == [ours.path]
        ours.remove()
        assert not list(parent.iterdir())
    finally:
        holder.kill()
        holder.wait(60)
        holder.stdout.close()


def test_programs_that_start_at_once_do_not_take_each_others_folders(parent):
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: OwnFolder(), range(64)))
    assert {folder.path for folder in folders} == set(parent.iterdir())
    assert len(folders) == 64
    for folder in folders:
        folder.remove()


def test_nothing_is_removed_through_a_link(parent, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "work").touch()
    (parent / "lucid-ray-link").symlink_to(elsewhere)
    OwnFolder().remove()
    assert (elsewhere / "work").exists()


def test_a_file_system_without_locks_is_refused(monkeypatch):
    monkeypatch.setattr(ray_cluster, "_locked", lambda path: None)
    with pytest.raises(WorkerError, match=r"cannot be locked.*set cluster\.address=auto"):
        OwnFolder()


def test_a_disk_without_room_for_a_folder_is_an_error(parent, monkeypatch):
    monkeypatch.setattr(ray_cluster, "_PARENT", parent / "missing")
    with pytest.raises(WorkerError, match=r"cannot be created in .* \(.*\); check the disk, or start a cluster"):
        OwnFolder()
