"""Faults of collector workers raise soon, and leave no process behind."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import psutil
import pytest

from lucidrl.collectors.multi import MultiAsyncCollector, MultiSyncCollector
from lucidrl.envs import ParallelEnv
from lucidrl.errors import EnvironmentFailure, WorkerError
from tests.faults.processes import wait_until_gone
from tests.tiers import slow_except
from tests.unit.collectors.failing import collect_until_it_fails
from tests.unit.envs.faulty import Faulty, healthy, one_faulty
from tests.unit.envs.toys import Walk

KILLED_OR_STOPPED = [
    (signal.SIGKILL, "killed by SIGKILL"),
    pytest.param(signal.SIGSTOP, "within 0.5 s", marks=pytest.mark.slow),
]
TIMEOUT_S = 0.5
REPETITIONS = 10
KINDS = (MultiSyncCollector, MultiAsyncCollector)
ALL_KINDS = pytest.mark.parametrize("kind", slow_except(KINDS, MultiSyncCollector))


@pytest.fixture(scope="module", autouse=True)
def fork_server():
    """Stays for the next processes; it is not left behind."""
    MultiSyncCollector([Walk], frames_per_batch=1).shutdown()


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = children()
    yield
    gc.collect()
    assert children() == before


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@ALL_KINDS
@pytest.mark.parametrize(
    ("fault", "what", "trace"),
    [
        ("raise", r"failed in a rollout: ValueError: the wheel came off", r"in _raise\n"),
        pytest.param(
            "unpicklable",
            r"failed in a rollout: .*UnpicklableError: wheel and axle",
            r"in _raise_unpicklable\n",
            marks=pytest.mark.slow,
        ),
        pytest.param("leave", r"failed in a rollout: SystemExit: enough", r"sys\.exit", marks=pytest.mark.slow),
        pytest.param("exit", r"exited with code 7 in a rollout", None, marks=pytest.mark.slow),
        ("kill", r"was killed by SIGKILL, perhaps out of memory, in a rollout", None),
    ],
)
def test_a_worker_that_fails_is_named_at_once_with_its_traceback(kind, fault, what, trace):
    collector = kind(one_faulty(2, 1, fault), frames_per_batch=20, timeout_s=60)
    failure, seconds = collect_until_it_fails(collector)
    assert re.match(f"worker 1 of 2 {what}", str(failure))
    assert seconds < 30
    if trace is not None:
        assert re.search(trace, str(failure.__cause__))
    with pytest.raises(WorkerError, match="the collector failed in a rollout; create a new collector"):
        collector.next()
    with pytest.raises(WorkerError, match="state_dict cannot begin: the collector failed in a rollout"):
        collector.state_dict()
    collector.shutdown()


@ALL_KINDS
def test_a_worker_that_hangs_is_named_at_the_timeout(kind):
    collector = kind(one_faulty(2, 0, "hang"), frames_per_batch=20, timeout_s=TIMEOUT_S)
    failure, seconds = collect_until_it_fails(collector)
    # On a busy machine the other one may be late too.
    assert re.match(r"worker [01] of 2 did not finish a rollout within 0\.5 s\. .* raise timeout_s", str(failure))
    assert seconds < TIMEOUT_S + 30


@pytest.mark.parametrize(("number", "what"), KILLED_OR_STOPPED)
def test_a_worker_that_is_killed_or_stopped_from_outside_is_reported(number, what):
    for repetition in range(REPETITIONS):
        collector = KINDS[repetition % 2]([healthy] * 2, frames_per_batch=20, timeout_s=TIMEOUT_S)
        if repetition % 4 > 1:
            collector.next()
        os.kill(collector.workers.pids[1], number)
        failure, seconds = collect_until_it_fails(collector)
        assert re.match(rf"worker [01] of 2 .*{what}", str(failure))
        assert seconds < TIMEOUT_S + 30


@pytest.mark.parametrize(("number", "what"), KILLED_OR_STOPPED)
def test_calls_report_a_killed_or_stopped_worker_too(number, what):
    collector = MultiSyncCollector([healthy] * 2, frames_per_batch=20, timeout_s=TIMEOUT_S)
    os.kill(collector.workers.pids[0], number)
    with pytest.raises(WorkerError, match=rf"worker [01] of 2 .*{what}"):
        collector.set_seed(0)


def test_workers_survive_ctrl_c():
    """A program that finishes its step first still needs its workers."""
    with MultiSyncCollector([healthy] * 2, frames_per_batch=20) as collector:
        for pid in collector.workers.pids:
            os.kill(pid, signal.SIGINT)
        assert collector.next().numel() == 20


@pytest.mark.slow
def test_a_dead_worker_whose_child_process_lives_is_reported_at_once():
    def forking():
        if os.fork() == 0:
            time.sleep(40)  # and holds the worker's connections open
            os._exit(0)
        return healthy()

    collector = MultiSyncCollector([healthy, forking], frames_per_batch=20, timeout_s=60)
    os.kill(collector.workers.pids[1], signal.SIGKILL)
    failure, seconds = collect_until_it_fails(collector)
    assert str(failure).startswith("worker 1 of 2 was killed by SIGKILL")
    assert seconds < 30


def test_a_large_argument_for_a_stopped_worker_does_not_block():
    collector = MultiSyncCollector([healthy] * 2, frames_per_batch=20, timeout_s=TIMEOUT_S)
    os.kill(collector.workers.pids[0], signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"worker 0 of 2 did not finish set_post_collect_hook within 0\.5 s"):
        collector.set_post_collect_hook(partial(print, bytes(10_000_000)))
    assert time.monotonic() - begun < TIMEOUT_S + 30


@pytest.mark.slow
def test_an_interrupted_call_kills_the_workers():
    """Its replies would be mistaken for those of the next call."""
    collector = MultiSyncCollector([healthy] * 2, frames_per_batch=20, timeout_s=60)
    os.kill(collector.workers.pids[1], signal.SIGSTOP)
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        collector.set_post_collect_hook(partial(print, bytes(10_000_000)))
    with pytest.raises(
        WorkerError, match="state_dict cannot begin: the collector was interrupted in set_post_collect_hook"
    ):
        collector.state_dict()


def test_a_lucid_error_keeps_its_type():
    def raising():
        raise EnvironmentFailure("the track is closed; wait for summer")

    with pytest.raises(EnvironmentFailure, match="the track is closed; wait for summer") as caught:
        MultiSyncCollector([healthy, raising], frames_per_batch=2)
    assert "raised by worker 1 of 2 in the start" in caught.value.__notes__
    assert "in raising" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import os; os._exit(3)", "worker 1 of 2 exited with code 3 in the start"),
        ("import time; time.sleep(99)", r"worker 1 of 2 did not finish the start within 1 s\. .*start_timeout_s"),
    ],
)
def test_a_start_that_fails_is_reported(code, what):
    with pytest.raises(WorkerError, match=what):
        MultiSyncCollector([healthy, lambda: exec(code)], frames_per_batch=2, start_timeout_s=1)


@ALL_KINDS
def test_shutdown_does_not_wait_for_busy_workers(kind):
    collector = kind([lambda: Faulty("hang")] * 2, frames_per_batch=20)
    collector.workers.request(0, 20, 0)
    begun = time.monotonic()
    collector.shutdown()
    assert time.monotonic() - begun < 30


@pytest.mark.slow
def test_a_garbage_collected_collector_ends_its_workers():
    collector = MultiAsyncCollector([healthy] * 2, frames_per_batch=20)
    collector.next()
    pids = collector.workers.pids
    del collector
    gc.collect()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.slow
def test_env_processes_of_a_worker_end_with_it():
    before = children()
    collector = MultiSyncCollector([lambda: ParallelEnv(2, healthy)] * 2, frames_per_batch=8, timeout_s=20)
    collector.next()
    env_processes = children() - before - set(collector.workers.pids)
    assert len(env_processes) >= 2
    os.kill(collector.workers.pids[0], signal.SIGKILL)
    collect_until_it_fails(collector)
    wait_until_gone(env_processes)


# ---- programs


PROGRAM = """
import sys, time
from lucidrl.collectors import {kind}
from lucidrl.envs import GymEnv

collector = {kind}([lambda: GymEnv("CartPole-v1")] * 2, frames_per_batch=200)
collector.next()
print(*collector.workers.pids, flush=True)
{rest}
"""


def program(kind, rest=""):
    """Start a program without shutdown and main guard; returns it and the processes of its workers."""
    code = PROGRAM.format(kind=kind.__name__, rest=rest)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    pids = [int(word) for word in process.stdout.readline().split()]
    return process, pids


@pytest.mark.slow
def test_a_program_without_shutdown_exits_silently():
    process, pids = program(MultiSyncCollector)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0
    assert errors == ""
    wait_until_gone(pids)


@pytest.mark.slow
def test_an_interrupted_program_exits_at_once_without_output_of_the_workers():
    process, pids = program(MultiAsyncCollector, "while True: collector.next()")
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of them
    _, errors = process.communicate(timeout=60)
    assert errors.strip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == 1
    wait_until_gone(pids)


@pytest.mark.slow
def test_workers_end_with_a_program_that_is_killed():
    process, pids = program(MultiAsyncCollector, "while True: collector.next()")
    process.kill()
    process.communicate()
    wait_until_gone(pids)
