"""Verifiers in killable processes: every hostile completion has one outcome, and nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from lucidrl.errors import ConfigError, EnvironmentFailure, LucidError
from lucidrl.rewards.interfaces import Completion, Limits
from lucidrl.rewards.pool import VerifierPool
from lucidrl.rewards.worker import child_pids, kill_children
from tests.tiers import slow_except
from tests.unit.rewards.hostile import Obedient

TIMEOUT_S = 0.3
SLEEPER = ["sleep", "987.5"]


@pytest.fixture(scope="module")
def pool():
    with VerifierPool("obedient", Obedient, limits=Limits(TIMEOUT_S, 512 << 20), num_workers=2) as pool:
        yield pool


def verify(pool: VerifierPool, *texts: str, **row):
    return asyncio.run(pool.verify([(Completion(text, 1), row) for text in texts]))


def sleepers() -> list[psutil.Process]:
    """Processes that hostile completions leave behind."""
    return [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == SLEEPER]


def wait_for_sleepers(count: int) -> None:
    until = time.monotonic() + 10
    while len(sleepers()) < count:
        assert time.monotonic() < until
        time.sleep(0.02)


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def wait_until_gone(processes: list[psutil.Process], timeout_s: float = 5.0) -> None:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_the_worker_never_imports_torch(pool):
    modules = pool.modules()
    assert "tests.unit.rewards.hostile" in modules
    assert not {"torch", "transformers", "ray"} & set(modules)


def test_scores_come_in_order_with_the_columns_of_the_row(pool):
    texts = ["x" * (number % 7) for number in range(300)]
    assert [found.score for found in verify(pool, *texts, bonus=1)] == [len(text) + 1.0 for text in texts]


def test_completions_and_rows_of_any_size_reach_the_verifier(pool):
    texts = ["x" * 3_000_000, "y", "z" * 3_000_000, "\udcff invalid"]
    assert [found.score for found in verify(pool, *texts, column="c" * 1_000_000)] == [3_000_000, 1, 3_000_000, 9]


@pytest.mark.parametrize("text", slow_except(["sleep 60", "loop", "native", "grandchild 60"], "native"))
def test_a_completion_that_takes_too_long_times_out_alone(pool, text):
    start = time.monotonic()
    before, late, after = verify(pool, "ab", text, "abc")
    assert time.monotonic() - start < TIMEOUT_S + 1
    assert (before.score, after.score) == (2.0, 3.0)
    assert (late.outcome, late.detail) == ("timeout", "exceeded its timeout of 0.3 s")
    assert TIMEOUT_S <= late.seconds < TIMEOUT_S + 1
    assert sleepers() == []


@pytest.mark.slow
def test_the_timeout_counts_from_the_start_of_each_completion(pool):
    """Ten completions of half the timeout each, on two runners, take longer than the timeout together."""
    assert {found.outcome for found in verify(pool, *["sleep 0.15"] * 10)} == {"scored"}


@pytest.mark.parametrize(
    ("text", "outcome", "detail"),
    [
        ("exit 0", "crash", "exited with code 0"),
        ("exit 7", "crash", "exited with code 7"),
        ("segfault", "crash", "killed by signal 11"),
        ("sys.exit", "crash", "SystemExit: 3"),
        ("raise no idea", "crash", "ValueError: no idea"),
        ("memory", "crash", "MemoryError"),
        ("nan", "crash", "returned nan"),
        ("text", "crash", "returned a str"),
        ("parse", "parse_failure", "there is no number"),
    ],
)
def test_every_failure_is_the_outcome_of_its_completion(pool, text, outcome, detail):
    before, found, after = verify(pool, "ab", text, "abc")
    assert (before.score, after.score) == (2.0, 3.0)
    assert found.outcome == outcome
    assert detail in found.detail


def test_a_row_is_bad_by_the_type_of_the_error_and_not_by_its_text(pool):
    (bad,) = verify(pool, "ab", unusable=1)
    (crashed,) = verify(pool, "raise DataError: no idea")
    assert (bad.outcome, bad.detail, bad.is_bad_row) == ("crash", "column 'unusable' is there; remove it", True)
    assert (crashed.outcome, crashed.is_bad_row) == ("crash", False)


def test_processes_that_a_verifier_starts_end_with_it(pool):
    assert [found.outcome for found in verify(pool, "fork", "grandchild", "daemon", "ab")] == ["scored"] * 4
    verify(pool, "ab")
    assert sleepers() == []
    assert len(descendants(pool.pid)) <= 2


def test_a_runner_that_has_grown_is_replaced():
    with VerifierPool("obedient", Obedient, limits=Limits(60, 512 << 20), num_workers=2) as pool:
        assert [found.outcome for found in verify(pool, *["keep 48"] * 4)] == ["scored"] * 4
        assert {found.score for found in verify(pool, *["kept"] * 20)} == {0.0}


def test_a_process_that_cannot_be_killed_is_waited_for_only_for_a_while(monkeypatch):
    others = child_pids()
    stubborn = subprocess.Popen(SLEEPER, start_new_session=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", Mock(side_effect=PermissionError))
        start = time.monotonic()
        assert kill_children(spared=others, timeout_s=0.1) == {stubborn.pid}
        assert time.monotonic() - start < 1
    assert kill_children(spared=others) == set()
    stubborn.wait(5)


def test_output_goes_nowhere_and_cpu_time_is_limited(pool, capfd):
    printed, limit = verify(pool, "print", "limits")
    assert printed.outcome == "scored"
    assert 1 <= limit.score < 60
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_lost_worker_is_restarted_and_gets_its_items_again():
    with VerifierPool("obedient", Obedient, limits=Limits(5), num_workers=1) as pool:
        future = pool.submit(Completion("sleep 0.5", 1), {})
        time.sleep(0.1)
        runners = descendants(pool.pid)
        os.kill(pool.pid, signal.SIGKILL)
        assert future.result(30).score == len("sleep 0.5")
        assert pool.num_restarts == 1
        wait_until_gone(runners)


def test_a_shutdown_ends_all_processes_in_the_middle_of_a_verification():
    pool = VerifierPool("obedient", Obedient, limits=Limits(60), num_workers=2)
    futures = [pool.submit(Completion("grandchild 60", 1), {}) for _ in range(4)]
    wait_for_sleepers(2)
    processes = [psutil.Process(pool.pid), *descendants(pool.pid)]
    start = time.monotonic()
    pool.shutdown()
    pool.shutdown()
    assert time.monotonic() - start < 3
    wait_until_gone(processes)
    assert sleepers() == []
    for future in futures:
        with pytest.raises(EnvironmentFailure, match="shut down"):
            future.result(5)
    with pytest.raises(EnvironmentFailure, match="make another pool"):
        pool.submit(Completion("a", 1), {})


@pytest.mark.slow
def test_a_verifier_that_cannot_be_made_is_refused_in_one_sentence():
    with pytest.raises(ConfigError) as refused:
        VerifierPool("obedient", partial(Obedient, "refuse"), num_workers=1)
    assert str(refused.value) == "reward.kwargs.problem=refuse is not valid; remove it"
    with pytest.raises(LucidError, match="verifier obedient 0 of 1 exited with code 5"):
        VerifierPool("obedient", partial(Obedient, "exit"), num_workers=1)


DRIVER = """
import sys, time
from tests.unit.rewards.hostile import Obedient
from lucidrl.rewards.interfaces import Completion, Limits
from lucidrl.rewards.pool import VerifierPool
from lucidrl.rewards.worker import child_pids, kill_children

if __name__ == "__main__":
    pool = VerifierPool("obedient", Obedient, limits=Limits(60), num_workers=2)
    if sys.argv[1] == "busy":
        futures = [pool.submit(Completion("grandchild 60", 1), {}) for _ in range(2)]
    print("started", flush=True)
    time.sleep(SECONDS)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, None])
@pytest.mark.parametrize("state", ["idle", "busy"])
def test_nothing_is_left_when_the_driver_ends(state, number):
    """SIGTERM goes to the whole process group, as from `timeout` or a batch system."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    code = DRIVER.replace("SECONDS", "2" if number is None else "60")
    command = [sys.executable, "-c", code, state]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, process_group=0)
    assert driver.stdout is not None
    assert driver.stdout.readline() == b"started\n"
    wait_for_sleepers(2 if state == "busy" else 0)
    processes = descendants(driver.pid)
    assert len(processes) >= 3
    if number is not None:
        (os.kill if number == signal.SIGKILL else os.killpg)(driver.pid, number)
    driver.wait(10)
    driver.stdout.close()
    wait_until_gone(processes)
    assert sleepers() == []


@pytest.mark.slow
def test_memory_stays_flat_over_many_hostile_completions():
    def used_bytes() -> int:
        verify(pool, *["ab"] * 20)  # both runners are there
        return sum(process.memory_info().rss for process in [psutil.Process(pool.pid), *descendants(pool.pid)])

    with VerifierPool("obedient", Obedient, limits=Limits(0.05), num_workers=2) as pool:
        texts = ["loop", "memory", "exit", "raise x", "parse", "ab", "print"] * 15
        verify(pool, *texts)
        before = used_bytes()
        for _ in range(4):
            verify(pool, *texts)
        assert used_bytes() < before + (20 << 20)
