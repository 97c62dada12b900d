"""Ranks that Ray started record as ranks of this machine do, and have the same time to write."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers import processes, ray_workers
from lucidrl.distributed.workers.group import WorkerGroup
from lucidrl.errors import WorkerError
from lucidrl.profiling.settings import FOLDER_VARIABLE, NSYS_SESSION
from lucidrl.utils import nsys, nsys_launch
from tests.faults.processes import wait_until_gone
from tests.ray.nodes import agent_of, check_all_was_given_back
from tests.unit.distributed.recorded_workers import Recorded, SlowlyWriting
from tests.unit.profiling.span_reading import spans_of

pytestmark = pytest.mark.slow
TWO_NODES = ClusterConfig(launcher="ray", num_workers=2, num_nodes=2, start_timeout_s=300, call_timeout_s=60)


@pytest.fixture
def traces(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "traces"))
    return tmp_path / "traces"


@pytest.fixture
def group(cluster, tmp_path, traces):
    with WorkerGroup(Recorded, cluster=TWO_NODES, log_dir=tmp_path / "logs") as group:
        yield group
    check_all_was_given_back()


def files_of(traces: Path, worker: str) -> list[str]:
    """What kinds of files it wrote."""
    return sorted("".join(path.suffixes[-2:]) for path in traces.glob(f"{worker}_*"))


def test_a_stuck_rank_does_not_hold_up_the_words_of_another_node(group, traces, monkeypatch, caplog):
    monkeypatch.setattr(processes, "_LAST_WRITE_S", 3.0)
    group.start_gpu_profiling()
    group.run_all("work")
    pids = group.run_all("pid")
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 of 2 on node .* did not finish sleep_on"):
        group.run_all("sleep_on", 1, 60.0, timeout_s=0.5)
    assert time.monotonic() - started < 45
    assert "rank 1 did not exit within 3 s; of its traces, only *.spans.json was written" in caplog.text
    assert files_of(traces, "worker-0") == [".json", ".spans.json"]
    assert files_of(traces, "worker-1") == [".spans.json"]
    wait_until_gone(pids)


def test_a_lost_node_leaves_the_others_time_to_write(group, traces):
    group.start_gpu_profiling()
    group.run_all("work")
    time.sleep(0.3)
    os.kill(agent_of(group.run_all("pid")[1]), signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"with rank 1 of 2 was lost in sleep_on: its agent exited"):
        group.run_all("sleep_on", 1, 60.0)
    assert files_of(traces, "worker-0") == [".json", ".spans.json"]
    (spans,) = traces.glob("worker-1_*.spans.json")
    assert spans_of(spans) == ["work"]


def test_a_shutdown_lets_ranks_write(cluster, tmp_path, traces, monkeypatch):
    monkeypatch.setattr(processes, "_SHUTDOWN_TIMEOUT_S", 0.2)
    with WorkerGroup(SlowlyWriting, cluster=TWO_NODES, log_dir=tmp_path / "logs") as group:
        group.start_gpu_profiling()
        group.run_all("work")
    for worker in ("worker-0", "worker-1"):
        assert files_of(traces, worker) == [".json", ".spans.json"]


def test_a_node_that_does_not_see_the_traces_folder_or_has_no_nsys_is_named(
    cluster, tmp_path, traces, monkeypatch, caplog
):
    @contextmanager
    def unmarked(folder):
        yield folder / "there-is-no-such-file"

    monkeypatch.setattr(ray_workers, "marked", unmarked)
    monkeypatch.delenv(NSYS_SESSION, raising=False)
    monkeypatch.setattr(nsys, "NRL_NSYS_WORKER_PATTERNS", "*-1")
    monkeypatch.setattr(nsys, "NRL_NSYS_PROFILE_STEP_RANGE", "3:5")
    nsys_launch._warn_once.cache_clear()
    with WorkerGroup(Recorded, cluster=TWO_NODES, log_dir=tmp_path / "logs") as group:
        nodes = [label.node for label in group._processes._workers.labels]
        assert group.run_all("variable", FOLDER_VARIABLE) == [str(traces)] * 2
        assert group.run_all("variable", nsys.PATTERNS_VARIABLE) == ["*-1"] * 2
    assert f"node {nodes[1]} does not see {traces}: its workers write their traces" in caplog.text
    assert f"no `nsys` on PATH of node {nodes[1]}: workers record with torch's profiler" in caplog.text
    assert nodes[0] not in caplog.text
