"""AsyncBatchedCollector: envs step independently, and one policy acts for all envs that wait for an action.

Shapes: T frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from lucidrl.collectors.base import CollectorOptions
from lucidrl.collectors.local import LocalCollector
from lucidrl.collectors.policy_server import ENV_INDEX, PolicyServer, as_block
from lucidrl.envs.arrays import Key
from lucidrl.envs.base import EnvBase
from lucidrl.envs.creator import EnvCreator, EnvFactory, env_creators
from lucidrl.envs.policies import ArrayPolicy, as_policy
from lucidrl.envs.tensordicts import quick_view, tensordict_of
from lucidrl.envs.transforms import TimeLimit, TransformedEnv
from lucidrl.errors import ConfigError
from lucidrl.profiling.ranges import profiled


class AsyncBatchedCollector(LocalCollector):
    """Steps each env in its own process. The policy runs in this process; one call computes the actions of all envs
    that wait for one. A slow env delays only itself.

        collector = AsyncBatchedCollector([make_env] * 8, policy, frames_per_batch=1000, total_frames=1_000_000)
        for batch in collector:
            train(batch)
            collector.update_policy_weights_()
        collector.shutdown()

    A batch is a TensorDict [T] of frames in the order of arrival. Each frame has "env_index" and, under "collector",
    its trajectory number and policy version. Frames of one env are in order. Envs already take their next step while
    the consumer trains on a batch, so the first frames of the next batch may have an older policy version.

    Args:
        create_env_fn: one factory per env; each makes an env without batch dims.
        create_env_kwargs: arguments of the factories; one mapping for all, or one per env.
        yield_completed_trajectories: yield whole trajectories [T], each when it is done, instead of
            `frames_per_batch` frames; the last trajectory may exceed `total_frames`.
        init_random_frames: number of frames with random actions at the start.
        step_timeout_s: timeout of one env step.
        start_timeout_s: timeout of the start of all envs.
        arguments: other arguments of `Collector`.

    Raises:
        EnvironmentFailure: an env raised or timed out, or its process exited; every method can raise this. The error
            names index, seed and action of the env, and its cause is the traceback of the process. The collector has
            ended all processes.
    """

    def __init__(
        self,
        create_env_fn: Sequence[EnvFactory],
        policy: Any = None,
        *,
        yield_completed_trajectories: bool = False,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        step_timeout_s: float = 60.0,
        start_timeout_s: float = 300.0,
        **arguments: Any,
    ):
        options = CollectorOptions(**arguments)
        super().__init__(policy, options)
        if not isinstance(create_env_fn, list | tuple):
            raise ConfigError("create_env_fn is not a list; pass a list with one factory per env: [make_env] * 8")
        creators = env_creators(len(create_env_fn), create_env_fn, create_env_kwargs)
        if max_steps := options.max_frames_per_traj:
            creators = [EnvCreator(_limited, {"create": c, "max_steps": max_steps}) for c in creators]
        self._yields_trajectories = yield_completed_trajectories
        self._num_requested = 0  # frames, including those that have not arrived yet
        self._needs_reset = True
        self._server = PolicyServer(creators, step_timeout_s=step_timeout_s, start_timeout_s=start_timeout_s)
        self._numbers = self._server
        self._arrived = np.zeros(0, np.int64)  # indices of envs whose newest frame is not stored yet
        self._frames = FrameStore(self.frames_per_batch)
        self._unfinished = [FrameStore(self.frames_per_batch) for _ in creators]  # unfinished trajectories, by env
        self._trajectories: deque[TensorDictBase] = deque()  # finished trajectories
        try:
            self._act = None if policy is None else as_policy(self.policy, self._server.env, self._computes_on)
            if options.seed is not None:
                self.set_seed(options.seed)
        except BaseException:
            self.shutdown()
            raise

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._num_requested = self.num_frames

    def _close_envs(self) -> None:
        self._server.close()

    def _seed_envs(self, seed: int) -> int:
        """Seed the envs. The order of frames still varies: it depends on how long the steps take."""
        return self._server.set_seed(seed)

    def _next_batch(self) -> TensorDictBase | None:
        batch = super()._next_batch()
        if batch is not None and self._options.split_trajs and not self._yields_trajectories:
            batch = batch[torch.argsort(batch[ENV_INDEX], stable=True)]  # makes trajectories contiguous
        return batch

    def _rollout(self, num_frames: int) -> TensorDictBase:
        """Return `num_frames` frames, or one trajectory with `yield_completed_trajectories`."""
        if self._take_reset():
            self._begin_episodes()
        return self._rollout_yield_trajs() if self._yields_trajectories else self._rollout_frames(num_frames)

    @profiled("AsyncBatchedCollector._rollout_frames")
    def _rollout_frames(self, num_frames: int) -> TensorDictBase:
        """Return the next frames in the order of arrival."""
        frames = self._frames
        while len(frames) < num_frames:
            arrived = self._next_arrived(num_frames - len(frames))
            frames.add(self._server.rows, arrived)
            self._step(arrived)
        return frames.take()

    @profiled("AsyncBatchedCollector._rollout_yield_trajs")
    def _rollout_yield_trajs(self) -> TensorDictBase:
        """Return the next finished trajectory."""
        while not self._trajectories:
            arrived = self._next_arrived(len(self._unfinished))
            for index, is_done in zip(arrived.tolist(), self._server.is_done(arrived).tolist(), strict=True):
                trajectory = self._unfinished[index]
                trajectory.add(self._server.rows, arrived[arrived == index])
                if is_done:
                    self._trajectories.append(trajectory.take())
            self._step(arrived)
        return self._trajectories.popleft()

    def _next_arrived(self, most: int) -> np.ndarray:
        """Return the indices of envs whose step is finished: at least one, at most `most`."""
        if not self._arrived.size:
            self._arrived = self._server.wait()
        arrived, self._arrived = self._arrived[:most], self._arrived[most:]
        return arrived

    def _begin_episodes(self) -> None:
        """Begin new episodes; drop the frames that were not yielded yet."""
        self._arrived = self._arrived[:0]
        self._trajectories.clear()
        for frames in (self._frames, *self._unfinished):
            frames.clear()
        self._server.begin(self._acting_policy(), self.policy_version)
        self._num_requested += len(self._unfinished)

    def _step(self, arrived: np.ndarray) -> None:
        self._server.step(arrived, self._acting_policy(), self.policy_version)
        self._num_requested += arrived.size

    def _acting_policy(self) -> ArrayPolicy | None:
        return None if self._num_requested < self._options.init_random_frames else self._act


class FrameStore:
    """Collects frames for a TensorDict.

    Args:
        capacity: number of frames to allocate memory for; grows when needed.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._tensors: dict[Key, torch.Tensor] = {}
        self._views: dict[Key, Any] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, rows: Mapping[Key, Any], picked: np.ndarray) -> None:
        """Append the rows with the indices `picked`, which must ascend."""
        end = self._length + len(picked)
        if end > self._capacity or len(rows) > len(self._tensors):
            self._allocate(rows, end)
        place, block = slice(self._length, end), as_block(picked)
        for key, view in self._views.items():
            view[place] = rows[key][block]
        self._length = end

    def take(self) -> TensorDict:
        """Return a copy of all frames so far, [T], and clear the store."""
        entries = {key: tensor[: self._length].clone() for key, tensor in self._tensors.items()}
        taken = tensordict_of(entries, (self._length,), None)
        self.clear()
        return taken

    def clear(self) -> None:
        self._length = 0

    def _allocate(self, rows: Mapping[Key, Any], num_frames: int) -> None:
        """Allocate memory for `num_frames` frames with the entries of `rows`; earlier frames get 0 in new entries."""
        if num_frames > self._capacity:
            self._capacity = max(num_frames, 2 * self._capacity)
        for key, source in rows.items():
            like = torch.as_tensor(source)
            larger = torch.zeros(self._capacity, *like.shape[1:], dtype=like.dtype)
            if key in self._tensors:
                larger[: self._length] = self._tensors[key][: self._length]
            self._tensors[key], self._views[key] = larger, quick_view(larger)


def _limited(create: EnvCreator, max_steps: int) -> EnvBase:
    return TransformedEnv(create(), TimeLimit(max_steps))
