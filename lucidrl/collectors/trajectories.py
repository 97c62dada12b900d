"""Trajectory numbers, and batches split by trajectory.

Shapes: B the env's batch size, T time, N trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from tensordict import TensorDictBase

TRAJECTORY_IDS = ("collector", "traj_ids")
POLICY_VERSION = ("collector", "policy_version")
MASK = ("collector", "mask")


class TrajectoryNumbers:
    """Numbers the trajectories of a batch of envs in the order in which they begin. A trajectory keeps its number
    across batches.

    Args:
        first, stride: the numbers are first, first + stride, ..., so that numbers are unique over all workers.
    """

    def __init__(self, batch_size: Sequence[int], first: int = 0, stride: int = 1):
        self._batch_size = tuple(batch_size)
        self._first, self._stride = first, stride
        self.num_trajectories = 0
        """Trajectories that have begun."""
        self._current: np.ndarray | None = None

    def reset(self) -> None:
        """Begin new trajectories in all envs with the next batch."""
        self._current = None

    def of(self, done: np.ndarray) -> torch.Tensor:
        """Return the trajectory number of every frame of the next batch, [*B, T] int64.

        Args:
            done: [*B, T], the done flags of this batch.
        """
        num_envs, num_frames = prod(self._batch_size), done.shape[-1]
        if self._current is None:
            self._current = self.num_trajectories + np.arange(num_envs)
            self.num_trajectories += num_envs
        begins = np.zeros((num_frames + 1, num_envs), np.int64)
        begins[0] = self._current
        ends = done.reshape(num_envs, num_frames).T
        begins[1:][ends] = self.num_trajectories + np.arange(ends.sum())
        self.num_trajectories += int(ends.sum())
        # Numbers grow over time, so the number of a frame is the largest one that its env has begun so far.
        counts = np.maximum.accumulate(begins, axis=0)
        self._current = counts[-1]
        ids = self._first + self._stride * counts[:-1].T
        return torch.from_numpy(np.ascontiguousarray(ids)).view(*self._batch_size, num_frames)


def split_trajectories(batch: TensorDictBase) -> TensorDictBase:
    """Reshape a batch [*B, T] to one row per trajectory: [N, T_max], padded with zeros where ("collector", "mask") is
    False. A trajectory that continues in the next batch is not joined with its continuation."""
    ids = batch[TRAJECTORY_IDS]
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[..., 1:] = ids[..., 1:] != ids[..., :-1]
    starts = is_first.reshape(-1).nonzero().squeeze(1)
    lengths = torch.diff(starts, append=torch.tensor([ids.numel()], device=starts.device))
    mask = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
    frames = batch.reshape(-1)

    def spread(values: torch.Tensor) -> torch.Tensor:
        rows = values.new_zeros(*mask.shape, *values.shape[1:])
        rows[mask] = values  # frames of a trajectory are contiguous, and so are the True values in a row of the mask
        return rows

    split = frames.apply(spread, batch_size=mask.shape)
    assert split is not None, "a batch has entries"
    return split.set(MASK, mask)
