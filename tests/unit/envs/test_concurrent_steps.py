"""Several threads score at the same time in the same environment workers, and errors still name the right sample."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lucidrl.distributed.config import ClusterConfig
from lucidrl.envs.text.config import EnvConfig
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.envs.text.workers import EnvWorkerPool
from lucidrl.errors import EnvironmentFailure
from lucidrl.utils.gate import Gate
from tests.unit.envs.scorers import request


@pytest.fixture(scope="module")
def pool():
    """One worker; tests may harm it."""
    config = EnvConfig(name="tests.unit.envs.scorers:Scorer", timeout_s=10.0, max_restarts=10)
    pool = EnvWorkerPool(config, ClusterConfig(num_threads=1))
    yield pool
    pool.shutdown()


def step_all(runner: EnvRunner, *completions: str):
    """The reply, or the error, of each completion, each scored by a thread."""

    def step(job):
        number, completion = job
        try:
            [reply] = runner.step([request(completion, number)])
        except EnvironmentFailure as error:
            return str(error)
        return None if reply is None else reply.reward

    with ThreadPoolExecutor(len(completions)) as threads:
        return list(threads.map(step, enumerate(completions)))


def runner_of(pool, on_error="fail", timeout_s=10.0) -> EnvRunner:
    return EnvRunner(pool, timeout_s, 16, on_error, is_concurrent=True)


def test_a_call_that_waits_does_not_hold_up_the_others(pool):
    ended: dict[str, float] = {}
    runner = runner_of(pool)

    def step(completion: str) -> None:
        runner.step([request(completion)])
        ended[completion] = time.monotonic()

    slow = threading.Thread(target=step, args=("wait 1.5",))
    slow.start()
    for completion in ("a", "bb", "ccc"):
        step(completion)
    slow.join()
    assert max(ended[name] for name in ("a", "bb", "ccc")) < ended["wait 1.5"]


def test_all_calls_of_a_killed_worker_are_repeated_and_only_the_reason_is_dropped(pool):
    before = pool.num_restarts
    runner = runner_of(pool, "drop")
    assert step_all(runner, "a", "die", "ccc", "dddd") == [1.0, None, 3.0, 4.0]
    assert pool.num_restarts > before
    assert dict(runner.counts) == {"exited": 1}


def test_the_error_names_the_sample_that_killed_the_worker(pool):
    found = step_all(runner_of(pool), "a", "bb", "die")
    assert found[:2] == [1.0, 2.0]
    assert "sample s2" in found[2]


def test_a_gate_lets_many_in_together_and_one_alone():
    gate, inside, most = Gate(), [], []

    def enter(alone: bool) -> None:
        with gate.alone() if alone else gate.together():
            inside.append(alone)
            time.sleep(0.01)
            most.append(list(inside))
            inside.remove(alone)

    threads = [threading.Thread(target=enter, args=(number % 3 == 0,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(most) == 12
    assert all(len(seen) == 1 for seen in most if True in seen)
