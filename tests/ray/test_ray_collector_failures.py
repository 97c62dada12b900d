"""RayCollector: workers that fail and are restarted, and a collector that is garbage."""

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
from tests.ray.collecting import NODE, Policy, check_actors_gave_all_back
from tests.unit.collectors.failing import collect_until_it_fails
from tests.unit.collectors.toys import SlowWalk
from tests.unit.envs.faulty import healthy, one_faulty
from tests.unit.envs.toys import Walk
from tests.unit.profiling.reading import counts_of

pytestmark = pytest.mark.usefixtures("ray_of_the_program")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("create_env_fn", "error", "message", "trace"),
    [
        (
            one_faulty(1, 0, "raise"),
            WorkerError,
            rf"worker 0 of 1 {NODE} failed in a rollout: ValueError: the wheel came off",
            r"in _raise\n",
        ),
        (
            one_faulty(2, 1, "leave"),
            WorkerError,
            rf"worker 1 of 2 {NODE} failed in a rollout: SystemExit: enough",
            r"sys\.exit",
        ),
    ],
)
def test_a_worker_that_raises_is_named_with_its_traceback_and_never_restarted(create_env_fn, error, message, trace):
    collector = RayCollector(create_env_fn, frames_per_batch=20, sync=True, max_restarts=3)
    pids = collector.workers.pids
    failure, _ = collect_until_it_fails(collector, error)
    assert re.match(message, str(failure))
    assert re.search(trace, str(failure.__cause__))
    assert collector.num_restarts == 0
    wait_until_gone(pids)
    with pytest.raises(WorkerError, match="a rollout cannot begin: the collector failed in a rollout; create"):
        collector.next()
    collector.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("error::UserWarning")  # that memory which others have cannot be written to
def test_a_killed_worker_is_restarted_with_the_newest_weights_and_the_hook(caplog):
    torch.manual_seed(0)  # which decides what workers draw
    policy = Policy()
    collector = RayCollector([SlowWalk] * 2, policy, frames_per_batch=10, max_restarts=1, post_collect_hook=print)
    collector.set_post_collect_hook(lambda batch: batch.set("mark", torch.ones(*batch.batch_size, 5000)))  # a large one
    batches = [collector.next() for _ in range(4)]
    collector.update_policy_weights_(Policy(7))
    collector.update_policy_weights_(Policy(8), version=80)
    while {int(batch[TRAJECTORY_IDS][0]) % 2 for batch in batches if batch[POLICY_VERSION][0] == 80} != {0, 1}:
        batches.append(collector.next())
    for index in (1, 0):  # each may be restarted once in a row
        before = list(collector.workers.pids)
        os.kill(before[index], signal.SIGKILL)
        while collector.workers.pids == before:
            batches.append(collector.next())
        wait_until_gone([before[index]])
        assert collector.workers.pids[1 - index] == before[1 - index]
        while int(batches[-1][TRAJECTORY_IDS][0]) % 2 != index:
            batches.append(collector.next())
        assert batches[-1][POLICY_VERSION].unique().tolist() == [80]
        assert batches[-1]["largest"].unique().tolist() == [8]
        first_of_worker = next(batch for batch in batches if int(batch[TRAJECTORY_IDS][0]) % 2 == index)
        assert not torch.equal(batches[-1]["action"], first_of_worker["action"])  # other random numbers
    assert collector.num_restarts == 2
    assert all(batch.numel() == 10 and (batch["mark"].add_(1) == 2).all() for batch in batches)
    for index in (0, 1):
        ids = torch.cat([batch[TRAJECTORY_IDS] for batch in batches])
        assert (ids[ids % 2 == index].diff() >= 0).all()  # no number was given twice
    assert re.search(rf"worker 1 failed: worker 1 of 2 {NODE} was killed by SIGKILL.* in a rollout", caplog.text)
    assert caplog.text.count("restart 1 of at most 1 in a row") == 2
    pids = list(collector.workers.pids)
    collector.shutdown()
    wait_until_gone(pids)


@pytest.mark.slow
def test_a_worker_that_exits_again_after_its_last_restart_ends_the_collector():
    collector = RayCollector(one_faulty(2, 1, "exit"), frames_per_batch=20, sync=True, max_restarts=1)
    failure, _ = collect_until_it_fails(collector)
    assert re.match(r"worker 1 failed, and max_restarts=1 allows no more restarts in a row", str(failure))
    assert re.match(rf"worker 1 of 2 {NODE} exited with code 7 in a rollout", str(failure.__cause__))
    assert collector.num_restarts == 1
    wait_until_gone(collector.workers.pids)


@pytest.mark.slow
def test_a_stopped_worker_is_restarted_at_the_timeout():
    with RayCollector([healthy] * 2, frames_per_batch=20, sync=True, timeout_s=3, max_restarts=2) as collector:
        stopped = collector.workers.pids[1]
        os.kill(stopped, signal.SIGSTOP)
        assert collector.next().numel() == 20
        assert collector.num_restarts >= 1
        wait_until_gone([stopped])


@pytest.mark.slow
def test_a_worker_whose_env_hangs_is_named_at_the_timeout():
    collector = RayCollector(one_faulty(2, 0, "hang"), frames_per_batch=20, timeout_s=2)
    pids = list(collector.workers.pids)
    failure, seconds = collect_until_it_fails(collector)
    assert re.match(rf"worker [01] of 2 {NODE} did not finish a rollout within 2 s\. .* raise timeout_s", str(failure))
    assert seconds < 45
    wait_until_gone(pids)


@pytest.mark.slow
def test_a_killed_worker_is_restarted_in_the_middle_of_a_call_too(caplog, tmp_path):
    with RayCollector([SlowWalk] * 2, Policy(), frames_per_batch=400, sync=True, max_restarts=2) as collector:
        collector.next()
        collector.enable_profile(num_rollouts=9, save_path=tmp_path / "trace.json")
        for _ in range(2):
            os.kill(collector.workers.pids[0], signal.SIGKILL)
            assert collector.map_fn("set_seed", [(3,), (30,)]) == [4, 31]
        assert collector.num_restarts == 2
        assert caplog.text.count("the trace that collector worker 0 was recording is lost") == 1
        collector.next()  # a success: two more restarts in a row are allowed
        consumer = threading.Thread(target=collector.next)
        consumer.start()
        time.sleep(0.2)
        os.kill(collector.workers.pids[0], signal.SIGKILL)  # a rollout is under way, and a call comes
        assert len(collector.state_dict()["workers"]) == 2
        consumer.join(30)
        assert collector.num_restarts == 3


@pytest.mark.slow
def test_an_error_of_ours_keeps_its_type_and_a_start_that_fails_leaves_nothing():
    def raising():
        raise EnvironmentFailure("the track is closed; wait for summer")

    with pytest.raises(EnvironmentFailure, match="the track is closed; wait for summer") as caught:
        RayCollector([healthy, raising], frames_per_batch=2)
    assert re.match(rf"raised by worker 1 of 2 {NODE} in the start", caught.value.__notes__[-1])
    with pytest.raises(WorkerError, match=rf"worker 1 of 2 {NODE} exited with code 3 in the start"):
        RayCollector([healthy, lambda: os._exit(3)], frames_per_batch=2, max_restarts=1)
    del caught  # its frames hold what was sent
    check_actors_gave_all_back()


@pytest.mark.slow
def test_workers_are_armed_like_their_driver_and_options_of_the_caller_stay(monkeypatch, tmp_path):
    monkeypatch.setattr(gate, "is_armed", True)
    options = {"num_cpus": 0.5, "runtime_env": {"env_vars": {"LUCIDRL_TEST_WORD": "heard"}}}
    before = repr(options)

    def listening():
        assert os.environ["LUCIDRL_TEST_WORD"] == "heard"
        return Walk()

    with RayCollector(listening, num_workers=1, frames_per_batch=10, remote_options=options) as collector:
        assert repr(options) == before
        assert ray.available_resources()["CPU"] % 1 == 0.5
        collector.next()  # and one is pending that is not recorded
        for shown, name in ((True, "shown"), (False, "silent")):
            collector.map_fn("set_profiling_enabled", list_of_args=[(shown,)] * collector.num_workers)
            collector.enable_profile(num_rollouts=2, warmup_rollouts=1, save_path=tmp_path / f"{name}.json")
            assert [collector.next().numel() for _ in range(4)] == [10] * 4
    assert counts_of(tmp_path / "shown.json")["Collector.rollout"] == 1
    assert counts_of(tmp_path / "shown.json")["EnvBase.step_and_maybe_reset"] == 10
    assert counts_of(tmp_path / "silent.json") == {}
    collector.shutdown()
    with pytest.raises(WorkerError, match="the collector was shut down; create a new collector"):
        collector.next()
    assert ray.is_initialized()


@pytest.mark.slow
def test_what_ends_with_the_collector_is_not_restarted_by_a_consumer_that_waits():
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
    consumer.join(60)
    assert len(failures) == 1
    assert collector.num_restarts == 0


@pytest.mark.slow
def test_a_collector_that_is_garbage_ends_its_workers():
    collector = RayCollector([healthy] * 2, frames_per_batch=20)
    collector.next()
    pids = collector.workers.pids
    del collector
    gc.collect()
    wait_until_gone(pids)
