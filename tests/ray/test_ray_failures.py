"""Every failure of a rank, an agent or a node reaches the driver soon, and nothing is left in the cluster."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.group import WorkerGroup
from lucidrl.errors import ConfigError, WorkerError
from tests.faults.processes import wait_until_gone
from tests.ray.nodes import agent_of, check_all_was_given_back, raylet_of, wait_for, without_ids
from tests.unit.distributed.toy_workers import FailsToStart, Joined

TWO_NODES = ClusterConfig(launcher="ray", num_workers=2, num_nodes=2, start_timeout_s=300, call_timeout_s=60)
FOUR_RANKS = TWO_NODES.model_copy(update={"num_workers": 4, "num_cpus_per_worker": 0.5})


@pytest.fixture
def group(cluster, tmp_path):
    with WorkerGroup(Joined, cluster=TWO_NODES, log_dir=tmp_path) as group:
        yield group
    check_all_was_given_back()


def signal_soon(pid: int, number: signal.Signals = signal.SIGKILL, delay_s: float = 0.5) -> None:
    threading.Timer(delay_s, os.kill, (pid, number)).start()


def failure_of(group: WorkerGroup, method: str, *args: object, within_s: float, **options: object) -> str:
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        group.run_all(method, *args, **options)
    assert time.monotonic() - started < within_s
    return without_ids(str(caught.value))


@pytest.mark.slow
def test_a_killed_rank_is_found_at_once_while_another_node_waits_for_it(group, tmp_path):
    group.run_all("say", "about to wait")
    signal_soon(group.run_all("pid")[1])
    text = failure_of(group, "reduce_unless", 1, 60.0, within_s=45)
    assert text.startswith(
        "rank 1 of 2 on node NODE was killed by SIGKILL, perhaps out of memory, in reduce_unless; all ranks were"
    )
    assert f"Last lines of rank 1 ({tmp_path / 'rank_1.log'}):\n  about to wait" in text


@pytest.mark.slow
def test_a_hung_rank_is_reported_at_the_timeout_with_the_stack_of_each_node(group):
    text = failure_of(group, "reduce_unless", 0, 60.0, timeout_s=1.0, within_s=45)
    assert text.startswith(
        "ranks 0, 1 of 2 on nodes NODE, NODE did not finish reduce_unless within 1 s; all ranks were killed."
    )
    assert "in sleep_on" in text.partition("Rank 0 on node NODE was at")[2].partition("Rank 1")[0]
    assert "in all_reduce" in text.partition("Rank 1 on node NODE was at")[2]


@pytest.mark.slow
def test_an_exception_names_its_rank_although_another_node_waits_for_it(group):
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        group.run_all("raise_while_others_wait", 1)
    assert time.monotonic() - started < 45
    text = without_ids(str(caught.value))
    assert text.startswith("rank 1 of 2 on node NODE failed in raise_while_others_wait: ValueError: a bad number; all")
    assert "in all_reduce" in text.partition("Rank 0 on node NODE was at")[2]
    assert "in raise_while_others_wait" in str(caught.value.__cause__)
    with pytest.raises(WorkerError, match="echo cannot run: the worker group failed in raise_while_others_wait"):
        group.run_all("echo", 1)


@pytest.mark.slow
def test_errors_of_ours_keep_their_type_and_come_before_others(group):
    with pytest.raises(ConfigError, match="lr=-1 is not a rate") as caught:
        group.run_each("raise_on", [(0, OSError("a consequence")), (1, ConfigError("lr=-1 is not a rate"))])
    assert "raised by rank 1 of 2 on node" in caught.value.__notes__[0]


@pytest.mark.slow
def test_a_killed_agent_is_one_failure_of_all_its_ranks(cluster, tmp_path):
    with WorkerGroup(Joined, cluster=FOUR_RANKS, log_dir=tmp_path) as group:
        pids = group.run_all("pid")
        group.run_all("say", "about to wait")
        signal_soon(agent_of(pids[2]))
        text = failure_of(group, "reduce_unless", 2, 60.0, within_s=45)
    assert text == (
        "node NODE with ranks 2, 3 of 4 was lost in reduce_unless: its agent exited; all ranks were killed"
        f"\nLast lines of rank 2 ({tmp_path / 'rank_2.log'}):\n  about to wait"
        f"\nLast lines of rank 3 ({tmp_path / 'rank_3.log'}):\n  about to wait"
    )
    wait_until_gone(pids)
    check_all_was_given_back()


@pytest.mark.slow
def test_check_finds_a_rank_and_a_node_lost_between_calls(cluster, tmp_path):
    for victim, said in (
        (int, "rank 1 of 2 on node NODE was killed by SIGKILL"),
        (agent_of, "node NODE with rank 1 of"),
    ):
        with WorkerGroup(Joined, cluster=TWO_NODES, log_dir=tmp_path) as group:
            group.check()
            os.kill(victim(group.run_all("pid")[1]), signal.SIGKILL)
            with pytest.raises(WorkerError) as caught:
                wait_for(group.check)
        text = without_ids(str(caught.value))
        assert text.startswith(said)
        assert "in the wait for its next call" in text
        check_all_was_given_back()


@pytest.mark.slow
def test_a_stopped_agent_is_reported_at_the_timeout_and_killed_with_its_ranks(group):
    pids = group.run_all("pid")
    os.kill(agent_of(pids[1]), signal.SIGSTOP)
    text = failure_of(group, "reduce_unless", 1, 60.0, timeout_s=1.0, within_s=45)
    assert text.startswith("node NODE with rank 1 of 2 was lost in reduce_unless: its agent did not reply within")


@pytest.mark.slow
def test_an_interrupted_call_ends_the_group(group):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            group.run_all("sleep_on", 0, 60.0)
    finally:
        signal.signal(signal.SIGALRM, previous)
    with pytest.raises(WorkerError, match="the worker group was interrupted in sleep_on"):
        group.run_all("add", 1)


@pytest.mark.slow
def test_an_exception_in_a_constructor_is_raised_without_waiting_for_the_others(cluster, tmp_path):
    with pytest.raises(WorkerError, match=r"rank 1 of 2 on node .* failed in the start: OSError: no such model"):
        WorkerGroup(FailsToStart, (1, OSError("no such model")), cluster=TWO_NODES, log_dir=tmp_path)
    check_all_was_given_back()


@pytest.mark.slow
def test_a_lost_node_is_one_failure_of_all_its_ranks(cluster, tmp_path):
    cluster.add_node(num_cpus=2)  # for the tests after this one
    head = cluster.head_node.all_processes["raylet"][0].process.pid
    with WorkerGroup(Joined, cluster=FOUR_RANKS, log_dir=tmp_path) as group:
        pids = group.run_all("pid")
        first = next(rank for rank in (0, 2) if raylet_of(pids[rank]) != head)
        signal_soon(raylet_of(pids[first]))
        text = failure_of(group, "sleep_on", first, 60.0, within_s=45)
    assert text.startswith(f"node NODE with ranks {first}, {first + 1} of 4 was lost in sleep_on: its agent exited")
    check_all_was_given_back()
