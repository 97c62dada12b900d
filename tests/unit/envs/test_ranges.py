"""Where envs show up in a trace, and that nothing is left of it in a process that is not armed."""

from __future__ import annotations

import pytest

from lucidrl.envs.base import EnvBase
from lucidrl.envs.gym import GymEnv
from lucidrl.envs.parallel import ParallelEnv
from lucidrl.envs.serial import SerialEnv
from lucidrl.envs.transforms import TransformedEnv
from lucidrl.profiling import gate
from tests.unit.profiling.reading import ARMED, counts_of, nesting_of, ranges_of, run_program

PROGRAM = """
import torch
from torch.profiler import ProfilerActivity, profile
from lucidrl.envs import *
from tests.unit.envs.toys import Countdown, Walk

def record(name, env, work):
    with env, profile(activities=[ProfilerActivity.CPU]) as profiler:
        work(env)
    profiler.export_chrome_trace(f"{name}.json")

def by_tensordicts(env):
    root = env.reset()
    env.step(env.rand_action(root))
    _, root = env.step_and_maybe_reset(env.rand_action(root))
    env.reset(root.set("_reset", torch.ones(env.batch_size, dtype=torch.bool)))

def by_arrays(env):
    next_, root, actions = env.new_frame(), env.new_frame(), env.new_actions()
    env.sample_actions(actions)
    env.reset_into(root)
    env.step_into(actions, next_)
    env.step_and_reset_into(actions, next_, root)

def cut_after(num_steps, env):
    return TransformedEnv(env, Compose(StepCounter(), RewardSum(), TimeLimit(num_steps)))

record("tensordicts", Countdown(), by_tensordicts)
record("arrays", Walk(), by_arrays)
record("gym", GymEnv("CartPole-v1", num_envs=2), by_tensordicts)
record("serial", SerialEnv(2, lambda: GymEnv("CartPole-v1")), by_arrays)
record("parallel", ParallelEnv(2, Walk, num_processes=1), lambda env: (by_arrays(env), by_tensordicts(env)))
record("transformed", cut_after(99, Walk()), by_arrays)
record("transformed_batch", cut_after(2, ParallelEnv(2, Walk, num_processes=1)), by_arrays)
record("rollout", Walk(), lambda env: env.rollout(2))
record("rollout_on", Walk(), lambda env: env.rollout(3, break_when_any_done=False))
"""

RANGES = {
    EnvBase: {
        "step": "EnvBase.step",
        "step_into": "EnvBase.step",
        "reset": "EnvBase.reset",
        "reset_into": "EnvBase.reset",
        "rollout": "EnvBase.rollout",
        "step_and_maybe_reset": "EnvBase.step_and_maybe_reset",
        "step_and_reset_into": "EnvBase.step_and_maybe_reset",
    },
    SerialEnv: {"_step_into": "SerialEnv._step", "_reset_into": "SerialEnv._reset"},
    ParallelEnv: {
        "_step_into": "ParallelEnv._step",
        "_step_and_reset_into": "ParallelEnv._step",
        "_reset_into": "ParallelEnv._reset",
        "step_and_maybe_reset": "ParallelEnv.step_and_maybe_reset",
        "step_and_reset_into": "ParallelEnv.step_and_maybe_reset",
    },
    TransformedEnv: {"_step_into": "TransformedEnv._step", "_reset_into": "TransformedEnv._reset"},
    GymEnv: {"_step_into": "GymEnv._step", "_reset_into": "GymEnv._reset"},
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    run_program(PROGRAM, folder, ARMED)
    return folder


@pytest.mark.skipif(gate.is_armed, reason="this process is armed")
@pytest.mark.parametrize("env_class", RANGES)
def test_unarmed_methods_are_the_functions_that_were_written(env_class):
    for name in RANGES[env_class]:
        assert not hasattr(env_class.__dict__[name], "__wrapped__")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensordicts", "arrays"])
def test_every_way_to_act_is_a_range_of_the_env_that_is_never_in_itself(traces, name):
    counts = counts_of(traces / f"{name}.json")
    num_resets = 2 if name == "tensordicts" else 1
    assert counts == {"EnvBase.reset": num_resets, "EnvBase.step": 1, "EnvBase.step_and_maybe_reset": 1}
    assert nesting_of(traces / f"{name}.json") == set()


@pytest.mark.slow
def test_gymnasium_calls_have_their_own_ranges(traces):
    assert nesting_of(traces / "gym.json") == {
        ("EnvBase.reset", "GymEnv._reset"),
        ("EnvBase.step", "GymEnv._step"),
        ("EnvBase.step_and_maybe_reset", "GymEnv._step"),
    }


@pytest.mark.slow
def test_envs_of_a_serial_env_are_directly_in_it(traces):
    assert nesting_of(traces / "serial.json") == {
        ("EnvBase.reset", "SerialEnv._reset"),
        ("SerialEnv._reset", "GymEnv._reset"),
        ("EnvBase.step", "SerialEnv._step"),
        ("EnvBase.step_and_maybe_reset", "SerialEnv._step"),
        ("SerialEnv._step", "GymEnv._step"),
    }
    assert counts_of(traces / "serial.json")["GymEnv._step"] == 2 * 2


@pytest.mark.slow
def test_a_parallel_env_has_separate_range_names(traces):
    assert nesting_of(traces / "parallel.json") == {
        ("EnvBase.reset", "ParallelEnv._reset"),
        ("EnvBase.step", "ParallelEnv._step"),
        ("ParallelEnv.step_and_maybe_reset", "ParallelEnv._step"),
    }
    assert "EnvBase.step_and_maybe_reset" not in counts_of(traces / "parallel.json")


@pytest.mark.slow
def test_several_transforms_are_one_range_around_the_env(traces):
    assert nesting_of(traces / "transformed.json") == {
        ("EnvBase.reset", "TransformedEnv._reset"),
        ("EnvBase.step", "TransformedEnv._step"),
        ("EnvBase.step_and_maybe_reset", "TransformedEnv._step"),
    }


@pytest.mark.slow
def test_a_batch_that_steps_and_resets_together_shows_both(traces):
    (both,) = [r for r in ranges_of(traces / "transformed_batch.json") if r.name == "EnvBase.step_and_maybe_reset"]
    assert [each.name for each in both.inner] == ["TransformedEnv._step", "TransformedEnv._reset"]
    step, reset = both.inner
    assert [each.name for each in step.inner] == ["ParallelEnv._step"]
    assert [each.name for each in reset.inner] == ["ParallelEnv._reset"]


@pytest.mark.slow
def test_a_rollout_holds_reset_policy_and_steps(traces):
    (rollout, *_) = ranges_of(traces / "rollout.json")
    assert rollout.name == "EnvBase.rollout"
    assert [each.name for each in rollout.inner] == ["EnvBase.reset", *["EnvBase.policy", "EnvBase.step"] * 2]
    (rollout, *_) = ranges_of(traces / "rollout_on.json")
    assert [r.name for r in rollout.inner] == ["EnvBase.reset", *["EnvBase.policy", "EnvBase.step_and_maybe_reset"] * 3]
