"""An environment in Ray actors answers as it does in the driver's program, and outlives its actors."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time

import psutil
import pytest
import ray

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.launchers import ray_placement
from lucidrl.distributed.launchers.ray import check_can_be_placed
from lucidrl.envs.text.actor_pool import EnvActors
from lucidrl.envs.text.config import EnvConfig
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.errors import ConfigError, EnvironmentFailure
from tests.faults.processes import wait_until_gone
from tests.ray.judges import Judge, request, requests
from tests.ray.nodes import without_ids

RAY = ClusterConfig(launcher="ray", start_timeout_s=60)


def env_config(num_actors: int, **settings) -> EnvConfig:
    return EnvConfig(name="tests.ray.judges:Judge", num_actors=num_actors, **settings)


@pytest.fixture(scope="module")
def shared_pool(cluster, tmp_path_factory):
    with EnvActors(env_config(2), RAY, tmp_path_factory.mktemp("logs")) as pool:
        yield pool
        pids = pids_of(pool)
    wait_until_gone(pids, timeout_s=10)


@pytest.fixture
def pool(shared_pool):
    """Two actors, both of which have started; tests may harm them."""

    asyncio.run(both_started(shared_pool))
    return shared_pool


async def both_started(pool: EnvActors) -> None:
    await asyncio.gather(*(pool._have_started(number) for number in (0, 1)))


def asking(pool, on_error="fail", deadline_s=30.0, max_concurrency=8) -> EnvRunner:
    return EnvRunner(pool, deadline_s, max_concurrency, on_error)


def pids_of(pool: EnvActors) -> list[int]:
    return [actor.place.pid for actor in pool._actors if actor.place is not None]


def rewards(replies) -> list[float | None]:
    return [None if reply is None else reply.reward for reply in replies]


def test_calls_are_spread_over_all_actors_and_replies_come_in_order(pool):
    with asking(pool) as runner:
        replies = runner.step(requests(*("x" * length for length in range(20))))
    assert rewards(replies) == list(range(20))
    assert {reply.metrics["pid"] for reply in replies} == set(pids_of(pool))
    assert os.getpid() not in pids_of(pool)
    assert len({actor.place.node for actor in pool._actors}) == 2


def test_a_call_goes_to_the_actor_with_the_fewest_under_way(pool):
    with asking(pool) as runner:
        replies = runner.step(requests("wait 0.5", *["x"] * 7))  # eight calls
    slow, *quick = [reply.metrics["pid"] for reply in replies]
    assert sorted(map(quick.count, pids_of(pool))) == [3, 4]
    assert quick.count(slow) == 3


@pytest.mark.parametrize(
    ("answer", "complaint", "cause"),
    [
        ("raise", "raised KeyError: 'no such reward'", KeyError),
        ("exit", "raised SystemExit: 1", SystemExit),
        ("unpicklable", r"raised RuntimeError: tests\.ray\.judges\.UnpicklableError: wheel and axle", RuntimeError),
    ],
)
def test_what_the_environment_raises_is_raised_with_the_actors_traceback(pool, answer, complaint, cause):
    complaint = rf"tests\.ray\.judges:Judge\.step {complaint} \(sample s1"
    num_before = pool.num_replaced
    with asking(pool) as runner, pytest.raises(EnvironmentFailure, match=complaint) as caught:
        runner.step(requests("fine", answer))
    assert isinstance(caught.value.__cause__, cause)
    assert "in _do" in str(caught.value.__cause__.__cause__)
    assert pool.num_replaced == num_before


def test_actors_leave_ctrl_c_to_the_driver_and_print_to_the_folder_of_the_run(pool):
    pids = pids_of(pool)
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    with asking(pool) as runner:
        for _ in range(3):
            assert rewards(runner.step(requests("a", "bb"))) == [1, 2]
    assert pids_of(pool) == pids
    assert [actor.log.path.name for actor in pool._actors] == ["actor_0.log", "actor_1.log"]
    assert all(actor.log.tail().startswith("the judge is here") for actor in pool._actors)


def test_a_late_call_that_awaits_is_given_up_and_costs_no_actor(pool):
    pids, num_before = pids_of(pool), pool.num_replaced
    with asking(pool, "drop", deadline_s=1.0, max_concurrency=1) as runner:
        assert rewards(runner.step(requests("a", "hang", "ccc"))) == [1, None, 3]
        assert runner.counts == {"deadline": 1}
    assert pool.num_replaced == num_before
    assert pids_of(pool) == pids


def test_a_call_that_is_too_late_names_the_actor(pool):
    with asking(pool, deadline_s=0.5) as runner, pytest.raises(EnvironmentFailure) as caught:
        runner.step([request("hang")])
    text = without_ids(str(caught.value))
    assert f"exceeded its deadline of 0.5 s in actor 0 on node NODE, process {pids_of(pool)[0]}, whose log is" in text
    assert "actor_0.log (sample s0, turn 1)" in text


def test_calls_of_a_killed_actor_are_sent_again_and_it_is_replaced(pool, caplog):
    (first, second), num_before = pids_of(pool), pool.num_replaced
    threading.Timer(0.5, os.kill, (first, signal.SIGKILL)).start()
    started = time.monotonic()
    with asking(pool, max_concurrency=4) as runner, caplog.at_level(logging.WARNING):
        replies = runner.step(requests("wait 1", "wait 1 ", "wait 1  ", "wait 1   "))
    assert time.monotonic() - started < 10
    assert rewards(replies) == [6, 7, 8, 9]
    assert [reply.metrics["pid"] for reply in replies] == [second] * 4
    assert pool.num_replaced == runner.num_replaced == num_before + 1
    text = without_ids(caplog.text)
    assert f"actor 0 on node NODE, process {first} died (The actor is dead because its worker process has died" in text
    assert "1 in a row of env.max_restarts=3; another takes its place\nLast lines of actor 0 (" in text


def test_what_takes_the_place_of_an_actor_is_asked_too_as_soon_as_it_has_started(pool):
    first, second = pids_of(pool)
    os.kill(first, signal.SIGKILL)
    with asking(pool) as runner:
        runner.step(requests("a", "bb"))
        replacement = pool._actors[0]
        ray.wait([replacement.started], timeout=60)
        replacement.start_until = 0.0  # it started in time, and nobody was waiting for it
        asked = {reply.metrics["pid"] for reply in runner.step(requests(*"abcdefgh"))}
    assert asked == {replacement.place.pid, second}


@pytest.mark.slow
def test_actors_that_die_together_are_replaced_whatever_their_number(cluster, tmp_path):
    with EnvActors(env_config(2, max_restarts=1), RAY, tmp_path) as pool, asking(pool) as runner:
        for _ in range(2):
            pids = [actor.place.pid for actor in pool._actors]
            threading.Timer(0.5, lambda pids=pids: [os.kill(pid, signal.SIGKILL) for pid in pids]).start()
            assert rewards(runner.step(requests(*["wait 1"] * 4))) == [6] * 4
            asyncio.run(both_started(pool))
        assert pool.num_replaced == 4


@pytest.mark.slow
def test_a_stopped_actor_is_found_at_the_deadline_and_nothing_is_lost(pool):
    (first, second), num_before = pids_of(pool), pool.num_replaced
    os.kill(first, signal.SIGSTOP)
    started = time.monotonic()
    with asking(pool, "drop", deadline_s=1.0, max_concurrency=2) as runner:
        assert rewards(runner.step(requests("a", "bb", "ccc", "dddd"))) == [1, 2, 3, 4]
    assert time.monotonic() - started < 1.0 + 10
    assert pool.num_replaced == num_before + 1
    wait_until_gone([first], timeout_s=10)
    assert psutil.pid_exists(second)


@pytest.mark.slow
def test_a_blocking_sample_is_dropped_without_its_neighbours(pool, caplog):
    num_before = pool.num_replaced
    with asking(pool, "drop", deadline_s=1.0, max_concurrency=2) as runner:
        assert rewards(runner.step(requests("block", "bb", "ccc", "dddd"))) == [None, 2, 3, 4]
        assert runner.counts == {"deadline": 1}
    assert pool.num_replaced > num_before
    assert "is stuck: it gave up no call in 3 s after env.deadline_s" in caplog.text


@pytest.mark.slow
def test_an_only_actor_that_dies_of_a_call_once_is_replaced_and_answers(cluster, tmp_path):
    with EnvActors(env_config(1), RAY, tmp_path) as pool, asking(pool) as runner:
        answer = f"once {tmp_path / 'mark'}"
        assert rewards(runner.step([request(answer)])) == [len(answer)]
        assert pool.num_replaced == 1


@pytest.mark.slow
def test_deaths_in_a_row_stop_the_run_whatever_becomes_of_samples(cluster, tmp_path):
    with (
        EnvActors(env_config(1, max_restarts=1), RAY, tmp_path) as pool,
        asking(pool, "drop") as runner,
        pytest.raises(EnvironmentFailure) as caught,
    ):
        runner.step([request("die")])
    text = without_ids(str(caught.value))
    assert text.startswith("environment tests.ray.judges:Judge: actor 0 on node NODE, process")
    assert "after env.max_restarts=1 others in its place without an answer in between; mend the environment" in text
    assert text.endswith(f"Last lines of actor 0 ({tmp_path / 'actor_0.log'}):\n  the judge is here\n  about to die")
    assert pool.num_replaced == 1


@pytest.mark.slow
def test_an_environment_that_cannot_be_made_in_an_actor_is_refused_as_in_the_driver(cluster, tmp_path):
    only_here = {"only_in": os.getpid()}
    Judge(**only_here)
    with pytest.raises(ConfigError, match=r"judges:Judge cannot be made with .* OSError: there is no judge here"):
        EnvActors(env_config(2, kwargs=only_here), RAY, tmp_path)


@pytest.mark.slow
def test_an_environment_that_ends_the_process_in_which_it_is_made_does_not_end_the_driver(cluster, tmp_path):
    kwargs = {"only_in": os.getpid(), "leaves": True}
    with pytest.raises(ConfigError, match=r"judges:Judge cannot be made: it ended its process with SystemExit\(3\)"):
        EnvActors(env_config(1, kwargs=kwargs), RAY, tmp_path)


def test_actors_for_which_there_is_no_room_beside_the_worker_are_refused(shared_pool, cluster, monkeypatch):
    at = ClusterConfig(address=cluster.address)  # one CPU for a worker; two of four are held by the shared actors
    check_can_be_placed(at, num_env_actors=1)
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"env\.num_actors=5 asks Ray for CPU 1 for each actor, but .* of 2 free"):
        check_can_be_placed(at, num_env_actors=5)
    assert time.monotonic() - started < 2
    monkeypatch.setattr(ray_placement, "RETURN_DEADLINE_S", 1.0)
    with pytest.raises(ConfigError, match=r"CPU 0 of 2 free.*\. Lower env\.num_actors, or end what holds the rest"):
        check_can_be_placed(at, num_env_actors=2)


@pytest.mark.slow
def test_calls_of_a_lost_node_are_answered_by_another_and_its_actor_moves(pool, cluster):
    cluster.add_node(num_cpus=2)
    head = cluster.head_node.all_processes["raylet"][0].process.pid
    lost = next(actor for actor in pool._actors if psutil.Process(actor.place.pid).ppid() != head)
    raylet = psutil.Process(lost.place.pid).ppid()
    threading.Timer(0.5, os.kill, (raylet, signal.SIGKILL)).start()
    started = time.monotonic()
    with asking(pool, max_concurrency=4) as runner:
        assert rewards(runner.step(requests("wait 1", "wait 1 ", "wait 1  ", "wait 1   "))) == [6, 7, 8, 9]
    assert time.monotonic() - started < 10
    asyncio.run(pool._have_started(lost.number))
    assert pool._actors[lost.number].place.node != lost.place.node
