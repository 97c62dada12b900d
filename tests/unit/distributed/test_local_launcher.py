"""Every failure of a rank reaches the driver soon, and no process is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers import processes
from lucidrl.distributed.workers.group import WorkerGroup
from lucidrl.distributed.workers.outcomes import describe_error
from lucidrl.errors import ConfigError, WorkerError
from tests.faults.processes import own_children
from tests.unit.distributed.toy_workers import (
    ExitsAtStart,
    FailsToStart,
    HangsAtStart,
    Joined,
    StubbornAtShutdown,
    TwoPartError,
    run_sleeper,
)

TWO = ClusterConfig(num_workers=2, start_timeout_s=300, call_timeout_s=60)


@pytest.fixture(autouse=True)
def _leaves_no_process():
    before = own_children()
    yield
    assert own_children() <= before


@pytest.fixture
def group(tmp_path):
    with WorkerGroup(Joined, cluster=TWO, log_dir=tmp_path) as group:
        yield group


def wait_for(condition, timeout_s=60.0):
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


def kill_soon(pid, delay_s=0.3):
    threading.Timer(delay_s, os.kill, (pid, signal.SIGKILL)).start()


def test_an_exception_names_rank_method_and_cause_although_others_wait_for_that_rank(group):
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        group.run_all("raise_while_others_wait", 1)
    assert time.monotonic() - started < 40
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 failed in raise_while_others_wait: ValueError: a bad number; all ranks were")
    assert "Last lines of rank 1" in text
    assert "Rank 0 was at" in text
    assert "in all_reduce" in text
    assert "in raise_while_others_wait" in str(caught.value.__cause__)
    with pytest.raises(WorkerError, match="add cannot run: the worker group failed in raise_while_others_wait"):
        group.run_all("add", 1)


@pytest.mark.slow
def test_errors_of_ours_keep_their_type_and_message(group):
    with pytest.raises(ConfigError) as caught:
        group.run_all("raise_on", 0, ConfigError("lr=-1 is not a rate; make it positive"))
    assert str(caught.value) == "lr=-1 is not a rate; make it positive"
    assert "raised by rank 0 of 2 in raise_on" in caught.value.__notes__[0]
    assert "in raise_on" in str(caught.value.__cause__)


@pytest.mark.slow
def test_a_result_that_cannot_be_pickled_is_an_error(group):
    with pytest.raises(WorkerError, match=r"rank [01] of 2 failed in return_lambda: .*Can't pickle local object"):
        group.run_all("return_lambda")


def test_an_error_that_cannot_be_pickled_travels_as_text():
    raised = describe_error(TwoPartError("left", "right"))
    assert raised.lucid_error is None
    assert "left and right" in raised.summary


def test_a_killed_rank_is_found_at_once_while_the_others_wait_for_it(group):
    kill_soon(group.run_all("pid")[1])
    started = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 of 2 was killed by SIGKILL, perhaps out of memory, in reduce_un"):
        group.run_all("reduce_unless", 1, 60.0)
    assert time.monotonic() - started < 40


@pytest.mark.slow
def test_a_rank_killed_between_calls_is_found_at_the_next_one(group):
    os.kill(group.run_all("pid")[0], signal.SIGKILL)
    time.sleep(0.3)
    started = time.monotonic()
    with pytest.raises(WorkerError, match="rank 0 of 2 was killed by SIGKILL"):
        group.run_all("echo", bytes(10_000_000))
    assert time.monotonic() - started < 40


@pytest.mark.slow
def test_a_rank_killed_between_calls_is_found_by_a_look_at_the_group_too(group):
    group.check()
    os.kill(group.run_all("pid")[1], signal.SIGKILL)
    with pytest.raises(
        WorkerError, match=r"rank 1 of 2 was killed by SIGKILL.* in the wait for its next call; all ranks"
    ):
        wait_for(group.check)  # which returns nothing while all is well
    with pytest.raises(WorkerError, match="the worker group failed in the wait for its next call"):
        group.run_all("pid")
    group.check()  # the call before has raised it already


@pytest.mark.slow
def test_a_killed_rank_is_found_although_its_own_child_holds_the_connection(group):
    sleepers = group.run_all("start_sleeper")
    kill_soon(group.run_all("pid")[1])
    started = time.monotonic()
    try:
        with pytest.raises(WorkerError, match="rank 1 of 2 was killed by SIGKILL"):
            group.run_all("sleep_on", 1, 60.0)
        assert time.monotonic() - started < 40
    finally:
        for pid in sleepers:
            os.kill(pid, signal.SIGKILL)


def test_a_hung_rank_is_reported_at_the_timeout_with_its_stack(group):
    group.run_each("say", [("about to sleep",), ("",)])
    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        group.run_all("reduce_unless", 0, 60.0, timeout_s=1.0)
    assert 1 <= time.monotonic() - started < 40
    text = str(caught.value)
    assert text.startswith("ranks 0, 1 of 2 did not finish reduce_unless within 1 s; all ranks were killed.")
    stack_of_rank_0 = text.partition("Rank 0 was at")[2].partition("Rank 1 was at")[0]
    assert "in sleep_on" in stack_of_rank_0
    assert "in all_reduce" in text.partition("Rank 1 was at")[2]
    assert "about to sleep" in text


@pytest.mark.slow
def test_a_stopped_rank_cannot_hold_the_driver_even_while_it_is_sent_to(group):
    os.kill(group.run_all("pid")[1], signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"ranks? .*1 of 2 did not finish echo within 1 s"):
        group.run_all("echo", bytes(50_000_000), timeout_s=1.0)
    assert time.monotonic() - started < 40


@pytest.mark.slow
def test_an_interrupted_call_ends_the_group(group):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            group.run_all("sleep_on", 0, 60.0)
    finally:
        signal.signal(signal.SIGALRM, previous)
    with pytest.raises(WorkerError, match="the worker group was interrupted in sleep_on"):
        group.run_all("add", 1)


@pytest.mark.slow
def test_an_exception_in_a_constructor_is_raised_without_waiting_for_the_others(tmp_path):
    with pytest.raises(WorkerError, match="rank 1 of 2 failed in the start: OSError: no such model"):
        WorkerGroup(FailsToStart, (1, OSError("no such model")), cluster=TWO, log_dir=tmp_path)


@pytest.mark.slow
def test_a_constructor_that_exits_or_hangs_is_reported(tmp_path):
    with pytest.raises(WorkerError, match=r"rank [01] of 2 exited with code 7 in the start"):
        WorkerGroup(ExitsAtStart, cluster=TWO, log_dir=tmp_path)
    hurried = ClusterConfig(num_workers=2, start_timeout_s=0.5)
    with pytest.raises(WorkerError, match=r"did not finish the start within 0.5 s.*raise cluster.start_timeout_s"):
        WorkerGroup(HangsAtStart, cluster=hurried, log_dir=tmp_path)


@pytest.mark.slow
def test_a_class_that_a_new_process_cannot_import_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "vanishing.py").write_text("class Worker:\n    def shutdown(self): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import vanishing

    (tmp_path / "vanishing.py").unlink()
    with pytest.raises(WorkerError, match="failed in the start: ModuleNotFoundError: No module named 'vanishing'"):
        WorkerGroup(vanishing.Worker, cluster=TWO, log_dir=tmp_path)


@pytest.mark.slow
def test_a_worker_that_does_not_shut_down_is_killed(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(processes, "_SHUTDOWN_TIMEOUT_S", 0.5)
    group = WorkerGroup(StubbornAtShutdown, cluster=TWO, log_dir=tmp_path)
    started = time.monotonic()
    group.shutdown()
    assert time.monotonic() - started < 40
    assert "rank 0 timed out in its shutdown" in caplog.text


@pytest.mark.slow
def test_busy_workers_end_with_their_driver(tmp_path):
    folders = {signal.SIGKILL: tmp_path / "killed", signal.SIGTERM: tmp_path / "terminated"}
    for folder in folders.values():
        folder.mkdir()
    drivers = {number: run_sleeper(str(folder)) for number, folder in folders.items()}
    try:
        for number, folder in folders.items():
            wait_for((folder / "pids").exists, timeout_s=60)
            pids = [int(line) for line in (folder / "pids").read_text().split()]
            assert all(psutil.pid_exists(pid) for pid in pids)
            drivers[number].send_signal(number)
            drivers[number].wait(60)
            wait_for(lambda pids=pids: not any(psutil.pid_exists(pid) for pid in pids), timeout_s=8)
    finally:
        for driver in drivers.values():
            driver.kill()
            driver.wait(60)


@pytest.mark.slow
def test_a_driver_that_forgets_its_group_still_ends():
    code = (
        "from tests.unit.distributed.toy_workers import Plain\n"
        "from lucidrl.distributed.config import ClusterConfig\n"
        "from lucidrl.distributed.workers.group import WorkerGroup\n"
        "group = WorkerGroup(Plain, cluster=ClusterConfig(num_workers=2))\n"
        "print(*group.run_all('pid'))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not [pid for pid in result.stdout.split() if psutil.pid_exists(int(pid))]
