"""Base class of the collectors whose policy acts in this process."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import set_interaction_type
from torch import nn

from lucidrl.collectors.base import CollectorOptions, FrameCollector, check_calls, method_of
from lucidrl.collectors.profile import RolloutProfiler
from lucidrl.collectors.weights import device_of, load_weights, on_device
from lucidrl.errors import ConfigError
from lucidrl.profiling import gate
from lucidrl.profiling.hook import ProfileSettings
from lucidrl.profiling.ranges import _maybe_record_function

if TYPE_CHECKING:
    from lucidrl.collectors.policy_server import PolicyServer
    from lucidrl.collectors.trajectories import TrajectoryNumbers


class LocalCollector(FrameCollector):
    """A collector whose policy acts in this process. The collector itself is the only worker."""

    num_workers = 1
    _numbers: TrajectoryNumbers | PolicyServer
    """Assigns the trajectory numbers."""

    def __init__(self, policy: Any, options: CollectorOptions):
        super().__init__(options)
        self._computes_on = device_of(options.policy_device or options.device)
        self._source, self.policy = policy, on_device(policy, self._computes_on)
        self.post_collect_hook = options.post_collect_hook
        self._needs_reset = False
        self._is_shut_down = False
        self.profiler = RolloutProfiler()
        self._collecting = threading.RLock()  # makes calls from other threads wait for the end of a batch

    def update_policy_weights_(self, policy_or_weights: Any = None, *, version: int | None = None) -> None:
        """Act with new weights from the next batch on.

        Args:
            policy_or_weights: a state dict, a TensorDict of parameters, or a module with the weights; by default the
                policy that was passed to the collector. Its weights are copied only if the collector acts on another
                device.
            version: policy version of the following frames; by default one more than before.
        """
        with _maybe_record_function(f"{type(self).__name__}.update_policy_weights_"), self._collecting:
            if isinstance(self.policy, nn.Module):
                if policy_or_weights is not None:
                    load_weights(self.policy, policy_or_weights)
                elif self.policy is not self._source:
                    load_weights(self.policy, self._source)
            elif policy_or_weights is not None:
                raise ConfigError("the policy is not an nn.Module, so it has no weights to update; use an nn.Module")
            self.policy_version = self.policy_version + 1 if version is None else version

    def set_seed(self, seed: int) -> int:
        """Seed the envs and torch's random generator; new episodes begin with the next batch.

        Returns:
            The first unused seed.
        """
        with self._collecting:
            torch.manual_seed(seed)
            following = self._seed_envs(seed)
            self.reset()
            return following

    def reset(self) -> None:
        """Begin new episodes with the next batch."""
        self._needs_reset = True

    def set_post_collect_hook(self, hook: Callable[[TensorDictBase], object] | None) -> None:
        """Set the hook that is called with each batch; it replaces the previous hook."""
        self.post_collect_hook = hook

    def map_fn(self, name: str, list_of_args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the method `name` of every worker; here, the only worker is this collector."""
        check_calls(list_of_args, self.num_workers)
        return [method_of(self, name)(*list_of_args[0])]

    def rollout(self, num_frames: int | None = None) -> TensorDictBase:
        """Return a batch of `num_frames`, by default `frames_per_batch`, before post-processing."""
        num_frames = self._num_or_default(num_frames)
        with self.profiler:
            self._check_open()
            try:
                with self._collecting, torch.no_grad(), set_interaction_type(self._options.exploration_type):
                    batch = self._rollout(num_frames)
            except BaseException:
                self.reset()  # the frames of the unfinished batch are lost
                raise
            self.num_frames += batch.numel()
            if self._storing_device is not None:
                batch = batch.to(self._storing_device)
            if self.post_collect_hook is not None:
                self.post_collect_hook(batch)
            return batch

    def disable_profile(self) -> None:
        self.profiler.disable()

    def set_profiling_enabled(self, enabled: bool) -> None:
        """Turn the per-frame profiling ranges of this process on or off; see `lucidrl.profiling.gate`."""
        gate.set_profiling_enabled(enabled)

    def profile_obstacle(self, settings: ProfileSettings, worker_idx: int) -> str | None:
        """Return why this worker cannot record; None if it can, or if the settings do not name this worker."""
        return self.profiler.obstacle(settings) if worker_idx in settings.workers else None

    def start_profile(self, settings: ProfileSettings, worker_idx: int) -> None:
        """Start recording if the settings name this worker."""
        if worker_idx in settings.workers:
            self.profiler.enable(settings, worker_idx)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as plain values. Env states are not included, so new episodes begin after a resume."""
        return {
            "num_frames": self.num_frames,
            "policy_version": self.policy_version,
            "num_trajectories": self._numbers.num_trajectories,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_frames, self.policy_version = state["num_frames"], state["policy_version"]
        self._numbers.num_trajectories = state["num_trajectories"]
        self.reset()

    def shutdown(self) -> None:
        """Close the envs; may be called twice."""
        self._is_shut_down = True
        self.profiler.disable()
        self._close_envs()

    @abstractmethod
    def _rollout(self, num_frames: int) -> TensorDictBase:
        """Return a batch of `num_frames`, rounded up to whole steps of all envs."""

    @abstractmethod
    def _close_envs(self) -> None:
        """Close the envs; may be called twice."""

    @abstractmethod
    def _seed_envs(self, seed: int) -> int:
        """Seed the envs; return the first unused seed."""

    def _next_batch(self) -> TensorDictBase | None:
        num_frames = self._num_wanted(self.num_frames)
        return self.rollout(num_frames) if num_frames else None

    def _start_profile(self, settings: ProfileSettings) -> None:
        self._check_open()
        self.profiler.enable(settings)

    def _check_open(self) -> None:
        if self._is_shut_down:
            raise ConfigError("the collector was shut down; create a new collector")

    def _take_reset(self) -> bool:
        """Return whether this batch begins with new episodes, and clear the request of `reset`."""
        needs_reset, self._needs_reset = self._needs_reset or self._options.reset_at_each_iter, False
        return needs_reset
