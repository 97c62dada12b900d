"""A local cluster: reachable from this machine only, shared by all its users, and stopped with the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import ray

from lucidrl.collectors import RayCollector
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers import ray_cluster
from lucidrl.distributed.workers.group import WorkerGroup
from lucidrl.errors import ConfigError
from lucidrl.recipes.configs import GRPORunConfig
from lucidrl.recipes.run import train
from lucidrl.utils.config import load_config
from tests.faults.processes import wait_until_gone
from tests.ray.nodes import wait_for
from tests.unit.distributed.toy_workers import Joined, Plain, run_sleeper
from tests.unit.envs.toys import Walk
from tests.unit.recipes.test_two_workers import SMALL, Unwatched, numbers

ONE = ClusterConfig(launcher="ray", num_threads=1)
TWO = ClusterConfig(launcher="ray", num_workers=2, num_threads=1)


@pytest.mark.slow
def test_two_groups_share_a_local_cluster_that_stops_with_them(tmp_path, processes_of_ray):
    with WorkerGroup(Joined, cluster=TWO, log_dir=tmp_path) as two:
        with WorkerGroup(Plain, cluster=ONE, log_dir=tmp_path / "one") as one:
            assert two.run_all("sum_of_ranks") == [1.0, 1.0]
            assert len({os.getpid(), *one.run_all("pid"), *two.run_all("pid")}) == 4
            assert len(ray.nodes()) == 1
            folder = ray_cluster._connection.own_folder.path
            assert folder.exists()
            processes = [psutil.Process(), *processes_of_ray()]
            sockets = [socket for process in processes for socket in process.net_connections()]
            listening = {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}
            assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
            assert not [process for process in processes if "--include-dashboard=true" in process.cmdline()]
        assert two.run_all("echo", 1) == [1, 1]
    assert not ray.is_initialized()
    assert {"RAY_USAGE_STATS_ENABLED", "RAY_AUTH_MODE"}.isdisjoint(os.environ)
    wait_for(lambda: not processes_of_ray())
    assert not folder.exists()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:6379"])
def test_an_address_where_no_cluster_is_is_refused_within_seconds(address):
    started = time.monotonic()
    with pytest.raises(ConfigError, match=rf"cluster.address={address} is not a reachable Ray cluster.*; start one"):
        WorkerGroup(Plain, cluster=ClusterConfig(address=address))
    assert time.monotonic() - started < 60
    assert not ray.is_initialized()
    assert not ray_cluster._connection.is_ours


def test_a_collector_is_refused_the_cluster_that_the_variable_names_if_none_is_there(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(
        ConfigError, match=r"RAY_ADDRESS=127.0.0.1:1 is not a reachable Ray cluster.*, or unset RAY_ADDRESS to"
    ):
        RayCollector([Walk], frames_per_batch=10)
    assert not ray.is_initialized()


@pytest.mark.slow
def test_a_run_on_ray_is_the_run_on_local_ranks_with_its_nodes_monitored(tmp_path, processes_of_ray):
    def run(name: str, *overrides: str) -> list[dict[str, float]]:
        (tmp_path / name).mkdir()
        settings = ["cluster.num_workers=2", "cluster.num_threads=1", "num_threads=1", *overrides]
        train(load_config(GRPORunConfig, SMALL, overrides=settings), tmp_path / name, Unwatched())
        return numbers(tmp_path / name)

    separate = ("policy.generation.placement=separate", "tracking.monitor_interval_s=0.5")
    local = run("local", *separate)
    assert run("ray", "cluster.launcher=ray", *separate) == local
    assert {"rank_0.log", "rank_1.log"} <= {path.name for path in (tmp_path / "ray" / "logs").iterdir()}
    assert (tmp_path / "ray" / "logs" / "generation" / "rank_0.log").exists()
    assert '"ray/node.0.mem_total_gb"' in (tmp_path / "ray" / "metrics.jsonl").read_text()
    wait_for(lambda: not processes_of_ray())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_driver_that_died(tmp_path, number):
    driver = run_sleeper(str(tmp_path), launcher="ray")
    try:
        wait_for((tmp_path / "pids").exists, timeout_s=180)
        names = {process.pid: process.name() for process in psutil.Process(driver.pid).children(recursive=True)}
        ranks = [int(line) for line in (tmp_path / "pids").read_text().split()]
        assert set(ranks) <= names.keys()
        driver.send_signal(number)
        driver.wait(60)
        # Helpers of Ray that try to report their node to the stopped head: they give up within a minute.
        helpers = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
        wait_until_gone([pid for pid, name in names.items() if not name.startswith(helpers)])
        wait_until_gone(list(names), timeout_s=180)
    finally:
        driver.kill()
        driver.wait(60)


@pytest.mark.slow
def test_ctrl_c_ends_a_run_after_its_step_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-c", "from lucidrl.cli import main; main()", "grpo", "cluster.launcher=ray"]
    command += ["cluster.num_workers=2", "grpo.max_steps=100000", "collector.prompts_per_step=4"]
    command += ["validation.num_prompts=0", "checkpoint.metric=null", f"run.root={tmp_path}", "run.name=run"]
    driver = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and b"train/loss" in metrics.read_bytes(), timeout_s=240)
        processes = psutil.Process(driver.pid).children(recursive=True)
        os.killpg(driver.pid, signal.SIGINT)  # as a terminal does
        output, _ = driver.communicate(timeout=180)
    finally:
        driver.kill()
    assert "saved step" in output
    wait_until_gone([process.pid for process in processes])
