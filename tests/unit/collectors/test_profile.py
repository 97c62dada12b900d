"""Collectors that record their rollouts: how many, where, and when traces are written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lucidrl.collectors.async_batched import AsyncBatchedCollector
from lucidrl.collectors.multi import MultiAsyncCollector, MultiSyncCollector
from lucidrl.collectors.single import Collector
from lucidrl.envs.text.arithmetic import ArithmeticConfig, ArithmeticEnv
from lucidrl.errors import ConfigError, WorkerError
from tests.faults.processes import wait_until_gone
from tests.unit.collectors.toys import Chance, SlowWalk, always_right
from tests.unit.envs.faulty import Faulty, healthy, one_faulty
from tests.unit.envs.toys import Walk
from tests.unit.profiling.reading import ARMED, counts_of, nesting_of, ranges_of, read_trace, run_program

MULTI = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
IN_THIS_PROCESS = pytest.mark.parametrize(
    "make", [partial(Collector, Walk()), partial(AsyncBatchedCollector, [Walk] * 2)], ids=["Collector", "AsyncBatched"]
)

ARMED_PROGRAM = """
import pathlib
from lucidrl.collectors import *
from lucidrl.envs import *
from tests.unit.collectors.toys import Chance, Versioned
from tests.unit.envs.toys import Walk

def transformed():
    return TransformedEnv(ParallelEnv(2, Walk, num_processes=1), StepCounter())

def show(collector, is_enabled):
    collector.map_fn("set_profiling_enabled", [(is_enabled,)] * collector.num_workers)

def made(name, collector, rollout, num_workers=1):
    paths = [f"{name}_{{worker_idx}}.json", f"{name}_silent_{{worker_idx}}.json"]
    with collector:
        for path, is_shown in zip(paths, (True, False)):
            show(collector, is_shown)
            # The traces of the first pass have the first rollout that the collector makes.
            first = 0 if is_shown else 1
            collector.enable_profile(
                workers=range(num_workers), num_rollouts=first + 2, warmup_rollouts=first, save_path=path
            )
            while not all(pathlib.Path(path.format(worker_idx=index)).exists() for index in range(num_workers)):
                rollout(collector)
                collector.update_policy_weights_(version=1)
        show(collector, True)

made("Collector", Collector(transformed, Versioned(), frames_per_batch=8), Collector.rollout)
made("MultiSync", MultiSyncCollector([Walk] * 2, Chance(), frames_per_batch=8), MultiSyncCollector.rollout, 2)
made("MultiAsync", MultiAsyncCollector([Walk] * 2, Chance(), frames_per_batch=8), MultiAsyncCollector.next, 2)
made("Frames", AsyncBatchedCollector([Walk] * 2, Chance(), frames_per_batch=8), AsyncBatchedCollector.next)
made(
    "Trajectories",
    AsyncBatchedCollector([Walk] * 2, Chance(), frames_per_batch=8, yield_completed_trajectories=True),
    AsyncBatchedCollector.next,
)
"""

ROLLOUT = {
    "Collector_0": "Collector.rollout",
    "MultiSync_0": "Collector.rollout",
    "MultiSync_1": "Collector.rollout",
    "MultiAsync_0": "Collector.rollout",
    "MultiAsync_1": "Collector.rollout",
    "Frames_0": "AsyncBatchedCollector._rollout_frames",
    "Trajectories_0": "AsyncBatchedCollector._rollout_yield_trajs",
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    run_program(ARMED_PROGRAM, folder, ARMED)
    return folder


@pytest.mark.parametrize("name", ROLLOUT)
def test_a_trace_has_exactly_the_requested_rollouts(traces, name):
    assert counts_of(traces / f"{name}.json")[ROLLOUT[name]] == 2


@pytest.mark.parametrize("name", ROLLOUT)
def test_ranges_are_hidden_and_shown_again_in_the_workers(traces, name):
    kind, index = name.split("_")
    assert counts_of(traces / f"{kind}_silent_{index}.json").keys() <= {"collect"}  # phases are always shown


def test_a_rollout_shows_policy_env_and_transforms_directly_in_each_other(traces):
    path = traces / "Collector_0.json"
    first, second = [each for each in ranges_of(path) if each.name == "Collector.rollout"]
    assert [each.name for each in first.inner[1:]] == ["Collector.policy", "EnvBase.step_and_maybe_reset"] * 4
    assert first.inner[0].name == "EnvBase.reset"  # the very first rollout was captured
    assert [each.name for each in second.inner] == ["Collector.policy", "EnvBase.step_and_maybe_reset"] * 4
    assert {
        ("EnvBase.step_and_maybe_reset", "TransformedEnv._step"),
        ("TransformedEnv._step", "ParallelEnv._step"),
    } <= nesting_of(path)
    assert counts_of(path)["Collector.update_policy_weights_"] == 1


@pytest.mark.parametrize("name", ["Frames_0", "Trajectories_0"])
def test_the_policy_of_async_envs_is_in_their_rollout(traces, name):
    assert (ROLLOUT[name], "AsyncBatchedCollector.policy") in nesting_of(traces / f"{name}.json")


@pytest.mark.parametrize("kind", ["MultiSync", "MultiAsync"])
def test_every_worker_records_in_its_own_process_on_one_clock(traces, kind):
    first, second = (read_trace(traces / f"{kind}_{index}.json")["lucidrl"] for index in (0, 1))
    assert first["pid"] != second["pid"]
    assert (first["process"], second["process"]) == ("collector worker 0", "collector worker 1")
    assert abs(first["anchor"]["unix_time_ns"] - second["anchor"]["unix_time_ns"]) < 60e9


# ---- in one process


@IN_THIS_PROCESS
def test_the_very_first_rollout_can_be_the_only_one(make, tmp_path):
    with make(always_right, frames_per_batch=4) as collector:
        collector.enable_profile(num_rollouts=1, warmup_rollouts=0, save_path=tmp_path / "trace.json")
        assert not (tmp_path / "trace.json").exists()
        collector.rollout()
        assert (tmp_path / "trace.json").exists()


def test_recording_does_not_change_the_batches(tmp_path):
    def batches(profiled):
        with Collector(Walk(), Chance(), frames_per_batch=20, total_frames=60, seed=1) as collector:
            if profiled:
                collector.enable_profile(num_rollouts=2, save_path=tmp_path / "trace.json")
            return torch.cat(list(collector))

    assert (batches(True) == batches(False)).all()


@IN_THIS_PROCESS
def test_the_users_hook_is_still_called(make, tmp_path):
    seen = []
    with make(always_right, frames_per_batch=4, post_collect_hook=seen.append) as collector:
        hook = collector.post_collect_hook
        collector.enable_profile(num_rollouts=2, warmup_rollouts=1, save_path=tmp_path / "trace.json")
        for _ in range(4):
            collector.rollout()
        assert len(seen) == 4
        assert collector.post_collect_hook is hook


@pytest.mark.parametrize("end", ["shutdown", "disable", "iteration", "exception"])
def test_fewer_rollouts_than_requested_are_still_written(end, tmp_path):
    def policy(tensordict):
        with torch.profiler.record_function("policy call"):
            if end == "exception" and collector.num_frames == 8:
                raise ValueError("tired")
            return always_right(tensordict)

    path = tmp_path / "trace.json"
    collector = Collector(Walk(), policy, frames_per_batch=4, total_frames=8 if end == "iteration" else -1)
    collector.enable_profile(num_rollouts=9, warmup_rollouts=1, save_path=path)
    collector.next()
    collector.next()
    assert not path.exists()
    match end:
        case "shutdown":
            collector.shutdown()
        case "disable":
            collector.disable_profile()
            collector.disable_profile()
            collector.next()
        case "iteration":
            assert collector.next() is None
        case "exception":
            with pytest.raises(ValueError, match="tired"):
                collector.next()
    assert counts_of(path)["policy call"] == (5 if end == "exception" else 4)
    collector.shutdown()


def test_enabling_twice_is_refused_and_enabling_again_is_fine(tmp_path):
    with Collector(Walk(), frames_per_batch=4) as collector:
        collector.enable_profile(num_rollouts=1, warmup_rollouts=0, save_path=tmp_path / "first.json")
        with pytest.raises(ConfigError, match=r"rollouts are already being recorded; wait .* disable_profile\(\)"):
            collector.enable_profile(save_path=tmp_path / "second.json")
        collector.rollout()
        collector.enable_profile(num_rollouts=1, warmup_rollouts=0, save_path=tmp_path / "third.json")
        collector.rollout()
    assert {path.name for path in tmp_path.iterdir()} == {"first.json", "third.json"}


def test_a_profiler_of_the_user_is_not_disturbed(tmp_path):
    with Collector(Walk(), frames_per_batch=4) as collector, profile(activities=[ProfilerActivity.CPU]) as profiler:
        with pytest.raises(ConfigError, match="a torch profiler already records in this process"):
            collector.enable_profile(save_path=tmp_path / "trace.json")
        with torch.profiler.record_function("mine"):
            collector.rollout()
    assert "mine" in {event.key for event in profiler.key_averages()}


def test_impossible_recordings_are_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Collector(Walk(), frames_per_batch=4) as collector:
        with pytest.raises(ConfigError, match="workers has 1, but workers are numbered from 0 to 0"):
            collector.enable_profile(workers=[1])
        with pytest.raises(TypeError, match="num_rolouts"):
            collector.enable_profile(num_rolouts=3)
        assert not collector.profiler.is_active
    with pytest.raises(ConfigError, match="the collector was shut down; create a new collector"):
        collector.enable_profile()
    assert not any(tmp_path.rglob("*.json"))


def test_rollouts_of_another_thread_are_recorded_and_written_by_it(tmp_path):
    path = tmp_path / "trace.json"
    collector = Collector(Walk(), always_right, frames_per_batch=4, total_frames=40)
    collector.enable_profile(num_rollouts=99, warmup_rollouts=0, save_path=path)
    first_is_there, is_disabled = threading.Event(), threading.Event()

    def consume():
        for _ in collector:
            first_is_there.set()
            is_disabled.wait(60)

    thread = threading.Thread(target=consume)
    thread.start()
    first_is_there.wait(60)
    collector.disable_profile()
    is_disabled.set()
    thread.join()
    assert path.exists()
    collector.shutdown()


def test_a_garbage_collected_collector_writes_its_trace(tmp_path):
    collector = Collector(Walk(), frames_per_batch=4)
    collector.enable_profile(num_rollouts=9, warmup_rollouts=0, save_path=tmp_path / "trace.json")
    collector.rollout()
    del collector
    assert (tmp_path / "trace.json").exists()


# ---- text


def test_a_trace_of_text_has_the_requested_rollouts_with_generation_and_environment(
    make_collector, questions, tmp_path
):
    collector = make_collector(ArithmeticEnv(ArithmeticConfig()), questions)
    collector.enable_profile(num_rollouts=3, warmup_rollouts=1, save_path=tmp_path / "trace.json")
    for _ in range(4):
        collector.collect()
    rollouts = [each for each in ranges_of(tmp_path / "trace.json") if each.name == "rollout"]
    assert [[each.name for each in rollout.inner] for rollout in rollouts] == [["generate", "environment"]] * 2
    assert read_trace(tmp_path / "trace.json")["lucidrl"]["process"] == "text collector 0"


@pytest.mark.parametrize("end", ["shutdown", "disable", "exception"])
def test_fewer_text_rollouts_than_requested_are_still_written(make_collector, questions, end, tmp_path):
    collector = make_collector(ArithmeticEnv(ArithmeticConfig()), questions)
    collector.enable_profile(num_rollouts=9, warmup_rollouts=0, save_path=tmp_path / "trace.json")
    with pytest.raises(ConfigError, match="rollouts are already being recorded"):
        collector.enable_profile()
    collector.collect()
    match end:
        case "shutdown":
            collector.shutdown()
        case "disable":
            collector.disable_profile()
        case "exception":
            collector.runner.close()
            with pytest.raises(Exception, match="closed"):
                collector.collect()
    assert counts_of(tmp_path / "trace.json")["rollout"] == (2 if end == "exception" else 1)


def test_every_kind_of_collector_takes_the_toggle_by_map_fn(make_collector, questions):
    text = make_collector(ArithmeticEnv(ArithmeticConfig()), questions)
    for collector in (text, Collector(Walk(), frames_per_batch=4)):
        assert collector.map_fn("set_profiling_enabled", list_of_args=[(False,)] * collector.num_workers) == [None]


# ---- in worker processes


@MULTI
def test_hooks_in_workers_are_called_while_they_record_and_afterwards(kind, tmp_path):
    def mark(batch):
        batch["mark"] = torch.ones(batch.batch_size)

    with kind([Walk] * 2, frames_per_batch=4, post_collect_hook=mark) as collector:
        collector.enable_profile(
            workers=[0, 1], num_rollouts=2, warmup_rollouts=0, save_path=tmp_path / "{worker_idx}.json"
        )
        while collector.workers.recording:  # of a worker that is slower than the other, no batch may come for long
            assert (collector.next()["mark"] == 1).all()
        assert {path.name for path in tmp_path.iterdir()} == {"0.json", "1.json"}
        assert all((collector.next()["mark"] == 1).all() for _ in range(4))


@MULTI
def test_workers_write_their_traces_when_recording_is_disabled_in_the_middle_of_a_run(kind, tmp_path):
    with kind([SlowWalk] * 2, frames_per_batch=10, timeout_s=30) as collector:
        for name in ("first", "second"):
            collector.enable_profile(
                workers=[1], warmup_rollouts=0, num_rollouts=99, save_path=tmp_path / f"{name}.json"
            )
            collector.next()
            collector.next()
            with pytest.raises(ConfigError, match="worker 1 cannot be recorded: rollouts are already being recorded"):
                collector.enable_profile(workers=[0, 1], save_path=tmp_path / "{worker_idx}.json")
            collector.disable_profile()
            assert (tmp_path / f"{name}.json").exists()
            collector.disable_profile()
        assert collector.next().numel() == 10
    assert {path.name for path in tmp_path.iterdir()} == {"first.json", "second.json"}


def test_a_batch_from_before_the_recording_does_not_end_it(tmp_path):
    with MultiAsyncCollector([Walk], frames_per_batch=4) as collector:
        collector.next()
        collector.enable_profile(num_rollouts=99, warmup_rollouts=0, save_path=tmp_path / "trace.json")
        collector.next()  # the worker was at it before
        assert collector.workers.recording
        collector.disable_profile()
    assert (tmp_path / "trace.json").exists()


@MULTI
@pytest.mark.parametrize("end", ["shutdown", "iteration"])
def test_workers_write_their_traces_at_the_end(kind, end, tmp_path):
    path = tmp_path / "{worker_idx}.json"
    with kind([Walk] * 2, frames_per_batch=4, total_frames=16 if end == "iteration" else -1) as collector:
        collector.enable_profile(workers=[0, 1], num_rollouts=99, warmup_rollouts=0, save_path=path)
        for _ in range(4):
            collector.next()
        if end == "iteration":
            assert collector.next() is None
            assert any(tmp_path.iterdir())
    expected = {"0.json", "1.json"} if kind is MultiSyncCollector else set()
    assert {path.name for path in tmp_path.iterdir()} >= expected
    assert any(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_workers_that_record_write_their_trace_when_another_one_fails(fault, tmp_path):
    factories = one_faulty(2, index=1, fault=fault)
    collector = MultiSyncCollector(factories, frames_per_batch=8)
    collector.enable_profile(
        workers=[0, 1], num_rollouts=9, warmup_rollouts=0, save_path=tmp_path / "{worker_idx}.json"
    )
    with pytest.raises(WorkerError, match="worker 1 of 2"):
        collector.rollout()
    assert {path.name for path in tmp_path.iterdir()} == {"0.json"} | ({"1.json"} if fault == "raise" else set())
    wait_until_gone(collector.workers.pids)


@pytest.mark.slow
def test_a_stuck_worker_loses_its_trace_and_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("lucidrl.collectors.workers._TRACE_TIMEOUT_S", 0.5)
    collector = MultiAsyncCollector([lambda: Faulty("hang"), healthy], frames_per_batch=2)
    collector.enable_profile(workers=[0], num_rollouts=9, warmup_rollouts=0, save_path=tmp_path / "trace.json")
    collector.workers.request(0, 4, 0)
    collector.shutdown()
    assert "collector workers [0] were still busy after 0.5 s and were killed; their traces are lost" in caplog.text
    wait_until_gone(collector.workers.pids)
    assert list(tmp_path.iterdir()) == []


# ---- programs


@pytest.mark.slow
def test_a_program_that_exits_without_shutdown_writes_its_traces(tmp_path):
    code = """if True:
        from lucidrl.collectors import Collector, MultiSyncCollector
        from tests.unit.envs.toys import Walk

        collectors = [Collector(Walk(), frames_per_batch=4), MultiSyncCollector([Walk], frames_per_batch=4)]
        for number, collector in enumerate(collectors):
            collector.enable_profile(num_rollouts=9, warmup_rollouts=0, save_path=f"{number}.json")
            collector.rollout()
    """
    run_program(code, tmp_path)
    assert [read_trace(tmp_path / f"{n}.json")["lucidrl"]["process"] for n in (0, 1)] == ["collector worker 0"] * 2


@pytest.mark.slow
def test_a_program_that_is_killed_while_its_workers_record_leaves_nothing_behind(tmp_path):
    code = """if True:
        from lucidrl.collectors import MultiAsyncCollector
        from tests.unit.envs.toys import Walk

        collector = MultiAsyncCollector([Walk] * 2, frames_per_batch=4)
        collector.enable_profile(workers=[0, 1], num_rollouts=10**9, save_path="traces/{worker_idx}.json")
        for _ in range(9):
            collector.next()
        print(*collector.workers.pids, flush=True)
        while True:
            collector.next()
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as program:
        pids = [int(word) for word in program.stdout.readline().split()]
        assert len(pids) == 2
        program.send_signal(signal.SIGKILL)
    wait_until_gone(pids)
    assert list((tmp_path / "traces").iterdir()) == []
