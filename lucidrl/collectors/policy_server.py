"""Envs that step independently of each other, and one policy that acts for all envs that wait for an action.

Shapes: N envs; K envs with the indices `picked`.
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
        EnvironmentFailure: an env raised or timed out, or its process exited; every method can raise this. All
            processes have ended.
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
                f"the factories make envs of batch size {list(env.batch_size[1:])}, but envs that step independently "
                "have no batch dims; pass one factory per single env"
            )
        self.num_trajectories = 0
        """Trajectories that have begun."""
        self._roots = env.new_frame().observation
        self._numbers = np.zeros(num_envs, np.int64)
        self._versions = np.zeros(num_envs, np.int64)
        self._is_checked = False  # whether the policy's actions were checked against the action specs
        # Each output of the policy is written here; actions are written to memory shared with the env processes.
        self._outputs: dict[Key, Any] = dict(env.rows.actions)
        self._dtypes: dict[Key, torch.dtype] = {}  # dtypes of the policy's outputs
        self.rows: dict[Key, Any] = {
            **self._roots,
            **{name: np.zeros((num_envs, 1), bool) for name in FLAGS},
            **env.rows.actions,
            ENV_INDEX: np.arange(num_envs),
            TRAJECTORY_IDS: self._numbers,
            POLICY_VERSION: self._versions,
        }
        """Arrays or tensors with one row per env: its last frame. A row is valid from `wait` to the env's next step."""
        for key, array in env.rows.next.arrays().items():
            self.rows["next", *path_of(key)] = array

    def is_done(self, picked: np.ndarray) -> np.ndarray:
        """Return which of these envs ended an episode in their last step, bool [K]."""
        return self.env.rows.next.done[as_block(picked), 0]

    def begin(self, policy: ArrayPolicy | None, version: int) -> None:
        """Begin new episodes and trajectories in all envs, and start their first step; drop unfinished steps.

        Args:
            policy: acts for any number of envs; None acts at random.
            version: policy version.
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
        """Wait for at least one env to finish its step; return the indices of all envs that have, ascending."""
        try:
            done = wait_any(list(self._stepping))
            for process in done:
                process.finish()
            return np.array(sorted(self._stepping.pop(process) for process in done))
        except BaseException as error:  # even Ctrl-C: the processes may be in the middle of a step
            if self.env.is_closed:  # by another thread
                raise EnvironmentFailure("the envs were closed during a step; create a new collector") from None
            self._stepping.clear()
            is_theirs = isinstance(error, EnvironmentFailure)
            self.env.kill(str(error) if is_theirs else "the driver was interrupted during a step")
            raise

    def set_seed(self, seed: int) -> int:
        """Seed all envs differently, from the next `begin` on; return the first unused seed."""
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
        """Start a step of these envs with actions of the policy, without waiting for it."""
        self._act(picked, policy, version)
        for index in picked.tolist():
            process = self.env.processes[index]
            self._stepping[process] = index
            process.start(STEP_AND_RESET)

    def _act(self, picked: np.ndarray, policy: ArrayPolicy | None, version: int) -> None:
        """Compute the policy's outputs for these envs and write them to `_outputs`."""
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
        # The policy may keep its inputs, so they are copies.
        inputs = {key: torch.from_numpy(self._roots[key][block].copy()) for key in policy.in_keys}
        with _maybe_record_function("AsyncBatchedCollector.policy"):
            outputs = policy(inputs)
        for key, value in outputs.items():
            if key not in self._dtypes:
                self._begin_output(key, value)
            place = self._outputs[key]
            if value.shape != (len(picked), *place.shape[1:]):
                raise DataError(
                    f"the policy returned {key!r} of shape {list(value.shape)}, but {[len(picked), *place.shape[1:]]} "
                    f"is needed for {len(picked)} envs; return the same shape per env in every step; actions have the "
                    "shape of the action spec"
                )
            if value.dtype is not self._dtypes[key]:
                raise other_dtype(key, value.dtype, self._dtypes[key])
            place[block] = quick_view(value)
        if not self._is_checked:
            self._is_checked = True
            check_actions(self.env, self.env.rows.actions, outputs, picked)

    def _begin_output(self, key: Key, value: torch.Tensor) -> None:
        """Allocate memory for a new output of the policy."""
        check_is_tensor(key, value)
        self._dtypes[key] = value.dtype
        if key not in self._outputs:
            tensor = torch.zeros(self.env.num_envs, *value.shape[1:], dtype=value.dtype)
            self._outputs[key] = self.rows[key] = quick_view(tensor)


def as_block(picked: np.ndarray) -> slice | np.ndarray:
    """Return ascending indices as a slice if they are consecutive; a slice indexes in a quarter of the time."""
    first, last = int(picked[0]), int(picked[-1])
    return slice(first, last + 1) if last - first + 1 == len(picked) else picked
