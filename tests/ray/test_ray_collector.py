"""RayCollector: the batches of the collectors with processes, from actors; and what becomes of actors that fail."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from tensordict import TensorDict

from lucidrl.collectors import MultiSyncCollector, RayCollector
from lucidrl.collectors.ray_weights import RayWeights
from lucidrl.collectors.trajectories import POLICY_VERSION, TRAJECTORY_IDS
from lucidrl.errors import ConfigError, EnvironmentFailure, WorkerError
from lucidrl.profiling import gate
from tests.faults.processes import wait_until_gone
from tests.ray.nodes import wait_for
from tests.unit.collectors.toys import Chance, SlowWalk, Versioned
from tests.unit.envs.faulty import healthy, one_faulty
from tests.unit.envs.toys import Walk
from tests.unit.profiling.reading import counts_of, read_trace

HOST = r"[\d.]+ \([0-9a-f]{8}\)"
NODE = rf"on node {HOST}, process \d+,"
ENDED = "all workers were ended"


class Policy(Versioned):
    """Tells its version, as `Versioned` does, and draws its actions."""

    def forward(self, observation):
        return {**super().forward(observation), "action": Chance()(observation)}


@pytest.fixture(scope="module", autouse=True)
def ray_of_the_program():
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        yield
        assert ray.is_initialized()
        check_all_was_given_back()
        ray.shutdown()


@pytest.fixture(scope="module")
def shared():
    """A collector for tests that leave it in order."""
    with RayCollector([Walk] * 2, Policy(), frames_per_batch=20, sync=True) as collector:
        yield collector


def check_all_was_given_back():
    """All CPUs are free, and no object is referred to by this program any more."""
    gc.collect()
    wait_for(lambda: ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU"))
    wait_for(lambda: not ray._private.worker.global_worker.core_worker.get_all_reference_counts())


def collect_until_it_fails(collector, error=WorkerError):
    """The failure, and how long the consumer waited for it."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        begun = time.monotonic()
        try:
            collector.next()
        except error as failure:
            return failure, time.monotonic() - begun
    raise AssertionError("nothing failed")


def are_equal(left, right):
    keys = set(left.keys(include_nested=True, leaves_only=True))
    return keys == set(right.keys(include_nested=True, leaves_only=True)) and all(
        torch.equal(left[key], right[key]) for key in keys
    )


def three_batches(collector, seed):
    """After new episodes; without the numbers of trajectories, which go on."""
    assert collector.set_seed(seed) == seed + 2
    return torch.cat([collector.next() for _ in range(3)]).exclude(TRAJECTORY_IDS)


# ---- what is collected


def test_batches_are_those_of_processes_with_the_same_seed_to_the_bit(shared):
    first, again, other = (three_batches(shared, seed) for seed in (5, 5, 6))
    with MultiSyncCollector([Walk] * 2, Policy(), frames_per_batch=20) as processes:
        processes.update_policy_weights_(version=shared.policy_version)
        expected = three_batches(processes, 5)
    assert are_equal(first, expected)
    assert are_equal(again, expected)
    assert not are_equal(other, expected)


def test_batches_share_no_memory(shared):
    first, second = shared.next(), shared.next()
    before = second.clone()
    for value in first.values(include_nested=True, leaves_only=True):
        value.zero_()
    assert are_equal(second, before)


def test_a_batch_is_of_the_newest_version_whatever_the_weights_come_from(shared):
    for number, source in enumerate(
        [Policy(3), Policy(4).state_dict(), TensorDict.from_module(Policy(5)), None], start=3
    ):
        shared.update_policy_weights_(source, version=10 * number)
        batch = shared.next()
        assert batch["largest"].tolist() == [float(number) if source is not None else 0.0] * 20
        assert batch[POLICY_VERSION].tolist() == [10 * number] * 20
    with pytest.raises(ConfigError, match=r"the weight weight has shape \[3\], but in the policy it is \[20000\]"):
        shared.update_policy_weights_({"weight": torch.zeros(3)})
    assert shared.next()[POLICY_VERSION].tolist() == [60] * 20


def test_an_update_is_put_once_for_all_workers(shared, monkeypatch):
    put, num_puts = ray.put, []
    monkeypatch.setattr(ray, "put", lambda value: num_puts.append(1) or put(value))
    for _ in range(3):
        shared.update_policy_weights_()
        shared.next()
        shared.next()
    assert len(num_puts) == 3


def test_an_update_is_given_once_to_whoever_asks():
    weights = RayWeights(Policy().state_dict())
    assert weights.newer_than(0) == (0, None)
    weights.publish(Policy(1).state_dict(), version=1)
    num_published, newest = weights.newer_than(0)
    assert newest is not None
    assert weights.newer_than(num_published) == (num_published, None)
    weights.close()


def test_weights_are_never_torn_by_a_publisher_that_never_rests(shared):
    policy, stop = Policy(), threading.Event()
    shared.update_policy_weights_(policy, version=0)

    def publish():
        version = 0
        while not stop.is_set():
            version += 1
            with torch.no_grad():
                policy.weight += 1
            shared.update_policy_weights_(policy, version=version)

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        batches = [shared.next() for _ in range(40)]
    finally:
        stop.set()
        publisher.join()
    for batch in batches:
        version = batch[POLICY_VERSION].float()
        assert torch.equal(batch["smallest"], version)
        assert torch.equal(batch["largest"], version)
        assert all(part[POLICY_VERSION].unique().numel() == 1 for part in batch.split(10))
    assert len({int(batch[POLICY_VERSION].max()) for batch in batches}) > 5


def test_methods_are_called_in_every_actor_and_hooks_run_there(shared):
    assert shared.num_workers == 2
    assert shared.map_fn("set_seed", [(3,), (30,)]) == [4, 31]
    assert shared.map_fn("set_profiling_enabled", list_of_args=[(False,)] * shared.num_workers) == [None, None]
    shared.set_profiling_enabled(False)
    shared.set_post_collect_hook(lambda batch: batch.set("pid", torch.full(batch.batch_size, os.getpid())))
    pids = shared.next()["pid"].unique().tolist()
    shared.set_post_collect_hook(None)
    assert set(pids) == set(shared.workers.pids)
    assert all(psutil.Process(pid).name().startswith("ray::CollectorActor") for pid in pids)
    assert "pid" not in shared.next()
    with pytest.raises(ConfigError, match="Collector has no method 'fly' to call"):
        shared.map_fn("fly", [(), ()])


def test_a_state_is_gone_on_from_with_new_episodes(shared):
    shared.set_seed(1)
    before = shared.next()
    state = shared.state_dict()
    shared.next()
    shared.load_state_dict(state)
    assert shared.num_frames == state["num_frames"]
    after = shared.next()
    for index in (0, 1):
        last, first = (batch[TRAJECTORY_IDS][batch[TRAJECTORY_IDS] % 2 == index] for batch in (before, after))
        assert last.max() < first.min()


def test_traces_come_to_the_folder_of_the_driver(shared, tmp_path):
    tmp_path = tmp_path / "braces {and} spaces"  # which mean nothing here
    template = str(tmp_path).replace("{", "{{").replace("}", "}}") + "/{host}_{pid}/worker_{worker_idx}.json"
    shared.enable_profile(workers=[0, 1], num_rollouts=2, warmup_rollouts=1, save_path=template)
    for _ in range(2):
        assert not list(tmp_path.rglob("*.json"))
        shared.next()
    assert not shared.workers.recording
    for index, pid in enumerate(shared.workers.pids):
        (path,) = tmp_path.glob(f"*_{pid}/worker_{index}.json")
        assert read_trace(path)["lucidrl"]["process"] == f"collector worker {index}"
    assert len(list(tmp_path.rglob("*"))) == 4

    # Earlier, if it is disabled; and to be enabled again after that.
    shared.enable_profile(workers=[1], num_rollouts=9, warmup_rollouts=0, save_path=tmp_path.parent / "early.json.gz")
    with pytest.raises(ConfigError, match="worker 1 cannot be recorded: rollouts are being recorded already"):
        shared.enable_profile(workers=[0, 1])
    shared.next()
    shared.disable_profile()
    shared.disable_profile()
    assert (tmp_path.parent / "early.json.gz").read_bytes().startswith(b"\x1f\x8b")


def test_a_trace_that_cannot_be_brought_back_is_a_warning(shared, tmp_path, caplog):
    shared.enable_profile(num_rollouts=1, warmup_rollouts=0, save_path=tmp_path / "gone" / "trace.json")
    (tmp_path / "gone").rmdir()
    (tmp_path / "gone").touch()  # in the way
    assert shared.next().numel() == 20
    assert re.search(r"the trace of collector worker 0 is lost: .*trace\.json cannot be written", caplog.text)


# ---- failures


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
    check_all_was_given_back()


@pytest.mark.slow
def test_a_lost_node_is_told_and_its_actors_are_replaced_on_another():
    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        other = cluster.add_node(num_cpus=2, resources={"other": 2})
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        options = [{}, {"scheduling_strategy": soft_affinity(other.node_id)}]
        with RayCollector(
            [healthy] * 2, Policy(), frames_per_batch=20, sync=True, remote_options=options, max_restarts=1
        ) as collector:
            collector.update_policy_weights_(Policy(3))
            collector.next()
            lost = collector.workers.pids[1]
            cluster.remove_node(other, allow_graceful=False)
            begun = time.monotonic()
            while collector.num_restarts == 0:  # Ray may bring an answer that was on its way
                assert (collector.next()["largest"] == 3).all()
                assert time.monotonic() - begun < 40
            wait_until_gone([lost], timeout_s=75)
    finally:
        ray.shutdown()
        cluster.shutdown()
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)


def soft_affinity(node_id):
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id, soft=True)


# ---- what is asked of Ray


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"num_workers": 5},
            rf"5 workers ask Ray for CPU 5 in all, but the nodes cannot hold all .*: {HOST} has CPU \d of 4 free",
        ),
        ({"remote_options": {"num_cpus": 9}}, r"ask Ray for CPU 18 in all, but no node has enough for each: .*\. Use"),
        ({"remote_options": {"num_cpus": 9, "scheduling_strategy": "SPREAD"}}, "no node has enough for each"),
        ({"remote_options": {"num_gpus": 1}}, r"CPU 2, GPU 2 in all, but no node .* has CPU \d of 4 free, GPU 0 of 0"),
        ({"remote_options": {"resources": {"lake": 1}}}, r"lake 2 in all, but no node .*, lake 0 of 0 free\. Use"),
        ({"remote_options": {"accelerator_type": "H100"}}, r"accelerator_type:H100 0\.002 in all, but no node"),
        ({"remote_options": [{}] * 3}, "remote_options has 3 entries for 2 workers; give one mapping, or one for each"),
        ({"remote_options": [{}, 4]}, "remote_options has 4, which is no mapping"),
        ({"remote_options": {"max_restarts": 2}}, "remote_options has max_restarts, which the collector decides"),
        ({"remote_options": {"name": "walker"}}, "remote_options has name, which the collector decides"),
        ({"remote_options": {"num_spus": 1}}, "Ray refuses remote_options of worker 0: .*num_spus"),
        (
            {"remote_options": {"runtime_env": {"env_vars": {"A": 1}}}},
            "Ray refuses remote_options of worker 0: .*env_vars",
        ),
        ({"max_restarts": -1}, "max_restarts=-1 is no number of restarts; give 0 or more"),
        ({"frames_per_batch": 1, "sync": True}, "frames_per_batch=1 leaves some of 2 workers without a frame"),
        ({"timeout_s": 0}, "timeout_s=0 leaves no time for anything"),
        ({"create_env_fn": [threading.Lock().acquire] * 2}, "create_env_fn of worker 0 cannot be sent"),
    ],
)
def test_bad_input_is_told_at_once(arguments, message):
    arguments = {"create_env_fn": Walk, "num_workers": 2, "frames_per_batch": 10, **arguments}
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=message):
        RayCollector(**arguments)
    assert time.monotonic() - begun < 5


def test_room_that_others_hold_is_told_within_the_time_for_the_start(shared):
    with pytest.raises(ConfigError, match=rf"CPU 3 in all, but others hold too much of .*: {HOST} has CPU 2 of 4 free"):
        RayCollector([Walk] * 3, frames_per_batch=10, start_timeout_s=0.5)


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
    check_all_was_given_back()


@pytest.mark.slow
def test_a_collector_that_nobody_has_any_more_ends_its_actors():
    collector = RayCollector([healthy] * 2, frames_per_batch=20)
    collector.next()
    pids = collector.workers.pids
    del collector
    gc.collect()
    wait_until_gone(pids)


# ---- programs


ARMED_PROGRAM = """
    import json, os, pathlib, psutil, ray
    from lucidrl.collectors import RayCollector
    from lucidrl.envs import GymEnv

    def ranges(path):
        events = json.loads(pathlib.Path(path).read_text())["traceEvents"]
        return [event["name"] for event in events if event.get("cat") == "user_annotation"]

    os.chdir(os.environ["FOLDER"])
    def make_env():
        return GymEnv("CartPole-v1")

    with RayCollector([make_env] * 3, frames_per_batch=30, total_frames=180, sync=True) as collector:
        for shown in (True, False):
            collector.map_fn("set_profiling_enabled", list_of_args=[(shown,)] * collector.num_workers)
            path = f"{shown}_{{worker_idx}}.json"
            collector.enable_profile(workers=[0, 1], num_rollouts=2, warmup_rollouts=1, save_path=path)
            assert collector.next().numel() == collector.next().numel() == 30
        for index in (0, 1):
            assert ranges(f"True_{index}.json").count("Collector.rollout") == 1
            assert ranges(f"True_{index}.json").count("EnvBase.step_and_maybe_reset") == 10
            assert ranges(f"False_{index}.json") == []
        collector.enable_profile(workers=[2], num_rollouts=99, save_path="last_{worker_idx}.json")
        assert len(list(collector)) == 2
        assert pathlib.Path("last_2.json").exists()
        listening = {
            socket.laddr.ip
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]
            for socket in process.net_connections()
            if socket.status == psutil.CONN_LISTEN
        }
        assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, listening
        # A second one shares what the first one started, and keeps it when that one ends.
        other = RayCollector([make_env], frames_per_batch=30)
    assert other.next().numel() == 30
    other.shutdown()
    assert not ray.is_initialized()
    print("done")
"""


def run(code, environment, **options):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


@pytest.mark.slow
def test_a_program_without_a_ray_has_one_for_itself_whose_actors_are_armed_as_it_is(tmp_path):
    program = run(ARMED_PROGRAM, {"LUCIDRL_PROFILING": "1", "FOLDER": str(tmp_path)})
    output, errors = program.communicate(timeout=150)
    assert program.returncode == 0, errors
    assert output.strip() == "done"
    assert {path.name for path in tmp_path.iterdir()} == {
        *(f"{shown}_{index}.json" for shown in (True, False) for index in (0, 1)),
        "last_2.json",
    }


ENDLESS = """
    import os, psutil, sys
    from lucidrl.collectors import RayCollector
    from lucidrl.envs import GymEnv

    collector = RayCollector([lambda: GymEnv("CartPole-v1")] * 2, frames_per_batch=200, sync=True)
    collector.next()
    collector.enable_profile(num_rollouts=10**9, warmup_rollouts=0, save_path=os.environ["FOLDER"] + "/trace.json")
    collector.next()
    children = psutil.Process().children(recursive=True)
    # Helpers of Ray's try for a minute to tell the head, which is gone, that their node is.
    print(*(process.pid for process in children if "Agent" not in process.name()), flush=True)
    %s
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rest", "number"),
    [
        ("while True: collector.next()", signal.SIGKILL),
        ("while True: collector.next()", signal.SIGINT),
        ("sys.exit()", None),
    ],
)
def test_nothing_is_left_of_a_program_that_ends_without_shutdown(tmp_path, rest, number):
    program = run(ENDLESS % rest, {"FOLDER": str(tmp_path)})
    pids = [int(word) for word in program.stdout.readline().split()]
    assert len(pids) > 4
    if number is not None:
        time.sleep(0.5)
        os.killpg(program.pid, number) if number == signal.SIGINT else program.send_signal(number)
    _, errors = program.communicate(timeout=60)
    if number == signal.SIGINT:
        assert errors.count("Traceback") == 1
        assert errors.strip().endswith("KeyboardInterrupt")
    elif number is None:
        assert errors == ""
        assert program.returncode == 0
    if number != signal.SIGKILL:
        assert (tmp_path / "trace.json").exists()
    wait_until_gone(pids, timeout_s=15)


@pytest.mark.slow
def test_a_ray_that_the_program_leaves_while_it_collects_is_told():
    code = """
        import ray
        from lucidrl.collectors import RayCollector
        from lucidrl.envs import GymEnv

        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        collector = RayCollector([lambda: GymEnv("CartPole-v1")] * 2, frames_per_batch=200)
        collector.next()
        ray.shutdown()
        try:
            collector.next()
        except Exception as error:
            print(error)
        collector.update_policy_weights_()
        collector.shutdown()
        assert not ray.is_initialized()
    """
    program = run(code, {})
    output, errors = program.communicate(timeout=100)
    assert program.returncode == 0, errors
    assert re.match(rf"worker \d of 2 {NODE} died \(the program has left Ray\) in a rollout; {ENDED}", output)


@pytest.mark.slow
def test_a_program_joins_the_cluster_that_the_variable_names_and_brings_its_modules(tmp_path):
    code = """
        import os, ray, sys
        sys.path.insert(0, os.environ["FOLDER"])
        from lake import Lake  # which no node has
        from lucidrl.collectors import RayCollector

        with RayCollector([Lake], frames_per_batch=20) as collector:
            assert collector.next().numel() == 20
            assert ray.get_runtime_context().gcs_address == os.environ["RAY_ADDRESS"]
            assert ray.available_resources()["CPU"] == 3
        assert not ray.is_initialized()
    """
    (tmp_path / "lake.py").write_text("from tests.unit.envs.toys import Walk\n\nclass Lake(Walk):\n    pass\n")
    address = ray.get_runtime_context().gcs_address
    program = run(code, {"FOLDER": str(tmp_path), "RAY_ADDRESS": address}, cwd="/")
    _, errors = program.communicate(timeout=100)
    assert program.returncode == 0, errors
    check_all_was_given_back()
