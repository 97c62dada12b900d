"""ParallelEnv: a batch of envs that step in worker processes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from multiprocessing import util
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from lucidrl.distributed.workers.interfaces import StartMethod
from lucidrl.distributed.workers.process import num_cores
from lucidrl.envs.arrays import Arrays, Frame, copy_rows
from lucidrl.envs.creator import EnvFactory, env_creators
from lucidrl.envs.process_main import RESET, SEED, SPIN_S, STEP, STEP_AND_RESET, rows_like, share
from lucidrl.envs.processes import EnvProcess, wait_any
from lucidrl.envs.serial import StackedEnv
from lucidrl.errors import ConfigError, EnvironmentFailure
from lucidrl.profiling.ranges import profiled

_CLOSE_GRACE_S = 0.5
"""Time that processes have to close their envs before they are killed."""


class ParallelEnv(StackedEnv):
    """Envs that step in worker processes at the same time; env i is row i of every entry.

    The results are bit-identical to those of a `SerialEnv` of the same envs.

        with ParallelEnv(8, lambda: GymEnv("CartPole-v1")) as env:
            env.rollout(100)

    Args:
        num_workers: number of envs.
        create_env_fn: makes an env, called in the worker process; or a list with one function per env.
        create_env_kwargs: arguments of the function; or a list with the arguments of each env.
        num_processes: processes over which the envs are distributed; by default one per core, at most one per env.
        start_method: how multiprocessing starts processes. "forkserver" is fast and safe; "spawn" starts a new
            interpreter; "fork" is the fastest, and unsafe in a program with threads.
        step_timeout_s: timeout of every step and reset.
        start_timeout_s: timeout of the start of the processes.
        device: device of the TensorDicts.

    Attributes:
        processes: worker processes; each runs a block of neighbouring envs, and block sizes differ by at most one.
        rows: arrays in shared memory, with one row per env.

    Raises:
        ConfigError: if a factory does not return an env, or the specs of the envs differ.
        EnvironmentFailure: here and in every call, if an env raises, or its process exits or times out. The message
            names index, seed and action, the cause is the traceback of the process, and all processes have exited.
    """

    def __init__(
        self,
        num_workers: int,
        create_env_fn: EnvFactory | Sequence[EnvFactory],
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_processes: int | None = None,
        start_method: StartMethod = "forkserver",
        step_timeout_s: float = 60.0,
        start_timeout_s: float = 300.0,
        device: torch.device | str | None = None,
    ):
        creators = env_creators(num_workers, create_env_fn, create_env_kwargs)
        if num_processes is None:
            num_processes = min(num_workers, num_cores())
        if not 1 <= num_processes <= num_workers:
            raise ConfigError(f"num_processes={num_processes} is not between 1 and num_workers={num_workers}")
        for name, seconds in (("step_timeout_s", step_timeout_s), ("start_timeout_s", start_timeout_s)):
            if not seconds > 0:
                raise ConfigError(f"{name}={seconds} must be above 0")
        self.processes: list[EnvProcess] = []
        self._ended: str | None = None
        # Runs at exit too, before multiprocessing joins processes; `atexit` runs later, and not in child processes.
        self._end_processes = util.Finalize(self, _end, (self.processes,), exitpriority=0)
        bounds = [num_workers * number // num_processes for number in range(num_processes + 1)]
        try:
            for first, stop in itertools.pairwise(bounds):
                process = EnvProcess(
                    creators[first:stop],
                    first,
                    num_workers,
                    start_method=start_method,
                    start_timeout_s=start_timeout_s,
                    step_timeout_s=step_timeout_s,
                    spin_s=SPIN_S if num_processes < num_cores() else 0.0,
                )
                self.processes.append(process)
            _finish(self.processes)
            super().__init__([specs for process in self.processes for specs in process.specs], device=device)
            self.rows = share(rows_like(self, num_workers), [process.connection for process in self.processes])
            for process in self.processes:
                process.shared = self.rows.part(process.rows)
        except BaseException:
            self.kill("did not start")
            raise

    def run(self, command: bytes, processes: Sequence[EnvProcess] | None = None) -> None:
        """Run a command of `process_main` in all processes, or in `processes`, and wait until they finish.

        Raises:
            EnvironmentFailure: if a process fails or has exited before; all processes are then killed.
        """
        if self._ended:
            raise EnvironmentFailure(f"the env processes have exited: {self._ended}; make another ParallelEnv")
        processes = self.processes if processes is None else processes
        try:
            for process in processes:
                process.start(command)
            _finish(processes)
        except EnvironmentFailure as failure:
            self.kill(str(failure))
            raise
        except BaseException:  # such as Ctrl-C: the processes are in the middle of a step
            self.kill("the driver was interrupted during a step or reset")
            raise

    def kill(self, reason: str) -> None:
        """Kill all processes; later calls raise with the reason."""
        for process in self.processes:
            process.kill()
        self._ended = self._ended or reason
        self._end_processes()

    # Separate profiling ranges: a trace then shows the time spent waiting for processes.

    @profiled("ParallelEnv.step_and_maybe_reset")
    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDict]:
        return self._step_and_maybe_reset(tensordict)

    @profiled("ParallelEnv.step_and_maybe_reset")
    def step_and_reset_into(self, actions: Arrays, next_: Frame, root: Frame) -> None:
        self._step_and_reset_into(actions, next_, root)

    @profiled("ParallelEnv._reset")
    def _reset_into(self, out: Frame, mask: np.ndarray | None) -> None:
        self.rows.mask[...] = True if mask is None else mask
        self.run(RESET, [process for process in self.processes if self.rows.mask[process.rows].any()])
        copy_rows(self.rows.root.observation, out.observation, mask)

    @profiled("ParallelEnv._step")
    def _step_into(self, actions: Arrays, out: Frame) -> None:
        copy_rows(actions, self.rows.actions)
        self.run(STEP)
        _copy(self.rows.next, out)

    @profiled("ParallelEnv._step")
    def _step_and_reset_into(self, actions: Arrays, next_: Frame, root: Frame) -> None:
        copy_rows(actions, self.rows.actions)
        self.run(STEP_AND_RESET)
        _copy(self.rows.next, next_)
        copy_rows(self.rows.root.observation, root.observation)
        root.clear_flags()

    def _set_seed(self, seed: int) -> None:
        self.rows.seeds[...] = self.seeds_of_envs(seed)
        self.run(SEED)

    def _close(self) -> None:
        self._ended = self._ended or "closed"
        self._end_processes()


def _copy(source: Frame, target: Frame) -> None:
    copy_rows(source.observation, target.observation)
    target.reward[...] = source.reward
    target.done[...] = source.done
    target.terminated[...] = source.terminated
    target.truncated[...] = source.truncated


def _finish(processes: Sequence[EnvProcess]) -> None:
    pending = list(processes)
    while pending:
        for process in wait_any(pending):
            process.finish()
            pending.remove(process)


def _end(processes: list[EnvProcess]) -> None:
    """Let processes close their envs and exit; kill those that take too long."""
    for process in processes:
        process.end()
    until = time.monotonic() + _CLOSE_GRACE_S
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    for process in processes:
        process.kill()
    for process in processes:
        process.reap()
