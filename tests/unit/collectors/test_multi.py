"""Collectors with worker processes: their batches, weights, seeds and calls."""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
from tensordict import TensorDict

from lucidrl.collectors.multi import MultiAsyncCollector, MultiSyncCollector
from lucidrl.collectors.single import Collector
from lucidrl.collectors.trajectories import MASK, POLICY_VERSION, TRAJECTORY_IDS
from lucidrl.collectors.workers import WAITING_BATCHES
from lucidrl.envs import SerialEnv
from lucidrl.envs.specs import Composite, Unbounded
from lucidrl.errors import ConfigError, DataError, WorkerError
from lucidrl.profiling.recording import Recording
from lucidrl.profiling.settings import FOLDER_VARIABLE
from lucidrl.report.timeline import write_timeline
from tests.tiers import slow_except
from tests.unit.collectors.toys import Chance, SlowWalk, Versioned, always_right, by_other_generators, without_action
from tests.unit.envs.toys import Countdown, Walk
from tests.unit.report.validation import valid_timeline

BOTH = pytest.mark.parametrize("kind", slow_except([MultiSyncCollector, MultiAsyncCollector], MultiSyncCollector))


def batches_alone(index, *, batch_size=(), frames_per_batch, num_batches, seed):
    """Batches that a single-process collector collects in place of one of two workers."""
    collector = Collector(
        Walk(batch_size),
        Chance(),
        frames_per_batch=frames_per_batch,
        total_frames=frames_per_batch * num_batches,
        seed=seed + index,
        first_trajectory=index,
        trajectory_stride=2,
    )
    return list(collector)


def are_equal(left, right):
    keys = set(left.keys(include_nested=True, leaves_only=True))
    return keys == set(right.keys(include_nested=True, leaves_only=True)) and all(
        torch.equal(left[key], right[key]) for key in keys
    )


def worker_of(batch):
    (worker,) = (batch[TRAJECTORY_IDS] % 2).unique().tolist()
    return worker


@pytest.mark.parametrize(("batch_size", "frames_per_worker"), [((), 10), ((3,), 12)])
def test_a_sync_batch_is_what_two_collectors_collect_side_by_side(batch_size, frames_per_worker):
    with MultiSyncCollector(
        [partial(Walk, batch_size)] * 2, Chance(), frames_per_batch=2 * frames_per_worker, total_frames=80, seed=5
    ) as collector:
        together = list(collector)
    for index in (0, 1):
        alone = batches_alone(
            index, batch_size=batch_size, frames_per_batch=frames_per_worker, num_batches=len(together), seed=5
        )
        for batch, expected in zip(together[:3], alone[:3], strict=True):
            assert are_equal(batch[index], expected)


def test_every_worker_of_an_async_collector_collects_as_it_would_alone():
    with MultiAsyncCollector([Walk] * 2, Chance(), frames_per_batch=10, total_frames=100, seed=5) as collector:
        batches = list(collector)
    assert sum(batch.numel() for batch in batches) == 100
    for index in (0, 1):
        own = [batch for batch in batches if worker_of(batch) == index]
        alone = batches_alone(index, frames_per_batch=10, num_batches=len(own), seed=5)
        assert all(are_equal(batch, expected) for batch, expected in zip(own, alone, strict=True))


def test_two_runs_with_one_seed_are_bit_exact_and_another_seed_differs():
    def collected(seed):
        with MultiSyncCollector([Walk] * 2, Chance(), frames_per_batch=11, total_frames=33, cat_results=0) as collector:
            assert collector.set_seed(seed) == seed + 2
            return torch.cat(list(collector))

    first, second, other = collected(1), collected(1), collected(3)
    assert are_equal(first, second)
    assert not are_equal(first, other)


def test_a_seed_seeds_numpy_and_python_in_the_workers():
    def actions():
        with MultiSyncCollector([Walk] * 2, by_other_generators, frames_per_batch=40, seed=7) as collector:
            return collector.rollout()["action"]

    first = actions()
    assert torch.equal(first, actions())
    assert not torch.equal(first[0], first[1])


def test_unseeded_workers_draw_different_numbers():
    with MultiSyncCollector([Walk] * 2, Chance(), frames_per_batch=60) as collector:
        actions = collector.rollout()["action"]
    assert not torch.equal(actions[0], actions[1])


def test_a_stacked_batch_has_equally_many_frames_of_each_worker(caplog):
    with MultiSyncCollector([Walk] * 2, frames_per_batch=5, total_frames=13) as collector:
        batches = list(collector)
        assert [tuple(batch.shape) for batch in batches] == [(2, 3), (2, 3), (2, 1)]
        assert all((batch[TRAJECTORY_IDS] % 2 == torch.tensor([[0], [1]])).all() for batch in batches)
        assert tuple(collector.rollout(1).shape) == (2, 1)
        assert collector.num_frames == 16
    assert "frames_per_batch=5 is not a multiple of the 2 envs" in caplog.text


def test_a_joined_batch_has_exactly_the_requested_frames():
    with MultiSyncCollector([Walk] * 2, frames_per_batch=5, total_frames=13, cat_results=0) as collector:
        batches = list(collector)
        assert [batch.numel() for batch in batches] == [5, 5, 3]
        assert [(batch[TRAJECTORY_IDS] % 2).tolist() for batch in batches] == [[0, 0, 0, 1, 1]] * 2 + [[0, 0, 1]]
        assert collector.next() is None
        assert [collector.rollout(number).numel() for number in (1, 50)] == [1, 50]
        with pytest.raises(ConfigError, match="num_frames=0 is less than 1; set it to at least 1"):
            collector.rollout(0)


def test_an_async_collector_never_requests_more_frames_than_wanted():
    with MultiAsyncCollector([Walk] * 3, frames_per_batch=10, total_frames=25) as collector:
        assert sorted(batch.numel() for batch in collector) == [5, 10, 10]
        frames = [state["num_frames"] for state in collector.map_fn("state_dict", [()] * 3)]
        assert max(frames) == 25


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (partial(MultiSyncCollector), (2, 3, 2)),
        (partial(MultiSyncCollector, cat_results=0), (6, 2)),
        (partial(MultiSyncCollector, cat_results=-1), (3, 4)),
        (MultiAsyncCollector, (3, 4)),
    ],
)
def test_envs_that_step_together_take_whole_steps(kind, shape):
    with kind([partial(Walk, (3,))] * 2, frames_per_batch=12, total_frames=24) as collector:
        assert [tuple(batch.shape) for batch in collector] == [shape] * 2


def advantages(batch, gamma=0.9, decay=0.8):
    """Generalised advantage estimates of one time axis, written for `Collector`; the value of a place is the place."""
    reward, done, terminated = (batch["next", name].squeeze(-1) for name in ("reward", "done", "terminated"))
    values, next_values = batch["observation"][..., 0], batch["next", "observation"][..., 0]
    deltas = reward + gamma * next_values * ~terminated - values
    result = torch.zeros_like(deltas)
    following = torch.zeros(deltas.shape[:-1])
    for step in reversed(range(deltas.shape[-1])):
        following = deltas[..., step] + gamma * decay * following * ~done[..., step]
        result[..., step] = following
    return result


@pytest.mark.parametrize(
    ("cat_results", "batch_size", "shares"),
    [
        ("stack", (), lambda result: result),
        (0, (), lambda result: result.split(20)),
        (-1, (), lambda result: result.split(20)),
        ("stack", (3,), lambda result: result),
        (0, (3,), lambda result: result.split(3)),
        (-1, (3,), lambda result: result.split(20, dim=-1)),
    ],
)
def test_advantages_of_a_sync_batch_are_those_of_each_worker_alone(cat_results, batch_size, shares):
    num_frames = 20 * math.prod(batch_size)
    with MultiSyncCollector(
        [partial(Walk, batch_size)] * 2, Chance(), frames_per_batch=2 * num_frames, seed=5, cat_results=cat_results
    ) as collector:
        together = [collector.next() for _ in range(3)]
    for index in (0, 1):
        alone = batches_alone(index, batch_size=batch_size, frames_per_batch=num_frames, num_batches=3, seed=5)
        for batch, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(shares(advantages(batch))[index], advantages(expected))


def test_only_the_seams_along_time_are_marked_and_episodes_that_end_there_stay_terminated():
    def batches(**arguments):
        with MultiSyncCollector([Walk] * 2, Chance(), frames_per_batch=12, seed=3, **arguments) as collector:
            return [collector.next() for _ in range(20)]

    num_ends = 0
    for stacked, joined in zip(batches(), batches(cat_results=0), strict=True):
        flat, marked, ends = stacked.reshape(-1), joined.clone(), [5, 11]
        was_done = flat["next", "done"][ends]
        num_ends += int(was_done.sum())
        assert joined["next", "done"][ends].all()
        assert torch.equal(joined["next", "truncated"][ends], ~was_done | flat["next", "truncated"][ends])
        for flag in ("done", "truncated"):
            marked["next", flag][ends] = flat["next", flag][ends]
        assert are_equal(marked, flat)  # nothing else differs: trajectories go on
    assert num_ends > 0


@BOTH
def test_numbers_of_trajectories_are_unique_over_workers_and_grow(kind):
    with kind([Walk] * 2, Chance(), frames_per_batch=40, total_frames=200, seed=0) as collector:
        frames = torch.cat([batch.reshape(-1) for batch in collector])
    for index in (0, 1):
        own = frames[frames[TRAJECTORY_IDS] % 2 == index]
        ids, done = own[TRAJECTORY_IDS], own["next", "done"].squeeze(-1)
        assert torch.equal(ids[1:] - ids[:-1], 2 * done[:-1].long())


@BOTH
def test_batches_have_their_policy_version(kind):
    policy = Versioned()
    with kind([Walk] * 2, policy, frames_per_batch=20) as collector:
        for version in range(1, 8):
            batch = collector.next()
            assert torch.equal(batch["smallest"], batch[POLICY_VERSION].float())
            with torch.no_grad():
                policy.weight.fill_(version)
            collector.update_policy_weights_()
        assert collector.policy_version == 7
        newest = max(collector.next()[POLICY_VERSION].max() for _ in range(5))
    assert newest == 7


def test_a_sync_batch_is_of_the_newest_version_for_every_source_of_weights():
    policy = Versioned()
    with MultiSyncCollector([Walk] * 2, policy, frames_per_batch=4) as collector:
        for number, source in enumerate(
            [Versioned(3), Versioned(4).state_dict(), TensorDict.from_module(Versioned(5)), None], start=3
        ):
            collector.update_policy_weights_(source, version=10 * number)
            batch = collector.rollout()
            assert batch["largest"].unique().tolist() == [float(number) if source is not None else 0.0]
            assert batch[POLICY_VERSION].unique().tolist() == [10 * number]


@BOTH
def test_weights_are_never_torn_by_a_busy_publisher(kind):
    policy, stop = Versioned(), threading.Event()
    with kind([Walk] * 2, policy, frames_per_batch=10) as collector:

        def publish():
            while not stop.is_set():
                with torch.no_grad():
                    policy.weight += 1
                collector.update_policy_weights_()

        publisher = threading.Thread(target=publish)
        publisher.start()
        try:
            batches = [collector.next() for _ in range(100)]
        finally:
            stop.set()
            publisher.join()
    for batch in batches:
        version = batch[POLICY_VERSION].float()
        assert torch.equal(batch["smallest"], version)
        assert torch.equal(batch["largest"], version)
        parts = batch if kind is MultiSyncCollector else [batch]
        assert all(part[POLICY_VERSION].unique().numel() == 1 for part in parts)
    assert len({int(batch[POLICY_VERSION].max()) for batch in batches}) > 10


def test_weights_of_another_policy_are_refused_and_nothing_else_happens():
    with MultiSyncCollector([Walk] * 2, Versioned(), frames_per_batch=4) as collector:
        with pytest.raises(ConfigError, match=r"the weight weight has shape \[3\], but the policy needs \[20000\]"):
            collector.update_policy_weights_({"weight": torch.zeros(3)})
        with pytest.raises(ConfigError, match="the weights lack weight of the policy"):
            collector.update_policy_weights_({})
        assert collector.rollout()[POLICY_VERSION].unique().tolist() == [0]


def test_a_policy_without_weights_has_versions():
    with MultiSyncCollector([Walk] * 2, always_right, frames_per_batch=4) as collector:
        collector.update_policy_weights_()
        assert collector.rollout()[POLICY_VERSION].unique().tolist() == [1]
        with pytest.raises(ConfigError, match=r"it has no weights to update; use an nn\.Module"):
            collector.update_policy_weights_({"weight": torch.zeros(1)})


@BOTH
def test_a_call_in_the_middle_of_a_rollout_neither_drops_a_batch_nor_hangs(kind):
    with kind([SlowWalk] * 2, frames_per_batch=50, total_frames=400, seed=1, timeout_s=20) as collector:
        caller = threading.Timer(0.03, collector.map_fn, ("reset", [()] * 2))  # while the workers are at it
        caller.start()
        batches = []
        for batch in collector:
            batches.append(batch)
            caller.join()
            assert collector.map_fn("state_dict", [()] * 2)[0].keys() == {
                "num_frames",
                "policy_version",
                "num_trajectories",
            }
    assert [batch.numel() for batch in batches] == [50] * 8


def test_map_fn_gives_every_worker_its_arguments_and_returns_the_results_in_order():
    with MultiSyncCollector([Walk] * 2, frames_per_batch=4) as collector:
        assert collector.num_workers == 2
        assert collector.map_fn("set_seed", [(3,), (30,)]) == [4, 31]
        with pytest.raises(
            ConfigError, match=r"list_of_args has 1 tuples for 2 worker\(s\); pass one tuple per worker"
        ):
            collector.map_fn("set_seed", [(3,)])
        with pytest.raises(ConfigError, match="list_of_args has 3, which is not a tuple"):
            collector.map_fn("set_seed", [3, 30])
        with pytest.raises(ConfigError, match="Collector has no method 'fly'; pass"):
            collector.map_fn("fly", [(), ()])
        assert collector.rollout().numel() == 4


@BOTH
def test_random_frames_come_in_whole_batches_before_the_policy_acts(kind):
    with kind([Walk] * 2, always_right, frames_per_batch=30, total_frames=150, init_random_frames=40) as collector:
        is_random = [bool((batch["action"][..., 0] == 1).any()) for batch in collector]
    assert sum(is_random) == 2
    if kind is MultiSyncCollector:
        assert is_random == [True, True, False, False, False]


@BOTH
def test_batches_are_processed_whole_and_the_hook_runs_in_the_worker(kind):
    kept = []

    class Buffer:
        extend = kept.append

    def stamp(batch):
        batch["pid"] = torch.full(batch.batch_size, os.getpid())

    with kind(
        [Walk] * 2,
        frames_per_batch=30,
        total_frames=60,
        split_trajs=True,
        postproc=lambda batch: batch.set("num_rows", torch.full(batch.shape, len(batch))),
        replay_buffer=Buffer(),
        post_collect_hook=stamp,
    ) as collector:
        batches = list(collector)
        pids = collector.workers.pids
    assert kept == batches
    for batch in batches:
        assert (batch["num_rows"] == len(batch)).all()
        assert batch[MASK].sum() == 30
        assert set(batch["pid"][batch[MASK]].tolist()) <= set(pids)
    assert os.getpid() not in pids


def test_a_hook_can_be_set_later():
    with MultiSyncCollector([Walk] * 2, frames_per_batch=4) as collector:
        collector.set_post_collect_hook(lambda batch: batch.set("mark", torch.ones(batch.batch_size)))
        assert collector.rollout()["mark"].tolist() == [[1] * 2] * 2


def test_entries_that_some_workers_lack_are_named():
    with MultiSyncCollector([Walk] * 2, frames_per_batch=4) as collector:
        collector.map_fn("set_post_collect_hook", [(None,), (lambda batch: batch.set("mark", batch["action"]),)])
        with pytest.raises(DataError, match="the batches of workers 0 and 1 differ in mark"):
            collector.rollout()
        collector.set_post_collect_hook(None)
        assert collector.rollout().numel() == 4


def test_trajectories_are_truncated_and_reset_in_the_workers():
    with MultiSyncCollector([Countdown] * 2, frames_per_batch=12, max_frames_per_traj=4) as collector:
        batch = collector.rollout()
    assert batch["next", "truncated"].squeeze(-1).nonzero().tolist() == [[0, 3], [1, 3]]
    with MultiSyncCollector([Countdown] * 2, frames_per_batch=4, reset_at_each_iter=True) as collector:
        assert [collector.rollout()["left"][0, 0].item() for _ in range(3)] == [21, 21, 21]


def test_one_factory_makes_envs_of_several_workers_with_different_arguments():
    make = lambda step_s: SlowWalk(step_s)  # noqa: E731 - lambdas reach workers too
    with MultiSyncCollector(
        make, frames_per_batch=6, num_workers=3, create_env_kwargs=[{"step_s": 0.0}] * 3
    ) as collector:
        assert collector.num_workers == 3
        assert collector.rollout().numel() == 6


@BOTH
def test_a_collector_resumes_from_a_state(kind):
    with kind([Walk] * 2, Versioned(), frames_per_batch=10, total_frames=50) as collector:
        collector.update_policy_weights_()
        before = [collector.next() for _ in range(2)]
        state = collector.state_dict()
    with kind([Walk] * 2, Versioned(), frames_per_batch=10, total_frames=50) as collector:
        collector.next()  # what is under way then is dropped
        collector.load_state_dict(state)
        after = list(collector)
    assert sum(batch.numel() for batch in after) == 30
    assert all((batch[POLICY_VERSION] == 1).all() for batch in after)
    for index in (0, 1):
        ids = [torch.cat([batch[TRAJECTORY_IDS].reshape(-1) for batch in batches]) for batches in (before, after)]
        of_worker = [numbers[numbers % 2 == index] for numbers in ids]
        if all(numbers.numel() for numbers in of_worker):
            assert of_worker[0].max() < of_worker[1].min()


def test_a_collector_resumes_with_the_current_weights_of_the_policy():
    policy = Versioned()
    with MultiSyncCollector([Walk] * 2, policy, frames_per_batch=4) as collector:
        policy.load_state_dict(Versioned(5).state_dict())
        collector.load_state_dict(collector.state_dict())
        assert collector.rollout()["smallest"].tolist() == [[5.0] * 2] * 2


def test_workers_use_no_seed_twice():
    with MultiSyncCollector([lambda: SerialEnv(2, Walk)] * 2, frames_per_batch=4) as collector:
        assert collector.set_seed(5) == 9
        places = collector.rollout()["observation"][..., 0, 0]
    assert len(places.unique()) == 4


def test_workers_use_num_threads():
    def policy(tensordict):
        return {"action": always_right(tensordict), "num_threads": torch.tensor(torch.get_num_threads())}

    with MultiSyncCollector([Walk] * 2, policy, frames_per_batch=4, num_threads=3) as collector:
        assert collector.rollout()["num_threads"].unique().tolist() == [3]


@pytest.mark.slow
def test_an_async_collector_continues_while_the_consumer_works():
    def stamp(batch):
        batch["at_s"] = torch.full(batch.batch_size, time.monotonic(), dtype=torch.float64)

    with MultiAsyncCollector([Walk], frames_per_batch=4, timeout_s=2, post_collect_hook=stamp) as collector:
        collector.next()
        time.sleep(2.2)  # longer than a batch may take
        now_s = time.monotonic()
        assert (collector.next()["at_s"] < now_s).all()


def test_workers_close_their_envs(tmp_path):
    class Closing(Walk):
        def _close(self):
            (tmp_path / "closed").touch()

    MultiSyncCollector([Closing], frames_per_batch=4).shutdown()
    assert (tmp_path / "closed").exists()


def test_a_state_of_another_number_of_workers_is_refused():
    with MultiSyncCollector([Walk] * 2, frames_per_batch=4) as collector:
        state = collector.state_dict()
        state["workers"].append(state["workers"][0])
        with pytest.raises(ConfigError, match="the state has 3 workers, but the collector has 2"):
            collector.load_state_dict(state)


def test_the_start_method_of_the_program_is_left_alone_and_variables_reach_the_workers(monkeypatch):
    before = multiprocessing.get_start_method(allow_none=True)
    monkeypatch.setenv("LUCIDRL_TEST_WORD", "heard")

    def listening():
        assert os.environ["LUCIDRL_TEST_WORD"] == "heard"
        return Walk()

    with MultiSyncCollector([listening] * 2, frames_per_batch=4) as collector:
        collector.rollout()
    assert multiprocessing.get_start_method(allow_none=True) == before


@pytest.mark.slow
def test_variables_that_the_program_removed_do_not_reach_the_workers():
    code = """if True:
        import os
        os.environ["LUCIDRL_TEST_WORD"] = "said"
        from lucidrl.collectors import MultiSyncCollector
        from tests.unit.envs.toys import Walk

        MultiSyncCollector([Walk], frames_per_batch=1).shutdown()  # the fork server starts with the word
        del os.environ["LUCIDRL_TEST_WORD"]

        def deaf():
            assert "LUCIDRL_TEST_WORD" not in os.environ
            return Walk()

        MultiSyncCollector([deaf], frames_per_batch=1).shutdown()
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_timeout_can_be_infinite():
    with MultiSyncCollector([Walk], frames_per_batch=4, timeout_s=math.inf, start_timeout_s=math.inf) as collector:
        assert collector.rollout().numel() == 4


def test_specs_may_be_of_a_class_that_only_the_program_knows():
    class Places(Unbounded):
        pass

    class PlacedWalk(Walk):
        def __init__(self):
            super().__init__()
            self.observation_spec = Composite(observation=Places((2,)), shape=())

    with MultiSyncCollector([PlacedWalk] * 2, frames_per_batch=4) as collector:
        assert type(collector.workers.specs[1].observation_spec["observation"]) is Places


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"frames_per_batch": 0}, "frames_per_batch=0 is less than 1; set it to at least 1"),
        ({"frames_per_batch": 1}, "frames_per_batch=1 leaves some of 2 workers without a frame"),
        ({"create_env_fn": [lambda: None] * 2}, "the factory of env 0 returned None; return an EnvBase"),
        ({"create_env_fn": Walk}, "create_env_fn is one factory for all workers; set num_workers, or pass a list"),
        ({"create_env_fn": []}, "num_workers=0 must be at least 1"),
        ({"create_env_fn": [Walk, Countdown]}, "the env of worker 1 has observation_spec .* the env of worker 0 has"),
        ({"create_env_fn": [threading.Lock().acquire] * 2}, "create_env_fn of worker 0 cannot be sent to a process"),
        ({"seed": 2**32}, "seed=4294967296 is not between 0 and 4294967295"),
        ({"policy": 3}, "policy is 3; give a TensorDict module"),
        ({"policy_device": "cuda:77"}, "device cuda:77 cannot be used; choose a device of this machine"),
        ({"cat_results": 1}, "cat_results=1 is not known; use 'stack' for a worker dim, 0 to concatenate"),
        ({"timeout_s": 0}, "timeout_s=0 is not above 0; set a positive number of seconds"),
        ({"start_timeout_s": math.nan}, "start_timeout_s=nan is not above 0"),
    ],
)
def test_bad_input_is_refused_at_once(arguments, message):
    with pytest.raises(ConfigError, match=message):
        MultiSyncCollector(**{"create_env_fn": [Walk] * 2, "frames_per_batch": 10, **arguments})


def test_an_async_collector_refuses_cat_results():
    with pytest.raises(ConfigError, match="cat_results=0 is for synchronous collectors; remove it"):
        MultiAsyncCollector([Walk] * 2, frames_per_batch=10, cat_results=0)


@BOTH
def test_a_policy_without_the_action_is_refused_with_the_worker(kind):
    collector = kind([Walk] * 2, without_action, frames_per_batch=10)
    with pytest.raises(ConfigError, match="the policy without_action returned motion, but no 'action'") as caught:
        collector.next()
    assert caught.value.__notes__[0].startswith("raised by worker ")


def test_shutdown_twice_is_fine_and_later_calls_say_so():
    collector = MultiSyncCollector([Walk] * 2, frames_per_batch=4)
    begun = time.monotonic()
    collector.shutdown()
    collector.shutdown()
    assert time.monotonic() - begun < 30
    with pytest.raises(WorkerError, match="the collector was shut down; create a new collector"):
        collector.next()


# ---- recordings


@pytest.mark.slow
def test_workers_record_their_rollouts_and_the_driver_its_queue(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "traces"))
    driver = Recording("driver", operators=False)
    with MultiAsyncCollector([Walk] * 2, frames_per_batch=4, total_frames=80) as collector:
        batches = iter(collector)
        next(batches)
        collector.start_gpu_profiling()
        driver.start()
        for _ in range(8):
            next(batches)
        driver.stop()
        collector.stop_gpu_profiling()
    timeline = write_timeline(tmp_path)
    events = valid_timeline(timeline.path)["traceEvents"]
    assert list(timeline.processes) == ["driver", "collector_worker-0", "collector_worker-1"]
    assert timeline.missing == []
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    recorded = {names[event["pid"]] for event in events if event["name"] == "collect"}
    assert recorded == {"collector_worker-0", "collector_worker-1"}
    queue = [event["args"]["value"] for event in events if event["name"] == WAITING_BATCHES]
    assert len(queue) >= 8
    assert max(queue) >= 1
