"""Answers envs that step independently, and keeps for each of them what its step was decided on.

Shapes: N envs, K of them that are asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lucidrl.collectors.frame_store import Rows, as_block
from lucidrl.collectors.free_envs import FreeEnvs
from lucidrl.collectors.trajectories import POLICY_VERSION, TRAJECTORY_IDS
from lucidrl.envs.arrays import FLAGS, Key
from lucidrl.envs.policies import ArrayPolicy, check_actions, check_is_tensor, other_dtype
from lucidrl.envs.tensordicts import quick_view
from lucidrl.errors import DataError
from lucidrl.profiling.ranges import _maybe_record_function

ENV_INDEX = "env_index"


class PolicyServer:
    """Gives actions to the envs, and numbers their trajectories in the order in which they begin."""

    def __init__(self, envs: FreeEnvs):
        self._envs = envs
        env, num_envs = envs.env, envs.env.num_envs
        self.num_trajectories = 0
        """How many there have been."""
        self._roots = env.new_frame().observation
        self._numbers = np.zeros(num_envs, np.int64)
        self._versions = np.zeros(num_envs, np.int64)
        self._is_checked = False  # whether the policy's actions are those of the envs
        # Where each output of the policy goes; the actions are where the envs find them.
        self._outputs: dict[Key, Any] = dict(env.rows.actions)
        self._dtypes: dict[Key, torch.dtype] = {}  # in which the policy gave them
        self._rows: dict[Key, Any] = {
            **self._roots,
            **{name: np.zeros((num_envs, 1), bool) for name in FLAGS},
            **env.rows.actions,
            ENV_INDEX: np.arange(num_envs),
            TRAJECTORY_IDS: self._numbers,
            POLICY_VERSION: self._versions,
        }
        for key, array in env.rows.next.arrays().items():
            self._rows["next", *((key,) if isinstance(key, str) else key)] = array

    @property
    def rows(self) -> Rows:
        """The last frame of every env, whole as soon as it has taken its step; written when it is answered again."""
        return self._rows

    def is_done(self, picked: np.ndarray) -> np.ndarray:
        """Which of these envs ended an episode with their last step; bool [K]."""
        return self._envs.env.rows.next.done[as_block(picked), 0]

    def begin(self, policy: ArrayPolicy | None, version: int) -> None:
        """Begin new episodes and trajectories in all envs, and let them step.

        Args:
            policy: answers for any number of envs; None acts at random.
            version: of its weights.
        """
        self._envs.reset()
        self._is_checked = False
        everyone = np.arange(self._envs.env.num_envs)
        self._number(everyone)
        self._decide(everyone, policy, version)
        self._envs.start(everyone)

    def go_on(self, picked: np.ndarray, policy: ArrayPolicy | None, version: int) -> None:
        """Let those envs step again whose frames were taken from `rows`."""
        done = self.is_done(picked)
        if done.any():
            self._number(picked[done])
        self._decide(picked, policy, version)
        self._envs.start(picked)

    def _number(self, beginning: np.ndarray) -> None:
        self._numbers[beginning] = self.num_trajectories + np.arange(beginning.size)
        self.num_trajectories += beginning.size

    def _decide(self, picked: np.ndarray, policy: ArrayPolicy | None, version: int) -> None:
        """Write what the policy puts out for these envs."""
        block = as_block(picked)
        for key, array in self._envs.env.rows.root.observation.items():
            self._roots[key][block] = array[block]
        self._versions[block] = version
        if policy is None:
            self._act_at_random(block)
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
            check_actions(self._envs.env, self._envs.env.rows.actions, outputs, picked)

    def _act_at_random(self, block: slice | np.ndarray) -> None:
        actions = self._envs.env.new_actions()
        self._envs.env.sample_actions(actions)
        for key, array in actions.items():
            self._outputs[key][block] = array[block]

    def _begin_output(self, key: Key, value: torch.Tensor) -> None:
        """Make room for an output that comes for the first time."""
        check_is_tensor(key, value)
        self._dtypes[key] = value.dtype
        if key not in self._outputs:
            tensor = torch.zeros(self._envs.env.num_envs, *value.shape[1:], dtype=value.dtype)
            self._outputs[key] = self._rows[key] = quick_view(tensor)
