"""A pool of real processes: calls, losses, restarts, and what is left of it at the end."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest
import torch

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.interfaces import Arguments, Hosting
from lucidrl.distributed.workers.messages import Stored
from lucidrl.distributed.workers.pool import PoolWorker, WorkerPool
from lucidrl.errors import ConfigError, DataError, LostWorkerError, WorkerError
from lucidrl.profiling.worker_times import worker_clock
from tests.unit.distributed.toy_workers import ExitsAtStart, Plain

HOSTING = Hosting(
    role="toy",
    start_method="forkserver",
    preload=["tests.unit.distributed.toy_workers"],
    imports_main=False,
    captures_output=False,
)


def new_pool(size: int = 2, max_restarts: int = 1, **options) -> WorkerPool:
    cluster = ClusterConfig(num_threads=1, call_timeout_s=60)
    arguments = [Arguments((10 * number,)) for number in range(size)]
    return WorkerPool(Plain, arguments, cluster=cluster, hosting=HOSTING, max_restarts=max_restarts, **options)


@pytest.fixture
def pool():
    with new_pool() as pool:
        yield pool


def kill(worker: PoolWorker) -> None:
    pid = worker.run("pid")
    os.kill(pid, signal.SIGKILL)
    worker.run("pid")


def test_workers_have_their_own_arguments_and_calls_of_one_run_in_order(pool):
    futures = [pool.submit(number, "add", 1) for number in (0, 1, 0, 1, 0)]
    assert [future.result(60) for future in futures] == [1, 11, 2, 12, 3]
    assert pool.each(lambda worker: worker.run("num_threads")) == [1, 1]


def test_times_are_counted_by_worker_and_waiting_once(pool):
    worker_clock.drain()
    worker_clock.take_waited_s()
    start = time.perf_counter()
    pool.each(lambda worker: worker.run("sleep_on", 0, 0.1 * (1 + worker.number)))
    elapsed_s = time.perf_counter() - start
    times = worker_clock.drain()
    assert times.keys() == {"worker-0", "worker-1"}
    assert times["worker-0"].busy_s >= 0.1
    assert times["worker-1"].busy_s >= 0.2
    # Both threads of the pool waited at the same time, for this one.
    assert 0.2 <= worker_clock.take_waited_s() <= elapsed_s


def test_stored_content_reaches_every_worker_as_its_own_copy(pool):
    stored = Stored.of(torch.ones(100, 200))
    sent = [pool.submit(number, "double", stored) for number in (0, 1)]
    assert [float(future.result(60).sum()) for future in sent] == [40000.0, 40000.0]


def test_only_the_killed_worker_is_lost_and_a_restart_creates_it_again(pool, caplog):
    before = pool.submit(0, "pid").result(60)
    assert pool.each(kill, pool.workers[1:]) == []
    assert [worker.number for worker in pool.lost] == [1]
    with pytest.raises(WorkerError):
        pool.submit(1, "add", 1).result(60)
    assert [worker.number for worker in pool.restart_lost()] == [1]
    assert pool.submit(1, "add", 1).result(60) == 11
    assert pool.submit(0, "pid").result(60) == before
    assert (pool.num_restarts, pool.workers[1].num_starts) == (1, 2)
    assert "toy 1 failed: toy 1 of 2 was killed by SIGKILL" in caplog.text
    assert "restarting toy 1: restart 1 of at most 1 in a row" in caplog.text
    pool.workers[1].succeeded()
    pool.each(kill, pool.workers[1:])
    pool.restart_lost()  # it succeeded in between
    pool.each(kill, pool.workers[1:])
    with pytest.raises(WorkerError, match=r"toy 1 failed, and max_restarts=1 allows no more restarts in a row"):
        pool.restart_lost()


def test_a_call_that_times_out_loses_its_worker(pool):
    with pytest.raises(LostWorkerError, match=r"toy 0 of 2 did not finish sleep_on within 0.2 s"):
        pool.submit(0, "sleep_on", 0, 60, timeout_s=0.2).result(60)
    assert [worker.number for worker in pool.lost] == [0]


def test_calls_behind_the_one_that_loses_a_worker_are_lost_with_it(pool):
    losses: list[int] = []
    pool.on_loss = lambda worker: losses.append(worker.number)
    calls = [pool.submit(0, "sleep_on", 0, 60, timeout_s=0.2), pool.submit(0, "add", 1), pool.submit(0, "add", 1)]
    with pytest.raises(LostWorkerError, match="did not finish sleep_on"):
        calls[2].result(60)
    assert calls[0].exception() is calls[1].exception() is calls[2].exception()
    assert losses == [0]
    pool.restart_lost()
    assert pool.submit(0, "add", 1).result(60) == 1


def test_an_error_ends_the_pool_and_what_others_are_busy_with(pool):
    processes = [psutil.Process(pool.submit(number, "pid").result(60)) for number in (0, 1)]

    def work(worker: PoolWorker) -> None:
        if worker.number == 1:
            raise DataError("no such prompt")
        worker.run("sleep_on", 0, 60)

    with pytest.raises(DataError, match="no such prompt"):
        pool.each(work)
    psutil.wait_procs(processes, timeout=30)
    assert not any(process.is_running() for process in processes)
    assert pool.lost == []
    with pytest.raises(WorkerError):
        pool.submit(0, "pid").result(60)


@pytest.mark.slow
def test_a_watch_that_fails_ends_the_pool(pool):
    def fail() -> None:
        raise LostWorkerError("rank 0 was killed")

    with pytest.raises(LostWorkerError, match="rank 0 was killed"):
        pool.each(lambda worker: worker.run("sleep_on", 0, 60), watch=fail)
    assert pool.lost == []


def test_a_worker_that_does_not_start_ends_all(caplog):
    with pytest.raises(WorkerError, match="in the start"):
        WorkerPool(ExitsAtStart, [Arguments()] * 2, hosting=HOSTING, max_restarts=5)


def test_on_start_is_called_for_every_new_process():
    starts: list[tuple[int, int]] = []

    def add(worker: PoolWorker) -> None:
        starts.append((worker.number, worker.run("add", 5)))

    with new_pool(1, on_start=add) as pool:
        pool.each(kill)
        pool.restart_lost()
        assert starts == [(0, 5), (0, 5)]
        assert pool.submit(0, "add", 1).result(60) == 6


def test_shutdown_ends_busy_workers_and_later_calls_fail():
    pool = new_pool(1)
    process = psutil.Process(pool.submit(0, "pid").result(60))
    busy = pool.submit(0, "sleep_on", 0, 600)
    pool.shutdown(timeout_s=0.2)
    pool.shutdown()
    with pytest.raises(WorkerError):
        busy.result(60)
    with pytest.raises(WorkerError, match="was shut down"):
        pool.submit(0, "pid").result(60)
    assert not process.is_running()


def test_a_lost_node_is_reported_once(pool, caplog):
    together = threading.Barrier(2)

    def lose_with_node(worker: PoolWorker) -> None:
        loss = LostWorkerError("node 10.0.0.2 was lost")
        loss.node = "10.0.0.2"
        together.wait(10)
        raise loss

    pool.each(lose_with_node)
    assert caplog.text.count("node 10.0.0.2 was lost") == 1


def test_restarts_count_in_a_row_for_each_worker_and_in_all():
    with new_pool(max_restarts=2) as pool:
        for worker in (0, 0, 1):
            pool.each(kill, [pool.workers[worker]])
            pool.restart_lost()
        assert [worker.restarts_in_a_row for worker in pool.workers] == [2, 1]
        pool.workers[0].succeeded()
        pool.each(kill, [pool.workers[0]])
        pool.restart_lost()
        assert pool.num_restarts == 4


def test_a_negative_number_of_restarts_is_refused():
    with pytest.raises(ConfigError, match=r"env.max_restarts=-1 is negative"):
        new_pool(max_restarts=-1, setting="env.")
