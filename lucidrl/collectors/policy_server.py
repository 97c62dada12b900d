"""Envs that step independently of each other, and one policy that acts for those that are ready.

Shapes: N envs, K picked ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lucidrl.collectors.trajectories import POLICY_VERSION, TRAJECTORY_IDS
from lucidrl.envs.arrays import FLAGS, Key, path_of
from lucidrl.envs.creator import EnvCreator
from lucidrl.envs.parallel import ParallelEnv
from lucidrl.envs.policies import ArrayPolicy, check_actions, check_is_tensor, other_dtype
from lucidrl.envs.process_main import RESET, STEP_AND_RESET
from lucidrl.envs.processes import EnvProcess, wait_any
from lucidrl.envs.tensordicts import quick_view
from lucidrl.errors import ConfigError, DataError, EnvironmentFailure
from lucidrl.profiling.ranges import _maybe_record_function

ENV_INDEX = "env_index"


class PolicyServer:
    """Steps each env in its own process with actions of the policy, and numbers trajectories as they begin.

    Args:
        creators: one per env.
        step_timeout_s: timeout of every step and reset.
        start_timeout_s: timeout of the start.

    Raises:
        EnvironmentFailure: here and in all calls, if an env raises, times out or its process exits. All processes have
            ended then.
    """

    def __init__(self, creators: Sequence[EnvCreator], *, step_timeout_s: float, start_timeout_s: float):
        self._stepping: dict[EnvProcess, int] = {}
        num_envs = len(creators)
        self.env = env = ParallelEnv(
            num_envs,
            creators,
            num_processes=num_envs,
            step_timeout_s=step_timeout_s,
            start_timeout_s=start_timeout_s,
        )
        if len(env.batch_size) > 1:
            self.close()
            raise ConfigError(
                f"envs that step independently are single ones, but these have batch size {list(env.batch_size[1:])}; "
                "make one factory for each env"
            )
        self.num_trajectories = 0
        """Trajectories that have begun."""
        self._roots = env.new_frame().observation
        self._numbers = np.zeros(num_envs, np.int64)
        self._versions = np.zeros(num_envs, np.int64)
        self._is_checked = False  # whether the policy's actions are those of the envs
        # Where each output of the policy goes; the actions are where the envs find them.
        self._outputs: dict[Key, Any] = dict(env.rows.actions)
        self._dtypes: dict[Key, torch.dtype] = {}  # of the policy's outputs
        self.rows: dict[Key, Any] = {
            **self._roots,
            **{name: np.zeros((num_envs, 1), bool) for name in FLAGS},
            **env.rows.actions,
            ENV_INDEX: np.arange(num_envs),
            TRAJECTORY_IDS: self._numbers,
            POLICY_VERSION: self._versions,
        }
        """The last frame of each env as a row of arrays or tensors; valid from `wait` to the next step of the env."""
        for key, array in env.rows.next.arrays().items():
            self.rows["next", *path_of(key)] = array

    def is_done(self, picked: np.ndarray) -> np.ndarray:
        """Which of these envs ended an episode with their last step; bool [K]."""
        return self.env.rows.next.done[as_block(picked), 0]

    def begin(self, policy: ArrayPolicy | None, version: int) -> None:
        """Begin new episodes and trajectories in all envs, and start their first step; drops unfinished steps.

        Args:
            policy: acts for any number of envs; None acts at random.
            version: version of its weights.
        """
        self._settle()
        self.env.rows.mask.fill(True)
        self.env.run(RESET)
        self._is_checked = False
        all_envs = np.arange(self.env.num_envs)
        self._number(all_envs)
        self._start(all_envs, policy, version)

    def step(self, picked: np.ndarray, policy: ArrayPolicy | None, version: int) -> None:
        """Start the next step of envs whose frames were taken from `rows`."""
        done = self.is_done(picked)
        if done.any():
            self._number(picked[done])
        self._start(picked, policy, version)

    def wait(self) -> np.ndarray:
        """Wait for at least one env to finish its step; the numbers of those that have, ascending."""
        try:
            done = wait_any(list(self._stepping))
            for process in done:
                process.finish()
            return np.array(sorted(self._stepping.pop(process) for process in done))
        except BaseException as error:  # Ctrl-C too: the processes are in the middle of something
            if self.env.is_closed:  # by another thread
                raise EnvironmentFailure("the envs were closed in the middle of a step; make others") from None
            self._stepping.clear()
            is_theirs = isinstance(error, EnvironmentFailure)
            self.env.kill(str(error) if is_theirs else "the driver was interrupted while they were busy")
            raise

    def set_seed(self, seed: int) -> int:
        """Seed all envs differently, from the next `begin` on; returns the first unused seed."""
        self._settle()
        return self.env.set_seed(seed)

    def close(self) -> None:
        """Kill the processes; may be called twice."""
        self._stepping.clear()
        self.env.close()

    def _settle(self) -> None:
        """Wait until no env is in the middle of a step."""
        while self._stepping:
            self.wait()

    def _number(self, beginning: np.ndarray) -> None:
        self._numbers[beginning] = self.num_trajectories + np.arange(beginning.size)
        self.num_trajectories += beginning.size

    def _start(self, picked: np.ndarray, policy: ArrayPolicy | None, version: int) -> None:
        """Let these envs step with actions of the policy; returns at once."""
        self._act(picked, policy, version)
        for index in picked.tolist():
            process = self.env.processes[index]
            self._stepping[process] = index
            process.start(STEP_AND_RESET)

    def _act(self, picked: np.ndarray, policy: ArrayPolicy | None, version: int) -> None:
        """Write the policy's outputs for these envs."""
        block = as_block(picked)
        for key, array in self.env.rows.root.observation.items():
            self._roots[key][block] = array[block]
        self._versions[block] = version
        if policy is None:
            actions = self.env.new_actions()
            self.env.sample_actions(actions)
            for key, array in actions.items():
                self._outputs[key][block] = array[block]
            return
        # Copies, which the policy may keep.
        inputs = {key: torch.from_numpy(self._roots[key][block].copy()) for key in policy.in_keys}
        with _maybe_record_function("AsyncBatchedCollector.policy"):
            outputs = policy(inputs)
        for key, value in outputs.items():
            if key not in self._dtypes:
                self._begin_output(key, value)
            place = self._outputs[key]
            if value.shape != (len(picked), *place.shape[1:]):
                raise DataError(
                    f"the policy gave {key!r} of shape {list(value.shape)}, but {[len(picked), *place.shape[1:]]} is "
                    f"needed for {len(picked)} envs; every step must give the same, and actions as the envs take them"
                )
            if value.dtype is not self._dtypes[key]:
                raise other_dtype(key, value.dtype, self._dtypes[key])
            place[block] = quick_view(value)
        if not self._is_checked:
            self._is_checked = True
            check_actions(self.env, self.env.rows.actions, outputs, picked)

    def _begin_output(self, key: Key, value: torch.Tensor) -> None:
        """Make room for a new output of the policy."""
        check_is_tensor(key, value)
        self._dtypes[key] = value.dtype
        if key not in self._outputs:
            tensor = torch.zeros(self.env.num_envs, *value.shape[1:], dtype=value.dtype)
            self._outputs[key] = self.rows[key] = quick_view(tensor)


def as_block(picked: np.ndarray) -> slice | np.ndarray:
    """Ascending numbers as a slice if they are neighbours, which takes a quarter of the time to use."""
    first, last = int(picked[0]), int(picked[-1])
    return slice(first, last + 1) if last - first + 1 == len(picked) else picked
