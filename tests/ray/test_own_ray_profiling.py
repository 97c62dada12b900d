"""Profiles of ranks in a local cluster, which finds the same programs as the run."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import psutil
import pytest

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers import processes
from lucidrl.distributed.workers.group import WorkerGroup
from lucidrl.distributed.workers.ray_cluster import connected
from lucidrl.errors import WorkerError
from lucidrl.profiling.settings import FOLDER_VARIABLE, NSYS_SESSION
from lucidrl.utils import nsys
from tests.faults.processes import wait_until_gone
from tests.unit.distributed.recorded_workers import Recorded
from tests.unit.profiling.span_reading import spans_of
from tests.unit.recipes.test_profile import GRPO, lucidrl, traces_of
from tests.unit.utils.test_nsys_launch import STAND_IN

pytestmark = pytest.mark.slow
TWO = ClusterConfig(launcher="ray", num_workers=2, num_threads=1, start_timeout_s=300)


def test_a_recorded_run_has_the_traces_of_all_ranks_in_its_folder(tmp_path):
    settings = ("profile.steps=2:3", "cluster.launcher=ray", "cluster.num_workers=2")
    said = lucidrl(tmp_path, "grpo", GRPO, *settings)
    assert "open traces/timeline.json.gz" in said
    names = ("policy-0", "policy-1", "driver")
    found = traces_of(tmp_path)
    assert found.keys() == {"policy-0", "policy-1", *(f"{name} spans" for name in names)}
    for name in names[:2]:
        assert "train" in spans_of(found[f"{name} spans"])


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """The folder of a program that stands in for Nsight Systems; a Ray that finds it is there meanwhile."""
    folder = tmp_path_factory.mktemp("bin")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        patched.delenv(NSYS_SESSION, raising=False)
        patched.setattr(nsys, "NRL_NSYS_WORKER_PATTERNS", "*-0")
        patched.setattr(nsys, "NRL_NSYS_PROFILE_STEP_RANGE", "3:5")
        patched.setattr(processes, "_LAST_WRITE_S", 0.5)
        with connected(None):
            yield folder


@pytest.fixture
def traces(stand_in, tmp_path, monkeypatch):
    (stand_in / "nsys").write_text(STAND_IN.format(folder=stand_in))
    (stand_in / "nsys").chmod(0o755)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "traces"))
    return tmp_path / "traces"


def wrapper_scripts() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("lucidrl-wrapper-*"))


def test_an_agent_runs_those_that_match_under_nsys_and_they_do_what_others_do(traces, stand_in, tmp_path):
    scripts = wrapper_scripts()
    with WorkerGroup(Recorded, cluster=TWO, log_dir=tmp_path / "logs") as group:
        assert group.run_all("variable", NSYS_SESSION) == ["1", None]
        assert wrapper_scripts() == scripts  # needed for the start alone
        group.start_gpu_profiling()
        group.run_all("work")
        group.stop_gpu_profiling()
        pids = group.run_all("pid")
    (arguments,) = (stand_in / "arguments").read_text().splitlines()
    assert f"--output={traces}/worker-0_%h_%p" in arguments
    assert (stand_in / "reports").read_text() == "report\n"
    assert {path.name.partition("_")[0] for path in traces.glob("*.json")} == {"worker-0"}
    wait_until_gone(pids)


def test_a_wrapped_rank_that_hangs_reports_its_stack_and_is_killed(traces, tmp_path):
    group = WorkerGroup(Recorded, cluster=TWO, log_dir=tmp_path / "logs")
    pids = group.run_all("pid")
    runner = psutil.Process(pids[0]).parent()
    assert "nsys" in " ".join(runner.cmdline())
    with pytest.raises(WorkerError, match=r"(?s)rank 0 of 2 on node .* did not finish sleep_on.*in sleep_on"):
        group.run_all("sleep_on", 0, 60.0, timeout_s=1.0)
    wait_until_gone([*pids, runner.pid])


def test_wrapped_ranks_end_with_their_agent(traces, tmp_path):
    group = WorkerGroup(Recorded, cluster=TWO, log_dir=tmp_path / "logs")
    pids = group.run_all("pid")
    runner = psutil.Process(pids[0]).ppid()
    os.kill(psutil.Process(pids[1]).ppid(), signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"with ranks 0, 1 of 2 was lost in sleep_on: its agent exited"):
        group.run_all("sleep_on", 0, 60.0)
    wait_until_gone([*pids, runner])


def test_a_program_that_does_not_run_its_command_is_named(traces, stand_in):
    (stand_in / "nsys").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(WorkerError, match=r"exited with code 1 in the start.* nsys ran it: read the output of nsys"):
        WorkerGroup(Recorded, cluster=TWO)
