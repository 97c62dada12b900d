"""Envs that step in other processes do what they would do in this one."""

from __future__ import annotations

import math
import multiprocessing
import os
import select
import signal
import threading
import time
from functools import partial

import numpy as np
import psutil
import pytest
import torch

from lucidrl.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv
from lucidrl.envs.process_main import STEP_AND_RESET
from lucidrl.envs.processes import EnvProcess, wait_any
from lucidrl.envs.specs import Bounded, Composite, Unbounded
from lucidrl.envs.transforms import Compose, RewardSum, StepCounter, TransformedEnv
from lucidrl.errors import ConfigError, EnvironmentFailure
from tests.tiers import slow_except
from tests.unit.envs.faulty import Faulty
from tests.unit.envs.toys import Countdown, Walk


class Surroundings(EnvBase):
    """Observes the process that it is in."""

    def __init__(self, offset: int = 0):
        super().__init__()
        self.observation_spec = Composite(
            pid=Unbounded((1,), torch.int64), threads=Unbounded((1,), torch.int64), offset=Unbounded((1,), torch.int64)
        )
        self.action_spec = Bounded(0, 1, (1,))
        self._offset = offset

    def _set_seed(self, seed):
        pass

    def _reset_into(self, out, mask):
        out.observation["pid"][0] = os.getpid()
        out.observation["threads"][0] = torch.get_num_threads()
        offset = int(os.environ.get("SURROUNDINGS", "0")) + 1000 * ("PATH" in os.environ)
        out.observation["offset"][0] = self._offset + offset

    def _step_into(self, actions, out):
        raise AssertionError


class Slow(Walk):
    def _reset_into(self, out, mask):
        time.sleep(1)
        super()._reset_into(out, mask)


class Forking(Walk):
    def _reset_into(self, out, mask):
        if os.fork() == 0:
            time.sleep(25)
        os._exit(5)


def can_be_read(process: EnvProcess) -> bool:
    return bool(select.select([process.connection], [], [], 0)[0])


def transformed() -> EnvBase:
    return TransformedEnv(Walk(), Compose(StepCounter(), RewardSum()))


def cartpole() -> EnvBase:
    return GymEnv("CartPole-v1")


def assert_same(one, other):
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key in one.keys(True, True):
        torch.testing.assert_close(one.get(key), other.get(key), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "factory",
    [Walk, cartpole, Countdown, transformed, partial(Walk, batch_size=(2, 3))],
    ids=["arrays", "gymnasium", "tensordicts", "transformed", "batched"],
)
def test_parallel_is_bit_identical_to_serial(factory):
    serial = SerialEnv(3, factory)
    with ParallelEnv(3, factory, num_processes=2) as parallel:
        assert parallel.batch_size == serial.batch_size
        assert parallel.observation_spec == serial.observation_spec
        assert parallel.action_spec == serial.action_spec
        for seed in (7, 8):
            assert parallel.set_seed(seed) == serial.set_seed(seed)
            records = [env.rollout(60, break_when_any_done=False) for env in (serial, parallel)]
            assert records[0]["next", "done"].any()
            assert_same(*records)


@pytest.mark.parametrize("start_method", slow_except(["spawn", "fork"], "fork"))
def test_every_start_method_has_the_same_result(start_method):
    serial = SerialEnv(2, cartpole)
    with ParallelEnv(2, cartpole, num_processes=1, start_method=start_method) as parallel:
        serial.set_seed(1)
        parallel.set_seed(1)
        assert_same(serial.rollout(20), parallel.rollout(20))


def test_the_edge_and_partial_resets_are_the_same_too():
    serial = SerialEnv(4, lambda: Walk((2,)))
    with ParallelEnv(4, lambda: Walk((2,)), num_processes=2) as parallel:
        roots = []
        for env in (serial, parallel):
            env.set_seed(3)
            root = env.reset()
            mask = torch.zeros(4, 2, dtype=torch.bool)
            mask[3, 1] = True
            root = env.reset(root.set("_reset", mask))
            after = env.step(env.rand_action(root))
            roots.append(after)
        assert_same(*roots)


def test_batches_alias_neither_each_other_nor_shared_memory():
    with ParallelEnv(2, Walk, num_processes=1) as env:
        first = env.reset()
        kept = first.clone()
        env.rollout(5)
        assert_same(first, kept)


def test_processes_are_few_use_one_thread_each_and_know_the_variables_of_now(monkeypatch):
    ParallelEnv(1, Walk).close()  # the fork server has the variables of this moment
    monkeypatch.setenv("SURROUNDINGS", "100")
    monkeypatch.delenv("PATH")
    kwargs = [{"offset": number} for number in range(5)]
    with ParallelEnv(5, Surroundings, create_env_kwargs=kwargs, num_processes=2) as env:
        root = env.reset()
    assert root["threads"].unique().tolist() == [1]
    assert root["offset"].flatten().tolist() == [100, 101, 102, 103, 104]
    pids = root["pid"].flatten().tolist()
    assert len(set(pids)) == 2
    assert len(set(pids[:2])) == len(set(pids[2:])) == 1
    assert os.getpid() not in pids


def test_processes_use_one_thread_however_many_the_driver_uses():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ParallelEnv(1, Surroundings, start_method="fork") as env:
            assert env.reset()["threads"].tolist() == [[1]]
    finally:
        torch.set_num_threads(num_threads)


def test_there_are_as_many_processes_as_cores_by_default():
    with ParallelEnv(3, Walk) as env:
        assert len(env.processes) == min(3, len(psutil.Process().cpu_affinity()))


def test_the_start_method_and_the_preloads_of_the_program_are_left_alone():
    server = multiprocessing.forkserver._forkserver
    before = list(server._preload_modules)
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_forkserver_preload([*before, "json"])
    ParallelEnv(1, Walk).close()
    assert multiprocessing.get_start_method(allow_none=True) == method
    assert "json" in server._preload_modules
    assert set(before) <= set(server._preload_modules)


def test_closing_twice_is_fine_and_later_calls_say_so():
    env = ParallelEnv(2, Walk)
    pids = [process.pid for process in env.processes]
    env.close()
    env.close()
    assert not any(map(psutil.pid_exists, pids))
    with pytest.raises(EnvironmentFailure, match="the env processes have exited: closed; make another"):
        env.reset()


def test_a_collected_env_ends_its_processes():
    env = ParallelEnv(2, Walk)
    pids = [process.pid for process in env.processes]
    env.rollout(3)
    del env
    assert not any(map(psutil.pid_exists, pids))


def test_after_an_interrupt_no_half_done_step_is_taken_for_the_next_one():
    env = ParallelEnv(2, Slow, num_processes=2)
    pids = [process.pid for process in env.processes]
    threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        env.reset()
    assert not any(map(psutil.pid_exists, pids))
    with pytest.raises(EnvironmentFailure, match="have exited: the driver was interrupted during a step or reset"):
        env.reset()


def test_a_dead_process_is_noticed_while_one_that_it_forked_holds_its_connection():
    with ParallelEnv(1, Forking) as env:
        begun = time.monotonic()
        with pytest.raises(EnvironmentFailure, match="the process of the env exited with code 5"):
            env.reset()
        assert time.monotonic() - begun < 20


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="this system has no real-time signals")
def test_a_process_killed_by_an_unnamed_signal_is_reported():
    with ParallelEnv(1, Walk) as env:
        os.kill(env.processes[0].pid, signal.SIGRTMIN + 1)
        with pytest.raises(EnvironmentFailure, match=f"process of the env was killed by signal {signal.SIGRTMIN + 1}"):
            env.reset()


def test_processes_run_commands_one_by_one():
    with ParallelEnv(3, Walk, num_processes=3) as env:
        env.set_seed(0)
        env.reset()
        first, second, third = env.processes
        assert not can_be_read(first)
        env.rows.actions["action"][...] = [0, 1]
        before = env.rows.root.observation["observation"].copy()
        first.start(STEP_AND_RESET)
        third.start(STEP_AND_RESET)
        done = set()
        while len(done) < 2:
            for process in wait_any([process for process in (first, third) if process not in done]):
                process.finish()
                done.add(process)
        moved = env.rows.root.observation["observation"][:, 0] - before[:, 0]
        np.testing.assert_allclose(moved, [0.1, 0, 0.1], atol=1e-6)
        assert not can_be_read(second)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_processes": 3}, "num_processes=3 is not between 1 and num_workers=2"),
        ({"num_processes": 0}, "num_processes=0 is not between 1 and num_workers=2"),
        ({"step_timeout_s": 0}, "step_timeout_s=0 must be above 0"),
        ({"start_timeout_s": math.nan}, "start_timeout_s=nan must be above 0"),
        ({"start_method": "thread"}, "start_method='thread' is not one of forkserver, spawn, fork"),
        ({"create_env_fn": lambda: None}, "the factory of env [01] returned None; return an EnvBase"),
        ({"create_env_fn": [Walk, Countdown]}, "env 1 has observation_spec .*, but env 0 has"),
        ({"create_env_kwargs": {"lock": threading.Lock()}}, "cannot be sent to a process"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ParallelEnv(2, **{"create_env_fn": Faulty, **arguments})
