"""RayCollector: the same batches as from local processes; and the resources that it reserves."""

from __future__ import annotations

import os
import re
import threading
import time

import psutil
import pytest
import ray
import torch
from tensordict import TensorDict

from lucidrl.collectors import Collector, MultiSyncCollector, RayCollector
from lucidrl.collectors.trajectories import POLICY_VERSION, TRAJECTORY_IDS
from lucidrl.errors import ConfigError
from tests.ray.collecting import HOST, Policy
from tests.unit.envs.toys import Walk
from tests.unit.profiling.reading import read_trace

pytestmark = pytest.mark.usefixtures("ray_of_the_program")


@pytest.fixture(scope="module")
def shared():
    """A collector for tests that leave it in order."""
    with RayCollector([Walk] * 2, Policy(), frames_per_batch=20, sync=True) as collector:
        yield collector


def are_equal(left, right):
    keys = set(left.keys(include_nested=True, leaves_only=True))
    return keys == set(right.keys(include_nested=True, leaves_only=True)) and all(
        torch.equal(left[key], right[key]) for key in keys
    )


def three_batches(collector, seed):
    """After new episodes; without the numbers of trajectories, which go on."""
    assert collector.set_seed(seed) == seed + 2
    return torch.cat([collector.next() for _ in range(3)]).exclude(TRAJECTORY_IDS)


def test_batches_are_bit_identical_to_those_of_processes_with_the_same_seed(shared):
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


def test_a_batch_is_of_the_newest_version_from_any_source_of_weights(shared):
    for number, source in enumerate(
        [Policy(3), Policy(4).state_dict(), TensorDict.from_module(Policy(5)), None], start=3
    ):
        shared.update_policy_weights_(source, version=10 * number)
        batch = shared.next()
        assert batch["largest"].unique().tolist() == [float(number) if source is not None else 0.0]
        assert batch[POLICY_VERSION].unique().tolist() == [10 * number]
    with pytest.raises(ConfigError, match=r"the weight weight has shape \[3\], but the policy needs \[20000\]"):
        shared.update_policy_weights_({"weight": torch.zeros(3)})
    assert shared.next()[POLICY_VERSION].unique().tolist() == [60]


def test_an_update_is_put_once_for_all_workers(shared, monkeypatch):
    put, sizes = ray.put, []
    monkeypatch.setattr(ray, "put", lambda message: sizes.append(sum(map(len, message.parts))) or put(message))
    for _ in range(3):
        shared.update_policy_weights_()
        shared.next()
        shared.next()
    assert sum(size > 4 * 20_000 for size in sizes) == 3  # the rest are the requests themselves


@pytest.mark.slow
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
        assert all(part[POLICY_VERSION].unique().numel() == 1 for part in batch)
    assert len({int(batch[POLICY_VERSION].max()) for batch in batches}) > 5


def test_methods_are_called_in_every_worker_and_hooks_run_there(shared):
    assert shared.num_workers == 2
    assert shared.map_fn("set_seed", [(3,), (30,)]) == [4, 31]
    assert shared.map_fn("set_profiling_enabled", list_of_args=[(False,)] * shared.num_workers) == [None, None]
    shared.set_profiling_enabled(False)
    shared.set_post_collect_hook(lambda batch: batch.set("pid", torch.full(batch.batch_size, os.getpid())))
    pids = shared.next()["pid"].unique().tolist()
    shared.set_post_collect_hook(None)
    assert set(pids) == set(shared.workers.pids)
    assert all(psutil.Process(pid).parent().name().startswith("ray::NodeAgent") for pid in pids)
    assert "pid" not in shared.next()
    with pytest.raises(ConfigError, match="Collector has no method 'fly'; pass"):
        shared.map_fn("fly", [(), ()])


def test_a_restored_state_continues_with_new_episodes(shared):
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
    with pytest.raises(ConfigError, match="worker 1 cannot be recorded: rollouts are already being recorded"):
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


@pytest.mark.slow
def test_a_collector_class_as_an_actor_collects_until_its_frames_are_there():
    actor = Collector.as_remote(num_cpus=1).remote(Walk, frames_per_batch=20, total_frames=40)
    batches = [ray.get(actor.next.remote()) for _ in range(3)]
    assert [batch is None or batch.numel() for batch in batches] == [20, 20, True]
    ray.get(actor.shutdown.remote())


# ---- resources


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            {"num_workers": 5},
            rf"worker \d of num_workers=5 asks Ray for CPU 1 on one node, but {HOST} has CPU 0 of 2 free.*\. Lower num",
            marks=pytest.mark.slow,
        ),
        (
            {"remote_options": {"num_cpus": 9}},
            r"asks Ray for CPU 9 on one node, .*num_workers or remote_options",
        ),
        ({"remote_options": {"num_cpus": 9, "scheduling_strategy": "SPREAD"}}, "asks Ray for CPU 9 on one node, but"),
        ({"remote_options": {"num_gpus": 1}}, r"for CPU 1, GPU 1 on one node, .* has CPU \d of 2 free, GPU 0 of 0"),
        ({"remote_options": {"resources": {"lake": 1}}}, r"lake 1 on one node, but .*, lake 0 of 0 free\. Lower"),
        ({"remote_options": {"accelerator_type": "H100"}}, r"accelerator_type:H100 0\.001 on one node, but"),
        ({"remote_options": [{}] * 3}, "remote_options has 3 entries for 2 workers; pass one mapping, or one per"),
        ({"remote_options": [{}, 4]}, "remote_options has 4, which is not a mapping"),
        ({"remote_options": {"max_restarts": 2}}, "remote_options has max_restarts, which the collector sets itself"),
        ({"remote_options": {"name": "walker"}}, "remote_options has name, which the collector sets itself"),
        ({"remote_options": {"num_spus": 1}}, "Ray refuses the options .*num_spus"),
        (
            {"remote_options": {"runtime_env": {"env_vars": {"A": 1}}}},
            "Ray refuses the options .*env_vars",
        ),
        ({"max_restarts": -1}, "max_restarts=-1 is negative; set 0 to never restart"),
        ({"frames_per_batch": 1, "sync": True}, "frames_per_batch=1 leaves some of 2 workers without a frame"),
        ({"timeout_s": 0}, "timeout_s=0 is not above 0"),
        ({"create_env_fn": [threading.Lock().acquire] * 2}, "create_env_fn of worker 0 cannot be sent"),
    ],
)
def test_bad_input_is_refused_at_once(arguments, message):
    arguments = {"create_env_fn": Walk, "num_workers": 2, "frames_per_batch": 10, **arguments}
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=message):
        RayCollector(**arguments)
    assert time.monotonic() - begun < 60  # it waits a moment for what others just released


@pytest.mark.slow
def test_room_that_others_hold_is_refused_before_anything_starts(shared):
    with pytest.raises(ConfigError, match=rf"worker 2 of num_workers=3 asks Ray for CPU 1 .* {HOST} has CPU 0 of 2"):
        RayCollector([Walk] * 3, frames_per_batch=10)
