"""The run folder says with what, where and how the run was started, without secrets."""

from __future__ import annotations

import subprocess
import sys

import orjson
import pytest

from lucidrl import __version__
from lucidrl.recipes.environment import record_environment


def starts_in(folder):
    return orjson.loads((folder / "environment.json").read_bytes())["starts"]


def test_every_start_is_added(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lucidrl", "grpo", "seed=1", "tracking.wandb.api_key=0123456789abcdef"])
    record_environment(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lucidrl", "grpo", "--resume", "run"])
    record_environment(tmp_path)
    first, second = starts_in(tmp_path)
    assert first["command"] == "lucidrl grpo seed=1 'tracking.wandb.api_key=<redacted>'"
    assert second["command"] == "lucidrl grpo --resume run"
    assert first["lucidrl"] == __version__
    assert first["packages"]["torch"]
    assert first["memory_gb"] > 0
    assert "cores" in first["cpu"]


def test_the_git_commit_says_whether_files_differ_from_it(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True).stdout

    monkeypatch.chdir(tmp_path)
    record_environment(tmp_path)
    git("init")
    (tmp_path / "reward.py").write_text("1")
    git("add", "reward.py")
    git("commit", "-m", "first")
    record_environment(tmp_path)
    (tmp_path / "reward.py").write_text("2")
    record_environment(tmp_path)
    commit = git("rev-parse", "HEAD").decode().strip()
    states = [start["git"] for start in starts_in(tmp_path)]
    assert states[1:] == [commit, f"{commit}, with uncommitted changes"]


@pytest.mark.parametrize("content", [b"no json", b"[]", b'{"starts": 3}'])
def test_a_damaged_file_is_written_anew(tmp_path, content, caplog):
    (tmp_path / "environment.json").write_bytes(content)
    record_environment(tmp_path)
    assert len(starts_in(tmp_path)) == 1


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    record_environment(tmp_path / "missing")
    assert "environment.json cannot be written (" in caplog.text
