"""Nsight Systems runs the requested workers; here a stand-in that records its arguments."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time

import psutil
import pytest

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers import processes
from lucidrl.distributed.workers.group import WorkerGroup
from lucidrl.errors import WorkerError
from lucidrl.profiling.settings import FOLDER_VARIABLE, NSYS_SESSION
from lucidrl.utils import nsys, nsys_launch
from tests.faults.processes import wait_until_gone
from tests.unit.distributed.recorded_workers import Recorded

TWO = ClusterConfig(num_workers=2, start_timeout_s=300, call_timeout_s=60)
STAND_IN = """#!/bin/sh
# Notes its arguments, and runs the command below itself as nsys does.
echo "$@" >> {folder}/arguments
shift
while case "$1" in -*) true;; *) false;; esac; do shift; done
NSYS_PROFILING_SESSION_ID=1 "$@"
code=$?
echo "report" >> {folder}/reports
exit $code
"""


@pytest.fixture
def traces(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "traces"))
    monkeypatch.delenv(NSYS_SESSION, raising=False)
    monkeypatch.setattr(nsys, "NRL_NSYS_WORKER_PATTERNS", "*-0")
    monkeypatch.setattr(nsys, "NRL_NSYS_PROFILE_STEP_RANGE", "3:5")
    nsys_launch._warn_once.cache_clear()
    return tmp_path / "traces"


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """The folder with the records of the stand-in."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    (folder / "nsys").write_text(STAND_IN.format(folder=folder))
    (folder / "nsys").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_the_command_captures_between_start_and_stop_into_the_traces_folder(traces, stand_in):
    program, verb, *options = nsys_launch.nsys_command("policy-0")
    assert (program, verb) == ("nsys", "profile")
    assert {"--trace=cuda,cudnn,cublas,nvtx", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"} <= {
        *options
    }
    assert f"--output={traces}/policy-0_%h_%p" in options


def test_other_workers_run_without_nsys(traces, stand_in, monkeypatch):
    assert nsys_launch.nsys_command("policy-1") == []
    assert nsys_launch.ray_nsight_options("policy-1") == {}
    monkeypatch.setenv(NSYS_SESSION, "7")  # nsys sees the workers of what it runs
    assert nsys_launch.nsys_command("policy-0") == []
    monkeypatch.delenv(NSYS_SESSION)
    monkeypatch.setattr(nsys, "NRL_NSYS_WORKER_PATTERNS", "")
    monkeypatch.setattr(nsys, "NRL_NSYS_PROFILE_STEP_RANGE", "")
    assert nsys_launch.nsys_command("policy-0") == []


def test_a_missing_nsys_is_logged_once(traces, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "/nowhere")
    with caplog.at_level(logging.WARNING):
        assert nsys_launch.nsys_command("policy-0") == []
        assert nsys_launch.nsys_command("generation-0") == []
        assert nsys_launch.nsys_command("policy-1") == []
    (message,) = caplog.messages
    assert message.startswith("no `nsys` on PATH: workers record with torch's profiler; install")


def test_a_worker_in_this_process_logs_how_to_run_the_whole_command(traces, stand_in, caplog):
    with caplog.at_level(logging.WARNING), WorkerGroup(Recorded, name="policy"):
        pass
    (message,) = caplog.messages
    assert message.startswith("policy-0 is in this process")
    assert "for Nsight Systems, start the program as `nsys profile --trace=cuda" in message


def test_ray_gets_the_same_options_under_its_own_names(traces, stand_in, monkeypatch):
    options = nsys_launch.ray_nsight_options("policy-0")
    assert options["t"] == "cuda,cudnn,cublas,nvtx"
    assert options["o"] == f"{traces}/policy-0_%h_%p"
    assert options["capture-range"] == "cudaProfilerApi"
    environment = nsys_launch.runtime_env_for("policy-0")
    assert environment["nsight"] == options
    assert environment["env_vars"][nsys.RANGE_VARIABLE] == "3:5"
    assert environment["env_vars"][FOLDER_VARIABLE] == str(traces)
    assert "nsight" not in nsys_launch.runtime_env_for("policy-1")


@pytest.mark.slow
def test_the_launcher_runs_matching_workers_under_nsys_and_they_work_like_others(traces, stand_in, tmp_path):
    with WorkerGroup(Recorded, cluster=TWO, log_dir=tmp_path / "logs") as group:
        assert group.run_all("variable", NSYS_SESSION) == ["1", None]
        assert group.run_all("variable", nsys.PATTERNS_VARIABLE) == ["*-0", "*-0"]
        group.start_gpu_profiling()
        group.run_all("work")
        group.stop_gpu_profiling()
        pids = group.run_all("pid")
        # Ctrl-C of a terminal, which would end nsys, does not reach it.
        assert [os.getpgid(pid) == os.getpgid(0) for pid in pids] == [False, True]
        assert list(stand_in.glob("lucidrl-wrapper-*")) == []  # needed for the start alone
    arguments = (stand_in / "arguments").read_text().splitlines()
    assert len(arguments) == 1
    assert f"--output={traces}/worker-0_%h_%p" in arguments[0]
    assert {path.name.partition("_")[0] for path in traces.iterdir()} == {"clocks.jsonl", "worker-0"}
    assert (stand_in / "reports").read_text() == "report\n"
    wait_until_gone(pids)


def children_under_nsys() -> list[psutil.Process]:
    """Child processes that run under nsys; a child that has exited has no command line."""
    living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in living if "nsys" in " ".join(child.cmdline())]


@pytest.mark.slow
def test_a_wrapped_rank_that_hangs_reports_its_stack_and_is_killed(traces, stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_LAST_WRITE_S", 0.5)
    group = WorkerGroup(Recorded, cluster=TWO, log_dir=tmp_path / "logs")
    pids = group.run_all("pid")
    runners = [child.pid for child in children_under_nsys()]
    assert len(runners) == 1
    with pytest.raises(WorkerError, match=r"(?s)rank 0 of 2 did not finish sleep_on within 1 s.*in sleep_on"):
        group.run_all("sleep_on", 0, 60.0, timeout_s=1.0)
    wait_until_gone([*pids, *runners])


@pytest.mark.slow
def test_a_wrapped_rank_ends_when_nsys_is_killed(traces, stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_LAST_WRITE_S", 0.5)
    group = WorkerGroup(Recorded, cluster=TWO, log_dir=tmp_path / "logs")
    pids = group.run_all("pid")
    (runner,) = children_under_nsys()
    os.kill(runner.pid, signal.SIGKILL)
    time.sleep(0.3)
    with pytest.raises(WorkerError, match="rank 0 of 2 was killed by SIGKILL"):
        group.run_all("sleep_on", 0, 60.0)
    wait_until_gone(pids)


@pytest.mark.slow
def test_a_program_that_does_not_run_its_command_is_named(traces, stand_in):
    (stand_in / "nsys").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(WorkerError, match=r"exited with code 1 in the start.* nsys ran it: read the output of nsys"):
        WorkerGroup(Recorded, cluster=TWO)
