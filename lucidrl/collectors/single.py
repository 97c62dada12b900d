"""Collector: frames of one env, or of a batch of envs, in this process.

Shapes: B the env's batch size, T time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from lucidrl.collectors.base import CollectorOptions
from lucidrl.collectors.local import LocalCollector
from lucidrl.collectors.trajectories import POLICY_VERSION, TRAJECTORY_IDS, TrajectoryNumbers
from lucidrl.collectors.weights import Device
from lucidrl.envs.base import EnvBase
from lucidrl.envs.creator import EnvCreator, EnvFactory, make_env
from lucidrl.envs.policies import as_policy
from lucidrl.envs.recorder import Recorder
from lucidrl.envs.transforms import TimeLimit, TransformedEnv
from lucidrl.profiling.ranges import profiled

ExplorationType = InteractionType


class Collector(LocalCollector):
    """Yields batches of frames collected with the newest weights; episodes continue from one batch to the next.

        collector = Collector(GymEnv("CartPole-v1"), policy, frames_per_batch=1000, total_frames=100_000)
        for batch in collector:
            train(batch)
            collector.update_policy_weights_()
        collector.shutdown()

    A batch is a TensorDict of [*B, T] with observations, actions, other outputs of the policy, "next" and, under
    "collector", the trajectory number and policy version of each frame. Batches own their memory: later batches do not
    overwrite it.

    Args:
        create_env_fn: the env, or a factory that makes it; the collector closes the env at `shutdown`.
        policy: a TensorDict module, an `nn.Module` on the observation, a callable, or None to act at random; see
            `lucidrl.envs.policies.as_policy`.
        frames_per_batch: frames of all envs together; rounded up to whole steps of all envs.
        total_frames: frames to collect in total, with a shorter last batch; -1 collects without end.
        device: default of `storing_device` and `policy_device`.
        storing_device: device of the batches.
        policy_device: device that the policy acts on; a policy on another device is copied to it.
        env_device: device of the TensorDicts that an env with TensorDict hooks receives; see `EnvBase`.
        create_env_kwargs: arguments of `create_env_fn`.
        init_random_frames: act at random, in whole batches, until this many frames are collected.
        max_frames_per_traj: truncate episodes at this length.
        split_trajs: yield [N, T_max], one padded row per trajectory, with ("collector", "mask").
        reset_at_each_iter: begin new episodes with each batch.
        exploration_type: how a probabilistic policy chooses actions; by default it samples them.
        postproc: called with each batch; returns the batch to yield.
        replay_buffer: object with `extend`, which stores each batch, and `sample`; see `ReplayBuffer`.
        seed: passed to `set_seed`.
        post_collect_hook: called with each batch before post-processing.
        first_trajectory, trajectory_stride: trajectories get the numbers first, first + stride, first + 2 * stride...
    """

    _numbers: TrajectoryNumbers

    def __init__(
        self,
        create_env_fn: EnvBase | EnvFactory,
        policy: Any = None,
        *,
        env_device: Device = None,
        create_env_kwargs: Mapping[str, Any] | None = None,
        first_trajectory: int = 0,
        trajectory_stride: int = 1,
        **arguments: Any,
    ):
        options = CollectorOptions(**arguments)
        super().__init__(policy, options)
        self.env = (
            create_env_fn
            if isinstance(create_env_fn, EnvBase)
            else make_env(EnvCreator(create_env_fn, create_env_kwargs), index=0)
        )
        if env_device is not None:
            self.env.device = torch.device(env_device)
        if options.max_frames_per_traj:
            self.env = TransformedEnv(self.env, TimeLimit(options.max_frames_per_traj))
        self._num_envs = math.prod(self.env.batch_size)
        options.warn_if_rounded(self._num_envs)
        self._act = as_policy(self.policy, self.env, self._computes_on)
        self._act_at_random = as_policy(None, self.env)
        self._recorder = Recorder(self.env, self._num_steps(options.frames_per_batch), "Collector.policy")
        self._numbers = TrajectoryNumbers(self.env.batch_size, first_trajectory, trajectory_stride)
        if options.seed is not None:
            self.set_seed(options.seed)

    @profiled("Collector.rollout")
    def _rollout(self, num_frames: int) -> TensorDictBase:
        if self._take_reset():
            self._numbers.reset()
            self._recorder.reset()
        is_random, version = self.num_frames < self._options.init_random_frames, self.policy_version
        self._recorder.record(self._act_at_random if is_random else self._act, self._num_steps(num_frames))
        batch = self._recorder.take()
        batch[TRAJECTORY_IDS] = self._numbers.of(batch["next", "done"].squeeze(-1).numpy())
        batch[POLICY_VERSION] = torch.full(batch.batch_size, version)
        return batch

    def _close_envs(self) -> None:
        self.env.close()

    def _seed_envs(self, seed: int) -> int:
        return self.env.set_seed(seed)

    def _num_steps(self, num_frames: int) -> int:
        return math.ceil(num_frames / self._num_envs)
