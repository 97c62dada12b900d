"""One worker in this process and several in separate processes have the same methods."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from pydantic import ValidationError

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.group import WorkerGroup
from lucidrl.errors import ConfigError, DataError, WorkerError
from lucidrl.profiling.worker_times import worker_clock
from tests.unit.distributed.toy_workers import Joined, Plain

TWO = ClusterConfig(num_workers=2, start_timeout_s=300, call_timeout_s=30)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with WorkerGroup(Joined, cluster=TWO, log_dir=tmp_path_factory.mktemp("logs")) as group:
        yield group


def test_one_worker_lives_in_this_process_and_is_handed_the_objects_themselves():
    value = object()
    with WorkerGroup(Plain, (10,), {"step": 2}) as group:
        assert group.size == 1
        assert group.run_all("pid") == [os.getpid()]
        assert group.run_all("add", 5, times=3) == [40]
        assert group.run_each("echo", [(value,)])[0] is value


@pytest.mark.slow
def test_one_worker_gets_its_own_process_on_request(tmp_path):
    with WorkerGroup(Plain, (10,), log_dir=tmp_path, own_processes=True) as group:
        (pid,) = group.run_all("pid")
        assert psutil.Process(pid).ppid() == os.getpid()
        assert group.run_all("add", 5) == [15]
    assert not psutil.pid_exists(pid)


def test_one_worker_raises_what_it_raises_and_goes_on():
    with WorkerGroup(Plain) as group:
        with pytest.raises(KeyError, match="missing"):
            group.run_all("raise_on", 0, KeyError("missing"))
        assert group.run_all("add", 1) == [1]


def test_no_call_after_shutdown_and_shutdown_twice():
    group = WorkerGroup(Plain)
    group.shutdown()
    group.shutdown()
    with pytest.raises(WorkerError, match="after shutdown"):
        group.run_all("add", 1)


def test_ranks_are_processes_that_can_reduce(two):
    assert two.size == 2
    assert len({os.getpid(), *two.run_all("pid")}) == 3
    assert two.run_all("sum_of_ranks") == [1.0, 1.0]


def test_times_of_a_call_come_with_its_results(two):
    worker_clock.drain()
    worker_clock.take_waited_s()
    start = time.perf_counter()
    two.run_all("train_unless", 1, 0.3)
    elapsed_s = time.perf_counter() - start
    times = worker_clock.drain()
    waiting, slow = times["worker-0"], times["worker-1"]
    assert slow.within("train")["forward"] >= 0.3
    assert slow.totals["forward"][1] == 1
    assert slow.busy_s >= 0.3
    # The other rank waited in the collective: it was not busy.
    assert waiting.communication_s > slow.communication_s
    assert waiting.busy_s < waiting.call_s - 0.2
    assert waiting.call_s <= worker_clock.take_waited_s() <= elapsed_s
    two.run_all("add", 0)
    assert [times.exclusive for times in worker_clock.drain().values()] == [{}, {}]  # of this call only


def test_state_stays_and_results_are_in_the_order_of_ranks(two):
    first = two.run_each("add", [(1,), (20,)])
    assert two.run_all("add", 5, times=2) == [first[0] + 10, first[1] + 10]


def test_every_rank_needs_its_arguments(two):
    with pytest.raises(DataError, match="arguments for 3 ranks, but the group has 2"):
        two.run_each("add", [(1,), (2,), (3,)])


def test_large_tensors_come_back_equal_without_shared_memory(two):
    tensors = [torch.randn(1 << 22), torch.ones(1 << 22, dtype=torch.bfloat16)]
    pids = two.run_all("pid")
    for result, tensor in zip(two.run_each("echo", [(tensor,) for tensor in tensors]), tensors, strict=True):
        assert torch.equal(result, tensor)
    assert not [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)]


def test_arguments_that_ranks_share_are_pickled_once(two):
    class_counts.clear()
    shared = Counted()
    two.run_all("echo", shared)
    assert len(class_counts) == 1
    two.run_each("echo", [(shared,), (shared,)])
    assert len(class_counts) == 2
    two.run_each("echo", [(shared,), (Counted(),)])
    assert len(class_counts) == 4


def test_arguments_that_cannot_be_pickled_are_refused_and_change_nothing(two):
    with pytest.raises(DataError, match="arguments of echo cannot be sent to the workers"):
        two.run_all("echo", lambda: None)
    assert two.run_all("echo", 3) == [3, 3]


def test_workers_leave_ctrl_c_to_the_driver(two):
    for pid in two.run_all("pid"):
        os.kill(pid, signal.SIGINT)
    assert two.run_all("echo", 3) == [3, 3]


def test_a_call_from_another_thread_is_fine(two):
    results = []
    thread = threading.Thread(target=lambda: results.append(two.run_all("echo", 3)))
    thread.start()
    thread.join(60)
    assert results == [[3, 3]]


@pytest.mark.slow
def test_groups_that_start_at_once_do_not_mix_and_a_thread_may_start_one():
    groups: list[WorkerGroup] = []

    def start() -> None:
        cluster = ClusterConfig(num_workers=2, num_threads=3)
        groups.append(WorkerGroup(Joined, cluster=cluster))

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    time.sleep(0.3)  # the threads are over; their groups are not
    try:
        assert [group.run_all("sum_of_ranks") for group in groups] == [[1.0, 1.0]] * 2
        assert groups[0].run_all("num_threads") == [3, 3]
    finally:
        for group in groups:
            group.shutdown()


@pytest.mark.slow
def test_shutdown_lets_workers_say_goodbye_and_leaves_no_process(tmp_path):
    group = WorkerGroup(Plain, cluster=TWO, log_dir=tmp_path)
    pids = group.run_all("pid")
    group.run_each("say", [("first",), ("second ü",)])
    assert (tmp_path / "rank_1.log").read_text() == "second ü\n"
    group.shutdown()
    group.shutdown()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert [Path(tmp_path, f"rank_{rank}.log").read_text() for rank in range(2)] == [
        "first\ngoodbye\n",
        "second ü\ngoodbye\n",
    ]
    with pytest.raises(WorkerError, match="add cannot run: the worker group was shut down; start another one"):
        group.run_all("add", 1)


@pytest.mark.parametrize("field", ["num_workers", "num_threads", "start_timeout_s", "call_timeout_s"])
def test_nothing_is_zero(field):
    with pytest.raises((ConfigError, ValidationError), match=r"greater than 0|greater than or equal to 1"):
        ClusterConfig(**{field: 0})


class_counts: list[int] = []


class Counted:
    """Counts how often it is pickled."""

    def __reduce__(self):
        class_counts.append(1)
        return (str, ("counted",))
