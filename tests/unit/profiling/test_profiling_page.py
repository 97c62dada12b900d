"""The statements of the documented profiling page, one by one; those about Ray are tested with Ray."""

from __future__ import annotations

import json

import pytest

from tests.unit.profiling.reading import counts_of, nesting_of, ranges_of, read_trace, run_program

NAMES = {
    "Collector.rollout",
    "Collector.update_policy_weights_",
    "Collector.policy",
    "MultiSyncCollector.update_policy_weights_",
    "MultiAsyncCollector.update_policy_weights_",
    "AsyncBatchedCollector._rollout_frames",
    "AsyncBatchedCollector._rollout_yield_trajs",
    "EnvBase.step",
    "EnvBase.reset",
    "EnvBase.rollout",
    "EnvBase.step_and_maybe_reset",
    "SerialEnv._step",
    "SerialEnv._reset",
    "ParallelEnv._step",
    "ParallelEnv._reset",
    "ParallelEnv.step_and_maybe_reset",
    "TransformedEnv._step",
    "TransformedEnv._reset",
}
"""Everything that the page lists as instrumented."""

IN_WORKERS = """
import os
os.environ["TORCHRL_PROFILING"] = "1"

import json
import lucidrl
import torch
from lucidrl.collectors import MultiSyncCollector
from lucidrl.envs import GymEnv
from lucidrl.profiling import gate

seen = {}

def make_env():
    return GymEnv("CartPole-v1")

def mark(batch):
    from lucidrl.profiling import gate  # that of the worker
    batch["is_enabled"] = torch.full(batch.batch_size, gate.is_enabled)

def are_enabled():
    return sorted(collector.rollout()["is_enabled"].unique().tolist())

collector = MultiSyncCollector(
    create_env_fn=[make_env] * 4,
    policy=None,
    frames_per_batch=200,
    total_frames=20_000,
    post_collect_hook=mark,
)
collector.enable_profile(
    workers=[0, 1],
    num_rollouts=5,
    warmup_rollouts=1,
    save_path="./traces/worker_{worker_idx}.json",
)
seen["at first"] = are_enabled()
lucidrl.set_profiling_enabled(False)
seen["driver alone"] = [gate.is_enabled, are_enabled()]
lucidrl.set_profiling_enabled(True)
for _ in range(2):
    collector.rollout()
seen["before completion"] = os.path.exists("traces/worker_0.json")
collector.rollout()
seen["after completion"] = sorted(os.listdir("traces"))
for is_enabled in (False, True):
    collector.map_fn(
        "set_profiling_enabled",
        list_of_args=[(is_enabled,)] * collector.num_workers,
    )
    seen[f"mapped {is_enabled}"] = are_enabled()

collector.enable_profile(num_rollouts=99, warmup_rollouts=0, save_path="early.json")
for data, _ in zip(collector, range(2)):
    pass
collector.disable_profile()
seen["hook after disable"] = are_enabled()
seen["pids"] = [os.getpid(), *collector.workers.pids]
collector.shutdown()
print(json.dumps(seen))
"""

IN_ONE_PROCESS = """
import os
os.environ["TORCHRL_PROFILING"] = "1"

import json
import torch
from lucidrl import set_profiling_enabled
from lucidrl.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from lucidrl.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv, StepCounter, TransformedEnv

def profiled(name, work):
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        record_shapes=False,
    ) as prof:
        work()
    prof.export_chrome_trace(name)

class Policy(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 1)

my_policy = Policy()
make_env = lambda: GymEnv("Pendulum-v1")

env = make_env()
collector = Collector(env, policy=my_policy, frames_per_batch=200, total_frames=1000)
profiled("collector_trace.json", lambda: [None for _ in collector])

def inference():
    env = TransformedEnv(ParallelEnv(2, make_env, num_processes=1), StepCounter())
    with Collector(env, policy=my_policy, frames_per_batch=20, total_frames=40) as collector:
        for _ in collector:
            pass

profiled("inference.json", inference)

def toggling():
    env = make_env()
    env.reset()
    set_profiling_enabled(False)
    env.rollout(3)
    set_profiling_enabled(True)
    env.step(env.rand_action())

profiled("toggled.json", toggling)

def all_else():
    for env in (make_env(), SerialEnv(2, make_env), ParallelEnv(2, make_env, num_processes=1)):
        with env:
            env.rollout(2)
            env.step_and_maybe_reset(env.rand_action(env.reset()))
    with TransformedEnv(make_env(), StepCounter()) as env:
        env.rollout(2)
    for kind in (Collector, MultiSyncCollector, MultiAsyncCollector):
        create = make_env if kind is Collector else [make_env]
        with kind(create, my_policy, frames_per_batch=4) as collector:
            collector.next()
            collector.update_policy_weights_()
    for whole in (False, True):
        with AsyncBatchedCollector(
            [make_env], my_policy, frames_per_batch=4, yield_completed_trajectories=whole, max_frames_per_traj=5
        ) as collector:
            collector.next()

profiled("all.json", all_else)

class IsArmed(GymEnv):
    # Tells in its own process.

    def __init__(self):
        super().__init__("Pendulum-v1")
        from lucidrl.profiling import gate
        with open(f"armed_{os.getpid()}", "w") as file:
            file.write(f"{gate.is_armed and gate.is_enabled and hasattr(EnvBase.step, '__wrapped__')}")

ParallelEnv(2, IsArmed, num_processes=2).close()

seen = []
collector = Collector(make_env(), my_policy, frames_per_batch=20, total_frames=100, post_collect_hook=seen.append)
collector.enable_profile(num_rollouts=5, warmup_rollouts=1, save_path="single_{worker_idx}.json")
for _ in collector:
    pass
print(json.dumps([len(seen), collector.post_collect_hook == seen.append, hasattr(EnvBase.step, "__wrapped__")]))
"""

UNARMED = """
import os
import warnings
import lucidrl
from lucidrl.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv, TransformedEnv
from lucidrl.collectors import AsyncBatchedCollector, Collector, _maybe_record_function, _ProfilerHook
from lucidrl.profiling import gate, profiled

os.environ["TORCHRL_PROFILING"] = "1"  # too late

def function(): ...

assert profiled("name")(function) is function
assert not any(hasattr(method, "__wrapped__") for kind in (
    EnvBase, GymEnv, ParallelEnv, SerialEnv, TransformedEnv, Collector, AsyncBatchedCollector
) for method in vars(kind).values())
assert _maybe_record_function("a") is _maybe_record_function("b")
with _maybe_record_function("a") as nothing:
    assert nothing is None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    lucidrl.set_profiling_enabled(True)
assert "before lucidrl is imported" in str(caught[0].message)
assert not gate.is_enabled
assert _maybe_record_function("a") is _maybe_record_function("b")
print("held")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def of_workers(folder):
    return json.loads(run_program(IN_WORKERS, folder))


@pytest.fixture(scope="module")
def of_one_process(folder):
    return json.loads(run_program(IN_ONE_PROCESS, folder))


# ---- enabling profiling


@pytest.mark.slow
def test_disabled_as_it_is_by_default_every_site_is_a_true_no_op_and_the_variable_is_read_at_import(folder):
    assert run_program(UNARMED, folder) == "held\n"


@pytest.mark.slow
def test_the_variable_can_be_set_for_the_whole_program(folder):
    code = "import lucidrl.envs; print(hasattr(lucidrl.envs.EnvBase.step, '__wrapped__'))"
    assert run_program(code, folder, {"TORCHRL_PROFILING": "1"}) == "True\n"


@pytest.mark.slow
def test_armed_the_instrumentation_can_be_toggled_at_run_time(of_one_process, folder):
    assert counts_of(folder / "toggled.json") == {
        "EnvBase.reset": 1,
        "GymEnv._reset": 1,
        "EnvBase.step": 1,
        "GymEnv._step": 1,
    }


@pytest.mark.slow
def test_the_toggle_is_that_of_the_calling_process_only(of_workers):
    assert of_workers["driver alone"] == [False, [True]]


@pytest.mark.slow
def test_the_toggle_reaches_workers_by_map_fn(of_workers):
    assert of_workers["mapped False"] == [False]
    assert of_workers["mapped True"] == [True]


@pytest.mark.slow
def test_every_worker_comes_up_with_profiling_enabled(of_workers):
    assert of_workers["at first"] == [True]


# ---- a trace from the driver


@pytest.mark.slow
def test_the_selected_workers_record_where_they_run_the_rollout(of_workers, folder):
    assert of_workers["after completion"] == ["worker_0.json", "worker_1.json"]
    pids = [read_trace(folder / "traces" / f"worker_{index}.json")["lucidrl"]["pid"] for index in (0, 1)]
    driver, *workers = of_workers["pids"]
    assert pids == workers[:2]
    assert driver not in pids


@pytest.mark.slow
def test_the_warm_up_is_discarded_and_the_rest_is_exported_on_completion(of_workers, folder):
    assert not of_workers["before completion"]
    assert [counts_of(folder / "traces" / f"worker_{index}.json")["Collector.rollout"] for index in (0, 1)] == [4, 4]


@pytest.mark.slow
def test_the_same_call_works_for_a_single_process(of_one_process, folder):
    num_hook_calls, is_hook_in_place, _ = of_one_process
    assert counts_of(folder / "single_0.json")["Collector.rollout"] == 4
    assert num_hook_calls == 5
    assert is_hook_in_place


@pytest.mark.slow
def test_disabling_early_exports_the_trace_and_leaves_the_hook_in_place(of_workers, folder):
    assert 1 <= counts_of(folder / "early.json")["Collector.rollout"] <= 3
    assert of_workers["hook after disable"] == [True]


# ---- what gets instrumented


@pytest.mark.slow
def test_all_that_the_page_names_is_a_range(of_one_process, folder):
    found = counts_of(folder / "all.json") + counts_of(folder / "inference.json")
    assert NAMES - found.keys() == set()


@pytest.mark.slow
def test_a_typical_inference_rollout_has_the_documented_nesting(of_one_process, folder):
    _, rollout = [each for each in ranges_of(folder / "inference.json") if each.name == "Collector.rollout"]
    assert [each.name for each in rollout.inner] == ["Collector.policy", "EnvBase.step_and_maybe_reset"] * 10
    assert {
        ("EnvBase.step_and_maybe_reset", "TransformedEnv._step"),
        ("TransformedEnv._step", "ParallelEnv._step"),
    } <= nesting_of(folder / "inference.json")


@pytest.mark.slow
def test_no_range_is_directly_in_one_of_the_same_name(of_one_process, folder):
    names = ("collector_trace", "inference", "all")
    assert not [(a, b) for name in names for a, b in nesting_of(folder / f"{name}.json") if a == b]


# ---- capturing a trace


@pytest.mark.slow
def test_any_profiler_of_torch_captures_the_ranges(of_one_process, folder):
    counts = counts_of(folder / "collector_trace.json")
    assert counts["Collector.rollout"] == 5
    assert counts["Collector.policy"] == counts["EnvBase.step_and_maybe_reset"] == 1000


@pytest.mark.slow
def test_ranges_are_complete_events_of_a_chrome_trace(of_one_process, folder):
    events = read_trace(folder / "collector_trace.json")["traceEvents"]
    (kind,) = {(e["ph"], e["cat"]) for e in events if e["name"] == "Collector.rollout"}
    assert kind == ("X", "user_annotation")


# ---- several processes, and the cost


@pytest.mark.slow
def test_processes_of_a_parallel_env_are_armed_as_the_parent(of_one_process, folder):
    assert [path.read_text() for path in folder.glob("armed_*")] == ["True", "True"]


@pytest.mark.slow
def test_set_a_push_and_a_pop_are_added_to_each_instrumented_method(of_one_process):
    *_, is_wrapped = of_one_process
    assert is_wrapped
