"""RayCollector: what becomes of actors that fail, and of a collector that nobody has any more."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time

import pytest
import ray
import torch

from lucidrl.collectors import RayCollector
from lucidrl.collectors.trajectories import POLICY_VERSION, TRAJECTORY_IDS
from lucidrl.errors import EnvironmentFailure, WorkerError
from lucidrl.profiling import gate
from tests.faults.processes import wait_until_gone
from tests.ray.collecting import ENDED, NODE, Policy, check_actors_gave_all_back
from tests.unit.collectors.failing import collect_until_it_fails
from tests.unit.collectors.toys import SlowWalk
from tests.unit.envs.faulty import healthy, one_faulty
from tests.unit.envs.toys import Walk
from tests.unit.profiling.reading import counts_of

pytestmark = pytest.mark.usefixtures("ray_of_the_program")


@pytest.mark.parametrize(
    ("create_env_fn", "error", "message", "trace"),
    [
        (
            one_faulty(1, 0, "raise"),
            WorkerError,
            rf"worker 0 of 1 {NODE} failed in a rollout: ValueError: the wheel came off; {ENDED}",
            r"in _raise\n",
        ),
        pytest.param(
            one_faulty(2, 1, "leave"),
            WorkerError,
            rf"worker 1 of 2 {NODE} failed in a rollout: SystemExit: enough; {ENDED}",
            r"sys\.exit",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_actor_that_raises_is_named_with_its_traceback_and_never_replaced(create_env_fn, error, message, trace):
    collector = RayCollector(create_env_fn, frames_per_batch=20, sync=True, max_restarts=3)
    pids = collector.workers.pids
    failure, _ = collect_until_it_fails(collector, error)
    assert re.match(message, str(failure))
    assert re.search(trace, str(failure.__cause__))
    assert collector.num_restarts == 0
    wait_until_gone(pids)
    with pytest.raises(WorkerError, match="a rollout cannot begin: the collector failed in a rollout; make another"):
        collector.next()
    collector.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("error::UserWarning")  # that memory which others have cannot be written to
def test_a_dead_actor_is_replaced_with_the_newest_weights_as_often_as_it_may_be_and_then_told(caplog):
    torch.manual_seed(0)  # which decides what actors draw
    policy = Policy()
    collector = RayCollector([SlowWalk] * 2, policy, frames_per_batch=10, max_restarts=1, post_collect_hook=print)
    collector.set_post_collect_hook(lambda batch: batch.set("mark", torch.ones(*batch.batch_size, 5000)))  # a large one
    batches = [collector.next() for _ in range(4)]
    collector.update_policy_weights_(Policy(7))
    collector.update_policy_weights_(Policy(8), version=80)
    while {int(batch[TRAJECTORY_IDS][0]) % 2 for batch in batches if batch[POLICY_VERSION][0] == 80} != {0, 1}:
        batches.append(collector.next())
    first = collector.workers.pids
    os.kill(first[1], signal.SIGKILL)
    while collector.workers.pids == first:
        batches.append(collector.next())
    replaced = next(batch for batch in batches[::-1] if int(batch[TRAJECTORY_IDS][0]) % 2 == 1)
    assert replaced[POLICY_VERSION].unique().tolist() == [80]
    assert replaced["largest"].unique().tolist() == [8]
    first_of_the_dead = next(batch for batch in batches if int(batch[TRAJECTORY_IDS][0]) % 2 == 1)
    assert not torch.equal(replaced["action"], first_of_the_dead["action"])  # draws of its own
    assert all(batch.numel() == 10 and (batch["mark"].add_(1) == 2).all() for batch in batches)
    ids = torch.cat([batch[TRAJECTORY_IDS] for batch in batches])
    ids = ids[ids % 2 == 1]
    assert (ids.diff() >= 0).all()  # no number was given twice
    assert collector.num_restarts == 1
    assert re.search(
        rf"worker 1 {NODE} died \(.*another one takes its place, with the newest .*\(restart 1 of 1\)", caplog.text
    )

    second = collector.workers.pids
    assert second[0] == first[0]
    os.kill(second[0], signal.SIGKILL)
    failure, seconds = collect_until_it_fails(collector)
    assert re.match(rf"worker 0 of 2 {NODE} died \(.*worker process has died.*\) in a rollout; {ENDED}", str(failure))
    assert isinstance(failure.__cause__, ray.exceptions.RayActorError)
    assert seconds < 10
    wait_until_gone([*first, *second])


@pytest.mark.slow
def test_a_stopped_actor_is_told_at_the_deadline_and_ended_even_if_it_replaced_another():
    collector = RayCollector([healthy] * 2, frames_per_batch=20, sync=True, timeout_s=2, max_restarts=1)
    os.kill(collector.workers.pids[1], signal.SIGKILL)
    collector.next()
    assert collector.num_restarts == 1
    pids = collector.workers.pids
    os.kill(pids[1], signal.SIGSTOP)
    failure, seconds = collect_until_it_fails(collector)
    assert re.match(
        rf"workers? (0, )?1 of 2 did not finish a rollout within 2 s; {ENDED}.* raise timeout_s \(.*worker 1 {NODE}\)",
        str(failure),
    )
    assert seconds < 12
    assert collector.num_restarts == 1
    wait_until_gone(pids, timeout_s=15)  # Ray itself waits for some seconds


@pytest.mark.slow
def test_an_actor_whose_env_hangs_is_told_at_the_deadline():
    collector = RayCollector(one_faulty(2, 0, "hang"), frames_per_batch=20, timeout_s=2)
    pids = collector.workers.pids
    failure, seconds = collect_until_it_fails(collector)
    assert re.match(rf"workers? 0(, 1)? of 2 did not finish a rollout within 2 s; {ENDED}", str(failure))
    assert re.search(rf"raise timeout_s \(worker 0 {NODE}", str(failure))
    assert seconds < 12
    wait_until_gone(pids)


@pytest.mark.slow
def test_a_dead_actor_is_told_by_calls_and_replaced_in_the_middle_of_one(caplog, tmp_path):
    with RayCollector([SlowWalk] * 2, Policy(), frames_per_batch=400, sync=True, max_restarts=3) as collector:
        collector.next()
        collector.enable_profile(num_rollouts=9, save_path=tmp_path / "trace.json")
        for _ in range(2):
            os.kill(collector.workers.pids[0], signal.SIGKILL)
            assert collector.map_fn("set_seed", [(3,), (30,)]) == [4, 31]
        assert collector.num_restarts == 2
        assert re.findall(r"\(restart (\d) of 3\); the trace that it was recording is lost", caplog.text) == ["1"]
        consumer = threading.Thread(target=collector.next)
        consumer.start()
        time.sleep(0.2)
        os.kill(collector.workers.pids[0], signal.SIGKILL)  # a rollout is under way, and a call comes
        assert len(collector.state_dict()["workers"]) == 2
        consumer.join(30)
        assert collector.num_restarts == 3
        os.kill(collector.workers.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerError, match=rf"worker 0 of 2 {NODE} died .* in state_dict; {ENDED}"):
            collector.state_dict()


@pytest.mark.slow
def test_an_error_of_ours_keeps_its_type_and_a_start_that_fails_leaves_nothing():
    def raising():
        raise EnvironmentFailure("the track is closed; wait for summer")

    with pytest.raises(EnvironmentFailure, match="the track is closed; wait for summer") as caught:
        RayCollector([healthy, raising], frames_per_batch=2)
    assert re.match(rf"raised by worker 1 of 2 {NODE} in the start", caught.value.__notes__[-1])
    with pytest.raises(WorkerError, match=r"worker 1 of 2 not heard of yet, asking for CPU 1 .* died \(.*in the start"):
        RayCollector([healthy, lambda: os._exit(3)], frames_per_batch=2, max_restarts=1)
    check_actors_gave_all_back()


@pytest.mark.slow
def test_actors_are_armed_as_their_driver_is_and_told_to_be_silent_and_the_callers_options_stay(monkeypatch, tmp_path):
    monkeypatch.setattr(gate, "is_armed", True)
    options = {"num_cpus": 0.5, "runtime_env": {"env_vars": {"LUCIDRL_TEST_WORD": "heard"}}}
    before = repr(options)

    def listening():
        assert os.environ["LUCIDRL_TEST_WORD"] == "heard"
        return Walk()

    with RayCollector(listening, num_workers=1, frames_per_batch=10, remote_options=options) as collector:
        assert repr(options) == before
        assert ray.available_resources()["CPU"] % 1 == 0.5
        collector.next()  # and one is under way that nobody asked to record
        for shown, name in ((True, "shown"), (False, "silent")):
            collector.map_fn("set_profiling_enabled", list_of_args=[(shown,)] * collector.num_workers)
            collector.enable_profile(num_rollouts=2, warmup_rollouts=1, save_path=tmp_path / f"{name}.json")
            assert [collector.next().numel() for _ in range(4)] == [10] * 4
    assert counts_of(tmp_path / "shown.json")["Collector.rollout"] == 1
    assert counts_of(tmp_path / "shown.json")["EnvBase.step_and_maybe_reset"] == 10
    assert counts_of(tmp_path / "silent.json") == {}
    collector.shutdown()
    with pytest.raises(WorkerError, match="a rollout cannot begin: the collector was shut down; make another one"):
        collector.next()
    assert ray.is_initialized()


@pytest.mark.slow
def test_what_ends_with_the_collector_is_not_replaced_by_a_consumer_that_waits():
    collector = RayCollector([lambda: SlowWalk(0.1)] * 2, frames_per_batch=400, timeout_s=120, max_restarts=9)
    failures = []

    def consume():
        with pytest.raises(WorkerError) as caught:
            collector.next()
        failures.append(caught.value)

    consumer = threading.Thread(target=consume)
    consumer.start()
    time.sleep(1)
    collector.shutdown()
    consumer.join(10)
    assert len(failures) == 1
    assert collector.num_restarts == 0
    failures.clear()
    check_actors_gave_all_back()


@pytest.mark.slow
def test_a_collector_that_nobody_has_any_more_ends_its_actors():
    collector = RayCollector([healthy] * 2, frames_per_batch=20)
    collector.next()
    pids = collector.workers.pids
    del collector
    gc.collect()
    wait_until_gone(pids)
