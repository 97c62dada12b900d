"""An environment in workers on Ray nodes scores as it does in the driver, and outlives its workers."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers import ray_resources
from lucidrl.distributed.workers.ray_resources import check_can_be_placed
from lucidrl.envs.text.config import EnvConfig
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.envs.text.workers import EnvWorkerPool
from lucidrl.errors import ConfigError, EnvironmentFailure
from tests.faults.processes import wait_until_gone
from tests.ray.nodes import raylet_of, without_ids
from tests.unit.envs.scorers import requests

pytestmark = pytest.mark.slow

RAY = ClusterConfig(launcher="ray", start_timeout_s=300, num_threads=1)
SCORER = "tests.unit.envs.scorers:Scorer"


@pytest.fixture
def pool(cluster, tmp_path):
    """Two new workers, on two nodes; Ray may restart a killed worker on any node."""
    config = EnvConfig(name=SCORER, num_workers=2, timeout_s=1.0)
    pool = EnvWorkerPool(config, RAY, log_dir=tmp_path)
    yield pool
    pids = pids_of(pool)
    pool.shutdown()
    wait_until_gone(pids, timeout_s=10)


def make_runner(pool, on_error="fail", timeout_s=1.0) -> EnvRunner:
    return EnvRunner(pool, timeout_s, 4, on_error)


def pids_of(pool: EnvWorkerPool) -> list[int]:
    return [int(reply.metrics["pid"]) for reply in make_runner(pool).step(requests("a", "b"))]


def rewards(replies) -> list[float | None]:
    return [None if reply is None else reply.reward for reply in replies]


def test_calls_are_spread_over_nodes_and_a_failure_names_worker_and_sample(pool):
    replies = make_runner(pool).step(requests(*("x" * length for length in range(20))))
    assert rewards(replies) == list(range(20))
    first, second = pids_of(pool)
    assert raylet_of(first) != raylet_of(second)
    with pytest.raises(EnvironmentFailure, match=r"raised KeyError: 'no such reward' \(sample s1, turn 1\)") as caught:
        make_runner(pool).step(requests("fine", "raise"))
    assert "in _do" in str(caught.value.__cause__)


def test_a_blocking_sample_is_killed_on_its_node_and_named(pool):
    with pytest.raises(EnvironmentFailure) as caught:
        make_runner(pool).step(requests("block"))
    text = without_ids(str(caught.value))
    assert "exceeded its timeout of 1 s and blocked its worker (sample s0, turn 1)" in text
    assert "environment worker 0 of 2 on node NODE did not finish score within" in text
    assert rewards(make_runner(pool).step(requests("a", "bb"))) == [1, 2]


def test_calls_of_a_lost_node_are_scored_on_another(pool, cluster):
    cluster.add_node(num_cpus=2)
    head = cluster.head_node.all_processes["raylet"][0].process.pid
    lost = next(raylet for pid in pids_of(pool) if (raylet := raylet_of(pid)) != head)
    threading.Timer(0.5, os.kill, (lost, signal.SIGKILL)).start()
    assert rewards(make_runner(pool, timeout_s=30).step(requests(*["wait 1"] * 4))) == [6] * 4


def test_workers_for_which_there_is_no_room_beside_the_rank_are_refused(pool, cluster, monkeypatch):
    monkeypatch.setattr(ray_resources, "_RELEASE_TIMEOUT_S", 1.0)
    at = ClusterConfig(address=cluster.address)
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"of env\.num_workers=5 asks Ray for CPU 1 .*Lower env\.num_workers"):
        check_can_be_placed(at, num_env_workers=5)
    assert time.monotonic() - started < 20
