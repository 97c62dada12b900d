"""AsyncBatchedCollector: envs that step on their own, and one policy that answers whichever are ready.

Shapes: N envs, K of them that are ready, T frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import torch
from tensordict import TensorDictBase

from lucidrl.collectors.frame_store import FrameStore
from lucidrl.collectors.free_envs import FreeEnvs
from lucidrl.collectors.local import LocalCollector
from lucidrl.collectors.parts import CollectorArguments, CollectorOptions
from lucidrl.collectors.policy_server import ENV_INDEX, PolicyServer
from lucidrl.envs.base import EnvBase
from lucidrl.envs.creator import EnvCreator, EnvFactory, env_creators
from lucidrl.envs.policies import ArrayPolicy, as_policy
from lucidrl.envs.transforms import TimeLimit, TransformedEnv
from lucidrl.errors import ConfigError
from lucidrl.profiling.ranges import profiled


class AsyncBatchedCollector(LocalCollector):
    """Each env steps in a process of its own, as soon as it has an action; the policy, in this process, answers all
    that are ready in one call. A slow env delays nobody but itself.

        collector = AsyncBatchedCollector([make_env] * 8, policy, frames_per_batch=1000, total_frames=1_000_000)
        for batch in collector:
            train(batch)
            collector.update_policy_weights_()
        collector.shutdown()

    A batch is a TensorDict [T] of frames in the order in which they came, each with the number of its env as
    "env_index", of its trajectory, and of the version of the weights that made it. Those of one env are in order. Envs
    take their next step while the consumer works on a batch, so the first frames of a batch may be of older weights.

    The arguments that are not listed here mean what they mean for `Collector`.

    Args:
        create_env_fn: one factory for each env; they make single envs.
        create_env_kwargs: of the factories; one mapping for all, or one for each.
        yield_completed_trajectories: yield whole trajectories [T], each when it is done, instead of
            `frames_per_batch` frames; the last one may go beyond `total_frames`.
        init_random_frames: so many actions are random to begin with.
        step_timeout_s: how long a step of an env may take.
        start_timeout_s: how long it may take until all envs are there.

    Raises:
        EnvironmentFailure: here and in all calls, if an env raises or its process dies or misses the deadline; with
            index, seed, action and, as its cause, the traceback of the process. All processes have ended then.
    """

    def __init__(
        self,
        create_env_fn: Sequence[EnvFactory],
        policy: Any = None,
        *,
        yield_completed_trajectories: bool = False,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        step_timeout_s: float = 60.0,
        start_timeout_s: float = 60.0,
        **arguments: Unpack[CollectorArguments],
    ):
        options = CollectorOptions(**arguments)
        super().__init__(policy, options)
        if not isinstance(create_env_fn, list | tuple):
            raise ConfigError("create_env_fn is not a list; give one factory for each env, such as [make_env] * 8")
        creators = env_creators(len(create_env_fn), create_env_fn, create_env_kwargs)
        if max_steps := options.max_frames_per_traj:
            creators = [EnvCreator(_limited, {"create": c, "max_steps": max_steps}) for c in creators]
        self._yields_trajectories = yield_completed_trajectories
        self._num_asked = 0  # frames that were asked for, of which some are still to come
        self._begins_anew = True
        self._envs = FreeEnvs(creators, step_timeout_s=step_timeout_s, start_timeout_s=start_timeout_s)
        self._server = PolicyServer(self._envs)
        self._arrived = np.zeros(0, np.int64)  # envs whose frames were not taken yet
        self._frames = FrameStore(self.frames_per_batch)
        self._unfinished = [FrameStore(self.frames_per_batch) for _ in creators]  # trajectories, by env
        self._trajectories: deque[TensorDictBase] = deque()  # that are done
        try:
            self._act = None if policy is None else as_policy(self.policy, self._envs.env, self._computes_on)
            if options.seed is not None:
                self.set_seed(options.seed)
        except BaseException:
            self.shutdown()
            raise

    def state_dict(self) -> dict[str, Any]:
        """How far collecting has come, as plain values; an env's own state is beyond reach, so new episodes begin."""
        return {
            "num_frames": self.num_frames,
            "policy_version": self.policy_version,
            "num_trajectories": self._server.num_trajectories,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_frames, self.policy_version = state["num_frames"], state["policy_version"]
        self._num_asked = self.num_frames
        self._server.num_trajectories = state["num_trajectories"]
        self.reset()

    def _close_envs(self) -> None:
        self._envs.close()

    def _seed_envs(self, seed: int) -> int:
        """Which frames come first is decided by how long steps take, and not by a seed."""
        return self._envs.set_seed(seed)

    def _next_batch(self) -> TensorDictBase | None:
        batch = super()._next_batch()
        if batch is not None and self._options.split_trajs and not self._yields_trajectories:
            batch = batch[torch.argsort(batch[ENV_INDEX], stable=True)]  # frames of a trajectory side by side
        return batch

    def _rollout(self, num_frames: int) -> TensorDictBase:
        """So many frames, or a trajectory."""
        if self._takes_new_episodes():
            self._begin_anew()
        return self._rollout_yield_trajs() if self._yields_trajectories else self._rollout_frames(num_frames)

    @profiled("AsyncBatchedCollector._rollout_frames")
    def _rollout_frames(self, num_frames: int) -> TensorDictBase:
        """The next frames in the order in which they come."""
        frames = self._frames
        while len(frames) < num_frames:
            arrived = self._next_arrived(num_frames - len(frames))
            frames.add(self._server.rows, arrived)
            self._go_on(arrived)
        return frames.take()

    @profiled("AsyncBatchedCollector._rollout_yield_trajs")
    def _rollout_yield_trajs(self) -> TensorDictBase:
        """The next trajectory that is done."""
        while not self._trajectories:
            arrived = self._next_arrived(len(self._unfinished))
            for index, is_done in zip(arrived.tolist(), self._server.is_done(arrived).tolist(), strict=True):
                trajectory = self._unfinished[index]
                trajectory.add(self._server.rows, arrived[arrived == index])
                if is_done:
                    self._trajectories.append(trajectory.take())
            self._go_on(arrived)
        return self._trajectories.popleft()

    def _next_arrived(self, most: int) -> np.ndarray:
        """Envs that have taken a step, at least one."""
        if not self._arrived.size:
            self._arrived = self._envs.wait()
        arrived, self._arrived = self._arrived[:most], self._arrived[most:]
        return arrived

    def _begin_anew(self) -> None:
        """What was under way is dropped."""
        self._arrived = self._arrived[:0]
        self._trajectories.clear()
        for frames in (self._frames, *self._unfinished):
            frames.clear()
        self._server.begin(self._policy_to_ask(), self.policy_version)
        self._num_asked += len(self._unfinished)

    def _go_on(self, arrived: np.ndarray) -> None:
        self._server.go_on(arrived, self._policy_to_ask(), self.policy_version)
        self._num_asked += arrived.size

    def _policy_to_ask(self) -> ArrayPolicy | None:
        return None if self._num_asked < self._options.init_random_frames else self._act


def _limited(create: EnvCreator, max_steps: int) -> EnvBase:
    return TransformedEnv(create(), TimeLimit(max_steps))
