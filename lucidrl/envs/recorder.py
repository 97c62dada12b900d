"""Recorder: steps an env with a policy and records the frames.

Shapes: B the env's batch size, T time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from lucidrl.envs.arrays import FLAGS, Arrays, Key, copy_rows, path_of
from lucidrl.envs.policies import ArrayPolicy, check_actions, check_is_tensor, other_dtype
from lucidrl.envs.tensordicts import quick_view, tensordict_of
from lucidrl.errors import DataError
from lucidrl.profiling.ranges import profiled

if TYPE_CHECKING:
    from lucidrl.envs.base import EnvBase


class Recorder:
    """Records frames of an env; an episode continues from one call of `record` to the next.

    The env always writes into the same two frames, so that they stay in the CPU cache and wrapping envs derive views
    from them only once. The policy gets copies, which it may keep.

    Args:
        num_frames: initial capacity, in frames.
        policy_range: name of the profiling range around each call of the policy.
    """

    def __init__(self, env: EnvBase, num_frames: int, policy_range: str):
        self.env = env
        self._as_range = profiled(policy_range)
        self._root, self._next = env.new_frame(), env.new_frame()
        self._is_started = False
        self._length = 0
        self._make_room(num_frames)

    def reset(self) -> None:
        """Start new episodes, from which the next `record` continues."""
        self.env.reset_into(self._root)
        self._is_started = True

    def begin_with(self, observation: Arrays) -> None:
        """Set the current observation of the env, from which the next `record` continues."""
        copy_rows(observation, self._root.observation)
        self._is_started = True

    def record(self, policy: ArrayPolicy, num_frames: int, *, until_done: bool = False) -> int:
        """Record up to `num_frames` steps; return their number.

        Args:
            until_done: stop when the first episode ends; otherwise reset the env and continue.
        """
        if num_frames > self._num_frames:
            self._make_room(num_frames)
        if not self._is_started:
            self.reset()
        self._outputs: dict[Key, Any] = dict(self._actions)
        self._dtypes: dict[Key, torch.dtype] = {}  # of the policy's outputs
        call_policy = self._as_range(policy.call)
        inputs = [(key, self._root.observation[key]) for key in policy.in_keys]
        with torch.no_grad():
            for time in range(num_frames):
                for stored, array in self._before_step:
                    stored[time] = array
                outputs = call_policy({key: torch.from_numpy(array.copy()) for key, array in inputs})
                for key, value in outputs.items():
                    self._keep(key, value, time)
                actions = {key: stored[time, ...] for key, stored in self._actions.items()}
                if time == 0:
                    check_actions(self.env, actions, outputs)
                self._length = time + 1
                is_over = False
                if until_done:
                    self.env.step_into(actions, self._next)
                    is_over = bool(self._next.done.any())
                    copy_rows(self._next.observation, self._root.observation)
                else:
                    self.env.step_and_reset_into(actions, self._next, self._root)
                for stored, array in self._after_step:
                    stored[time] = array
                if is_over:
                    break
        return self._length

    def take(self) -> TensorDict:
        """Return the last recorded steps as [*B, T] in new memory: root, actions, outputs of the policy, and "next"."""
        batch = (*self.env.batch_size, self._length)
        entries: dict[Key, torch.Tensor] = {
            **{key: self._taken(stored) for key, stored in self._roots.items()},
            **{name: torch.zeros(*batch, 1, dtype=torch.bool) for name in FLAGS},
            **{key: self._taken(stored) for key, stored in self._outputs.items()},
        }
        for key, stored in self._nexts.items():
            entries[("next", *path_of(key))] = self._taken(stored)
        return tensordict_of(entries, batch, None)

    def _make_room(self, num_frames: int) -> None:
        self._num_frames = num_frames
        self._roots = {key: self._over_time(array) for key, array in self._root.observation.items()}
        self._nexts = {key: self._over_time(array) for key, array in self._next.arrays().items()}
        self._before_step = [(self._roots[key], array) for key, array in self._root.observation.items()]
        self._after_step = [(self._nexts[key], array) for key, array in self._next.arrays().items()]
        self._actions = {key: self._over_time(array) for key, array in self.env.new_actions().items()}

    def _taken(self, stored: Any) -> torch.Tensor:
        recorded = torch.as_tensor(stored)[: self._length]
        return recorded.movedim(0, len(self.env.batch_size)).clone(memory_format=torch.contiguous_format)

    def _over_time(self, array: np.ndarray) -> np.ndarray:
        return np.zeros((self._num_frames, *array.shape), array.dtype)

    def _keep(self, key: Key, value: torch.Tensor, time: int) -> None:
        if key not in self._dtypes:
            self._begin_output(key, value)
        stored = self._outputs[key]
        if value.shape != stored.shape[1:]:
            expected = list(stored.shape[1:])
            raise DataError(f"the policy returned {key!r} of shape {list(value.shape)}; expected {expected}")
        if value.dtype is not self._dtypes[key]:
            raise other_dtype(key, value.dtype, self._dtypes[key])
        stored[time] = quick_view(value)

    def _begin_output(self, key: Key, value: torch.Tensor) -> None:
        """Allocate the array of a policy output that first appears in this step; earlier steps hold zeros."""
        check_is_tensor(key, value)
        self._dtypes[key] = value.dtype
        if key in self._actions:
            return
        batch = self.env.batch_size
        if value.shape[: len(batch)] != batch:
            raise DataError(
                f"the policy returned {key!r} of shape {list(value.shape)}; it must begin with {list(batch)}"
            )
        self._outputs[key] = quick_view(torch.zeros(self._num_frames, *value.shape, dtype=value.dtype))
