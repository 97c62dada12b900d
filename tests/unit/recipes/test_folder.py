"""The run folder is claimed once, stays below its root, and holds the settings it was started with."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from lucidrl.errors import ConfigError
from lucidrl.recipes.configs import GRPORunConfig
from lucidrl.recipes.folder import (
    check_can_create,
    create_run_folder,
    run_config_path,
    update_run_config,
)
from lucidrl.recipes.settings import resumed_settings
from lucidrl.utils.run_folder import occupied


def config_for(root, name=None):
    return GRPORunConfig.model_validate({"run": {"root": root, "name": name}})


def test_runs_started_at_once_get_separate_folders(tmp_path):
    config = config_for(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: create_run_folder(config), range(16)))
    assert sorted(folder.name for folder in folders) == [f"exp_{n:03d}" for n in range(1, 17)]


def test_of_runs_with_one_name_started_at_once_one_gets_it(tmp_path):
    config = config_for(tmp_path, "mine")

    def claim(_):
        try:
            return create_run_folder(config)
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(claim, range(16)))
    claimed = [result for result in results if isinstance(result, Path)]
    assert all("holds a run already" in result for result in results if isinstance(result, str))
    assert claimed == [tmp_path / "mine"]


@pytest.mark.parametrize("name", ["with space", "日本-é", "a/b", "x[/bold]"])
def test_any_name_below_the_root_works_and_gives_the_config_back(tmp_path, name):
    config = config_for(tmp_path, name)
    folder = create_run_folder(config)
    assert folder == tmp_path / name
    assert resumed_settings("grpo", folder, []) == config


@pytest.mark.parametrize("name", ["..", ".", "../x", "a/../../x", "/tmp/elsewhere", ""])
def test_a_name_that_leaves_the_root_is_refused(tmp_path, name):
    for refuse in (lambda config: create_run_folder(config), lambda config: check_can_create(config.run)):
        with pytest.raises(ConfigError, match=r"leaves run\.root"):
            refuse(config_for(tmp_path / "runs", name))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [("a\0b", "has a NUL character"), ("x" * 300, "has a name of 300 bytes"), ("é" * 128, "has a name of 256 bytes")],
)
def test_a_name_that_no_file_system_takes_is_refused(tmp_path, name, said):
    for refuse in (lambda config: create_run_folder(config), lambda config: check_can_create(config.run)):
        with pytest.raises(ConfigError, match=rf"run\.name=.* {said}"):
            refuse(config_for(tmp_path, name))
        with pytest.raises(ConfigError, match=rf"run\.root=.* {said}"):
            refuse(config_for(tmp_path / name))
    assert list(tmp_path.iterdir()) == []
    assert create_run_folder(config_for(tmp_path, "x" * 255)).is_dir()


def test_a_path_that_is_too_long_as_a_whole_is_refused(tmp_path):
    root = tmp_path.joinpath(*["x" * 200] * 30)
    for refuse in (lambda config: create_run_folder(config), lambda config: check_can_create(config.run)):
        with pytest.raises(ConfigError, match=r"run\.root=.*cannot be written"):
            refuse(config_for(root, "name"))


def test_a_name_that_leaves_the_root_through_a_link_is_refused(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"leaves run\.root"):
        create_run_folder(config_for(tmp_path / "runs", "link/x"))


@pytest.mark.parametrize("root", ["file/runs", "file", "/proc/runs"])
def test_a_root_that_cannot_be_written_is_refused(tmp_path, root):
    (tmp_path / "file").write_text("")
    for refuse in (lambda config: create_run_folder(config), lambda config: check_can_create(config.run)):
        with pytest.raises(ConfigError, match=r"run\.root=.*cannot be written"):
            refuse(config_for(tmp_path / root))


def test_the_check_leaves_nothing_behind(tmp_path):
    check_can_create(config_for(tmp_path / "new/runs").run)
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_runs_settings_are_the_next_ones(tmp_path):
    folder = create_run_folder(config_for(tmp_path))
    longer = resumed_settings("grpo", folder, ["grpo.max_steps=500"])
    update_run_config(folder, longer)
    assert resumed_settings("grpo", folder, []) == longer


def test_a_folder_that_is_no_run_is_said_to_be_none(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a run folder: it has no config\.yaml"):
        run_config_path(tmp_path)


HOLDER = """
import sys, time
from pathlib import Path
from lucidrl.utils.run_folder import occupied
with occupied(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process, which holds the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_run_folder_serves_one_process_at_a_time_and_names_it(tmp_path, holder):
    entry = json.loads((tmp_path / "run.lock").read_text())
    assert entry["pid"] == holder.pid
    owner = f"in use by process {holder.pid} on {socket.gethostname()} since {entry['since']}"
    with pytest.raises(ConfigError, match=re.escape(owner)), occupied(tmp_path):
        pass
    assert json.loads((tmp_path / "run.lock").read_text()) == entry
    assert abs(datetime.now().astimezone() - datetime.fromisoformat(entry["since"])) < timedelta(minutes=1)


def test_the_folder_of_a_killed_process_is_taken_over(tmp_path, holder, caplog):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run.lock").exists()
    with caplog.at_level("INFO"), occupied(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    assert f"taking over {tmp_path} from process {holder.pid}" in caplog.text


@pytest.mark.parametrize("ending", [None, RuntimeError, KeyboardInterrupt])
def test_a_run_that_ends_leaves_no_lock(tmp_path, caplog, ending):
    with suppress(RuntimeError, KeyboardInterrupt), occupied(tmp_path):
        if ending is not None:
            raise ending
    assert list(tmp_path.iterdir()) == []
    with caplog.at_level("INFO"), occupied(tmp_path):
        pass
    assert caplog.text == ""


def test_a_lock_that_its_holder_removes_just_before_it_is_taken_does_not_count(tmp_path, monkeypatch):
    endings = iter([True, False, False])

    def flock_after_the_holder_ended(descriptor, operation):
        if next(endings):
            (tmp_path / "run.lock").unlink()
        flock(descriptor, operation)

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock_after_the_holder_ended)
    with occupied(tmp_path), pytest.raises(ConfigError, match="in use by process"), occupied(tmp_path):
        pass


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff" * 10_000])
def test_a_lock_without_a_readable_entry_is_taken_over_too(tmp_path, content):
    (tmp_path / "run.lock").write_bytes(content)
    with occupied(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


def test_a_lock_that_is_a_link_is_refused_and_its_target_left_alone(tmp_path):
    (tmp_path / "precious").write_text("content")
    (tmp_path / "run.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match=r"run\.lock cannot be written"), occupied(tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "content"
