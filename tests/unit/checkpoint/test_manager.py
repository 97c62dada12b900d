"""Checkpoints are complete or absent, even if the process that writes them fails or is killed."""

import errno
import hashlib
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lucidrl.checkpoint import manager as manager_module
from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.checkpoint.manifest import FileDigest
from lucidrl.errors import CheckpointError, ConfigError


def save(manager, step, content="weights", **metrics):
    with manager.saving(step, state={"step_in_data": step * 10}, metrics=metrics) as folder:
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_text(content)


def names(root):
    """File names, once old checkpoints are deleted."""
    for thread in threading.enumerate():
        if thread.name == "remover":
            thread.join()
    return sorted(path.name for path in root.iterdir())


def killed_child(root, patch=""):
    """Run a save of step 1 in another process that kills itself where `patch` says."""
    code = f"""
import os, signal
from pathlib import Path
from lucidrl.checkpoint.manager import CheckpointManager
die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
manager = CheckpointManager(Path({str(root)!r}))
with manager.saving(1) as folder:
    (folder / "weights.bin").write_text("new")
    {patch}
"""
    child = subprocess.run([sys.executable, "-c", code], check=False)
    assert child.returncode == -signal.SIGKILL


def test_a_saved_checkpoint_comes_back_with_state_and_metrics(tmp_path):
    manager = CheckpointManager(tmp_path / "checkpoints")
    assert manager.latest() is None
    save(manager, 3, reward=0.5, loss=math.nan)
    found = manager.latest()
    assert found.step == 3
    assert found.state == {"step_in_data": 30}
    assert found.metrics["reward"] == 0.5
    assert math.isnan(found.metrics["loss"])
    assert (found.path / "model" / "weights.bin").read_text() == "weights"
    assert manager.load(3).path == manager.load(str(found.path)).path == found.path


def test_a_failed_save_leaves_nothing_behind(tmp_path):
    manager = CheckpointManager(tmp_path)
    save(manager, 1)

    def interrupted_save():
        with manager.saving(2) as folder:
            (folder / "half.bin").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_save()
    assert names(tmp_path) == ["step_1"]


def test_a_checkpoint_is_as_readable_as_its_folder(tmp_path):
    tmp_path.chmod(0o750)
    save(CheckpointManager(tmp_path), 1)
    assert (tmp_path / "step_1").stat().st_mode & 0o777 == 0o750


@pytest.mark.slow
def test_a_killed_save_is_cleaned_up_at_the_next_start(tmp_path):
    killed_child(tmp_path, "die()")
    assert [name for name in names(tmp_path) if name.startswith(".saving-step_1-")]
    assert CheckpointManager(tmp_path).latest() is None
    assert names(tmp_path) == []


def test_a_save_in_progress_is_left_alone_by_another_start(tmp_path):
    manager = CheckpointManager(tmp_path)
    with manager.saving(1) as folder:
        (folder / "weights.bin").write_text("slow")
        CheckpointManager(tmp_path)
    assert (manager.latest().path / "weights.bin").read_text() == "slow"


def test_saving_a_step_again_replaces_it(tmp_path):
    manager = CheckpointManager(tmp_path)
    save(manager, 1, content="old")
    save(manager, 1, content="new")
    assert (manager.load(1).path / "model" / "weights.bin").read_text() == "new"
    assert names(tmp_path) == ["step_1"]


@pytest.mark.parametrize(
    ("patch", "left"),
    [
        pytest.param("Path.rename = lambda self, to: (os.rename(self, to), die())", "model", id="after stepping aside"),
        pytest.param("import shutil; shutil.rmtree = die", "weights.bin", id="before the old one is deleted"),
    ],
)
def test_a_step_replaced_by_a_killed_process_is_old_or_new_but_complete(tmp_path, patch, left):
    save(CheckpointManager(tmp_path), 1)
    killed_child(tmp_path, patch)
    assert left in names(CheckpointManager(tmp_path).latest().path)
    assert names(tmp_path) == ["step_1"]


def test_a_failing_rename_restores_the_replaced_step(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path)
    save(manager, 1, content="old")
    rename = Path.rename

    def failing(self, target):
        if self.name.startswith(".saving"):
            raise OSError(errno.EIO, "broken disk")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match=r"cannot put .* in place: .*broken disk"):
        save(manager, 1, content="new")
    assert (manager.load(1).path / "model" / "weights.bin").read_text() == "old"
    assert names(tmp_path) == ["step_1"]


def test_damaged_checkpoints_are_skipped_and_named(tmp_path, caplog):
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        save(manager, step)
    (tmp_path / "step_3" / "model" / "weights.bin").write_text("wEights")
    (tmp_path / "step_2" / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert manager.latest().step == 1
    assert "model/weights.bin: its content does not match" in caplog.text
    assert "manifest.json: it is missing" in caplog.text
    with pytest.raises(CheckpointError, match=r"model/weights\.bin"):
        manager.load(3)


@pytest.mark.parametrize("step", [1, 2])
def test_a_refused_checkpoint_names_the_newest_valid_one(tmp_path, step):
    manager = CheckpointManager(tmp_path)
    for number in (1, 2):
        save(manager, number)
    (tmp_path / f"step_{step}" / "model" / "weights.bin").unlink()
    with pytest.raises(CheckpointError, match=rf"it is missing.*newest valid .*/step_{3 - step}\)"):
        manager.load(step)
    (tmp_path / f"step_{3 - step}" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"newest valid .*: none\)"):
        manager.load(step)


def test_links_uncommitted_and_renamed_folders_are_refused(tmp_path, caplog):
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    (tmp_path / "step_2").symlink_to(tmp_path / "step_1")
    with pytest.raises(CheckpointError, match="step_2 cannot be used: it is a symbolic link"):
        manager.load(2)
    with manager.saving(3) as folder, pytest.raises(CheckpointError, match="it was not committed"):
        manager.load(folder)
    (tmp_path / "step_3").rename(tmp_path / "step_4")
    with pytest.raises(CheckpointError, match=r"step_4 cannot be used: its state\.json belongs to step 3"):
        manager.load(4)
    assert manager.latest().step == 1
    assert "step_2 cannot be used: it is a symbolic link" in caplog.text
    (tmp_path / "step_4").rename(tmp_path / "best")  # any other name is the owner's business
    assert manager.load(tmp_path / "best").step == 3


def test_a_pending_checkpoint_is_invisible_before_its_commit(tmp_path):
    manager = CheckpointManager(tmp_path)
    pending = manager.begin(1, state={"epoch": 1})
    (pending.folder / "weights.bin").write_text("weights")
    CheckpointManager(tmp_path)  # another start leaves it alone
    assert manager.latest() is None
    digest = FileDigest(7, hashlib.sha256(b"weights").hexdigest())
    pending.commit({pending.folder / "weights.bin": digest})
    assert manager.load(1).state == {"epoch": 1}
    other = manager.begin(2)
    other.discard()
    other.discard()
    assert names(tmp_path) == ["step_1"]


def test_other_files_than_step_folders_are_ignored(tmp_path):
    manager = CheckpointManager(tmp_path)
    save(manager, 2)
    for name in ("step_latest", "step_", "step_09", "old_step_9", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_10").write_text("a file")
    (tmp_path / "step_11").symlink_to(tmp_path / "step_2")
    assert manager.latest().path == tmp_path / "step_2"


def test_steps_are_ordered_as_numbers(tmp_path):
    manager = CheckpointManager(tmp_path)
    for step in (9, 10):
        save(manager, step)
    assert manager.latest().step == 10


def test_pruning_keeps_the_last_ones_and_the_best(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=2, metric="reward")
    for step, reward in enumerate([0.1, 0.9, math.nan, 0.2, 0.3]):
        save(manager, step, reward=reward)
    assert names(tmp_path) == ["step_1", "step_3", "step_4"]
    assert manager.best().step == 1


def test_pruning_never_removes_the_checkpoint_just_saved(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=1)
    save(manager, 9)
    save(manager, 5)  # a run that went back to step 4
    assert names(tmp_path) == ["step_5", "step_9"]


def test_pruning_keeps_damaged_checkpoints(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=1)
    save(manager, 1)
    (tmp_path / "step_1" / "state.json").write_text("{")
    save(manager, 2)
    assert names(tmp_path) == ["step_1", "step_2"]


@pytest.mark.parametrize(("mode", "best"), [("max", 3), ("min", 1)])
def test_the_best_is_by_mode_with_ties_to_the_newer_and_never_nan(tmp_path, mode, best):
    manager = CheckpointManager(tmp_path, keep_last=10, metric="reward", mode=mode)
    for step, reward in enumerate([math.nan, -1.0, 2.0, 2.0, 0.5, math.nan]):
        save(manager, step, reward=reward)
    save(manager, 6)  # a step without validation
    assert manager.best().step == best


def test_a_damaged_best_checkpoint_is_skipped_for_the_next_best(tmp_path):
    manager = CheckpointManager(tmp_path, metric="reward")
    save(manager, 1, reward=1.0)
    save(manager, 2, reward=2.0)
    (tmp_path / "step_2" / "model" / "weights.bin").unlink()
    assert manager.best().step == 1


def test_there_is_no_best_when_every_value_is_nan_or_no_metric_is_named(tmp_path):
    manager = CheckpointManager(tmp_path, metric="reward")
    save(manager, 1, reward=math.nan)
    assert manager.best() is None
    assert CheckpointManager(tmp_path).best() is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_raises_one_sentence_and_keeps_earlier_checkpoints(tmp_path, code):
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    with (
        pytest.raises(CheckpointError, match=r"save \S+step_2: .* step_1, takes \d+ bytes, \d+ bytes are available"),
        manager.saving(2),
    ):
        raise OSError(code, os.strerror(code))
    assert names(tmp_path) == ["step_1"]
    assert manager.latest().step == 1


def test_a_disk_that_fills_up_while_committing_raises_the_same_error(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path)

    def full(folder, digests):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(manager_module, "write_manifest", full)
    with pytest.raises(CheckpointError, match="the bytes needed are not known"):
        save(manager, 1)
    assert names(tmp_path) == []


def test_everything_is_on_disk_before_the_rename(tmp_path, monkeypatch):
    synced, fsync, rename = [], os.fsync, Path.rename

    def recording_fsync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}").rpartition("/")[2])
        fsync(descriptor)

    def recording_rename(self, target):
        synced.append("RENAME")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "rename", recording_rename)
    save(CheckpointManager(tmp_path), 1)
    before, after = synced[: synced.index("RENAME")], synced[synced.index("RENAME") + 1 :]
    assert {"weights.bin", "model", "state.json", "manifest.json"} <= set(before)
    assert before[-1].startswith(".saving-step_1-")
    assert after == [tmp_path.name]


def test_an_unknown_step_names_the_known_ones(tmp_path):
    manager = CheckpointManager(tmp_path)
    save(manager, 4)
    with pytest.raises(CheckpointError, match=r"step_7; steps saved in .*: 4"):
        manager.load(7)


@pytest.mark.parametrize("state", [{"fn": print}, {"rng": __import__("torch").zeros(2)}])
def test_a_state_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path, state):
    with pytest.raises(CheckpointError, match="state/"), CheckpointManager(tmp_path / "root").saving(1, state=state):
        pytest.fail("the block must not run")
    assert not (tmp_path / "root").exists()


def test_wrong_settings_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="keep_last=0"):
        CheckpointManager(tmp_path, keep_last=0)
    with pytest.raises(ConfigError, match="mode='best'"):
        CheckpointManager(tmp_path, mode="best")
    with pytest.raises(CheckpointError, match="step=-1"), CheckpointManager(tmp_path).saving(-1):
        pass


def test_a_file_with_the_name_of_a_checkpoint_is_replaced(tmp_path):
    manager = CheckpointManager(tmp_path)
    (tmp_path / "step_1").symlink_to(tmp_path / "nowhere")
    (tmp_path / "step_2").write_text("a file")
    save(manager, 1)
    save(manager, 2)
    assert manager.latest().step == 2
    assert names(tmp_path) == ["step_1", "step_2"]


def test_only_the_owner_may_write_a_checkpoint_even_in_a_world_writable_folder(tmp_path):
    tmp_path.chmod(0o1777)
    save(CheckpointManager(tmp_path), 1)
    assert (tmp_path / "step_1").stat().st_mode & 0o7777 == 0o755
