"""Several envs as one, stepped in processes of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from lucidrl.distributed.workers.interfaces import StartMethod
from lucidrl.distributed.workers.process import num_cores
from lucidrl.envs.arrays import Arrays, Frame, copy_rows
from lucidrl.envs.creator import EnvFactory, env_creators
from lucidrl.envs.process_set import EnvProcessSet
from lucidrl.envs.processes import EnvProcess
from lucidrl.envs.stacked import StackedEnv
from lucidrl.errors import ConfigError
from lucidrl.profiling.ranges import profiled


class ParallelEnv(StackedEnv):
    """Envs that step in other processes at the same time; env i is row i of every entry. It does what a `SerialEnv` of
    the same envs does, to the bit.

        with ParallelEnv(8, lambda: GymEnv("CartPole-v1")) as env:
            env.rollout(100)

    Args:
        num_workers: how many envs.
        create_env_fn: makes an env, in the process where it will step; or a list with one function for each.
        create_env_kwargs: what it is called with; or a list for each.
        num_processes: how many processes share the envs; by default as many as there are cores, at most one for each
            env.
        start_method: of the processes. "forkserver" is fast and safe; "spawn" starts each from nothing; "fork" is the
            fastest, and unsafe in a program with threads.
        step_timeout_s: deadline of every step and reset.
        start_timeout_s: deadline of the start.
        device: of the TensorDicts at the edge.

    Raises:
        ConfigError: if a factory returns no env, or envs with different specs.
        EnvironmentFailure: here and in every call, if an env raises or its process dies or misses the deadline; with
            index, seed, action and, as its cause, the traceback of the process. All processes have ended then.
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
        start_timeout_s: float = 60.0,
        device: torch.device | str | None = None,
    ):
        creators = env_creators(num_workers, create_env_fn, create_env_kwargs)
        if num_processes is None:
            num_processes = min(num_workers, num_cores())
        if not 1 <= num_processes <= num_workers:
            raise ConfigError(f"num_processes={num_processes} is not between 1 and num_workers={num_workers}")
        for name, seconds in (("step_timeout_s", step_timeout_s), ("start_timeout_s", start_timeout_s)):
            if not seconds > 0:
                raise ConfigError(f"{name}={seconds} leaves no time for anything; give seconds above 0")
        self.processes = EnvProcessSet(
            creators,
            num_processes,
            start_method=start_method,
            start_timeout_s=start_timeout_s,
            step_timeout_s=step_timeout_s,
        )
        try:
            super().__init__(self.processes.specs, device=device)
            self.rows = self.processes.share_memory(self)
        except BaseException:
            self.processes.kill("did not start")
            raise

    # Ranges of its own, so that a trace tells waiting for processes from stepping here.

    @profiled("ParallelEnv.step_and_maybe_reset")
    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDict]:
        return self._step_and_maybe_reset(tensordict)

    @profiled("ParallelEnv.step_and_maybe_reset")
    def step_and_reset_into(self, actions: Arrays, next_: Frame, root: Frame) -> None:
        self._step_and_reset_into(actions, next_, root)

    @profiled("ParallelEnv._reset")
    def _reset_into(self, out: Frame, mask: np.ndarray | None) -> None:
        self.rows.mask[...] = True if mask is None else mask
        picked = [process for process in self.processes.members if self.rows.mask[process.rows].any()]
        self.processes.run(EnvProcess.start_reset, picked)
        copy_rows(self.rows.root.observation, out.observation, mask)

    @profiled("ParallelEnv._step")
    def _step_into(self, actions: Arrays, out: Frame) -> None:
        copy_rows(actions, self.rows.actions)
        self.processes.run(EnvProcess.start_step)
        _copy(self.rows.next, out)

    @profiled("ParallelEnv._step")
    def _step_and_reset_into(self, actions: Arrays, next_: Frame, root: Frame) -> None:
        copy_rows(actions, self.rows.actions)
        self.processes.run(EnvProcess.start_step_and_reset)
        _copy(self.rows.next, next_)
        copy_rows(self.rows.root.observation, root.observation)
        root.clear_flags()

    def _set_seed(self, seed: int) -> None:
        self.rows.seeds[...] = self.seeds_of_envs(seed)
        self.processes.run(EnvProcess.start_set_seed)

    def _close(self) -> None:
        self.processes.close()


def _copy(source: Frame, target: Frame) -> None:
    copy_rows(source.observation, target.observation)
    target.reward[...] = source.reward
    target.done[...] = source.done
    target.terminated[...] = source.terminated
    target.truncated[...] = source.truncated
