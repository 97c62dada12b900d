"""What collectors share whose policy acts in this process."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import set_interaction_type
from torch import nn

from lucidrl.collectors.base import FrameCollector
from lucidrl.collectors.parts import CollectorOptions, call_method, check_calls, device_of, load_weights, on_device
from lucidrl.collectors.profile import RolloutProfiler
from lucidrl.errors import ConfigError
from lucidrl.profiling import gate
from lucidrl.profiling.hook import ProfileSettings
from lucidrl.profiling.ranges import _maybe_record_function


class LocalCollector(FrameCollector):
    """A collector whose policy acts in this process, which is its only worker."""

    num_workers = 1

    def __init__(self, policy: Any, options: CollectorOptions):
        super().__init__(options)
        self._computes_on = device_of(options.policy_device or options.device)
        self._source, self.policy = policy, on_device(policy, self._computes_on)
        self.post_collect_hook = options.post_collect_hook
        self._begins_anew = False
        self._is_shut_down = False
        self._profiler = RolloutProfiler()
        self._collecting = threading.RLock()  # what other threads ask for comes between two batches

    def update_policy_weights_(self, policy_or_weights: Any = None, *, version: int | None = None) -> None:
        """From now on, act with newer weights.

        Args:
            policy_or_weights: a state dict, a TensorDict of parameters, or a module to take them from; by default the
                policy that the collector was given, which need not be said if it computes where it is.
            version: what frames are stamped with; by default one more than before.
        """
        with _maybe_record_function(f"{type(self).__name__}.update_policy_weights_"), self._collecting:
            if isinstance(self.policy, nn.Module):
                if policy_or_weights is not None:
                    load_weights(self.policy, policy_or_weights)
                elif self.policy is not self._source:
                    load_weights(self.policy, self._source)
            elif policy_or_weights is not None:
                raise ConfigError("the policy has no weights to update; give the collector an nn.Module")
            self.policy_version = self.policy_version + 1 if version is None else version

    def set_seed(self, seed: int) -> int:
        """Seed the envs and torch's generator, which policies draw from; new episodes begin with the next batch.

        Returns:
            The first seed that is not used by it.
        """
        with self._collecting:
            torch.manual_seed(seed)
            following = self._seed_envs(seed)
            self.reset()
            return following

    def reset(self) -> None:
        """Begin new episodes with the next batch."""
        self._begins_anew = True

    def set_post_collect_hook(self, hook: Callable[[TensorDictBase], object] | None) -> None:
        """Call the hook with each batch from now on, in place of an earlier one."""
        self.post_collect_hook = hook

    def map_fn(self, name: str, list_of_args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the method `name` in every worker, which is this collector."""
        check_calls(list_of_args, self.num_workers)
        return [call_method(self, name, list_of_args[0])]

    def rollout(self, num_frames: int | None = None) -> TensorDictBase:
        """A batch of `num_frames`, by default `frames_per_batch`, as it was collected."""
        return self._profiler.run(partial(self._rollout_in_whole, self._num_or_default(num_frames)))

    def disable_profile(self) -> None:
        self._profiler.disable()

    def set_profiling_enabled(self, enabled: bool) -> None:
        """Show the per-frame ranges of this process from now on, or silence them; they must be armed."""
        gate.set_profiling_enabled(enabled)

    def profile_obstacle(self, settings: ProfileSettings, worker_idx: int) -> str | None:
        """Why this worker cannot record as the settings ask; None if it can, or need not."""
        return self._profiler.obstacle(settings) if worker_idx in settings.workers else None

    def start_profile(self, settings: ProfileSettings, worker_idx: int) -> None:
        """Record as the settings ask, if they name this worker."""
        if worker_idx in settings.workers:
            self._profiler.enable(settings, worker_idx)

    def forget_profile(self) -> None:
        """Write no trace, in a process that is about to end."""
        self._profiler.forget()

    @property
    def is_profiled(self) -> bool:
        """Whether a trace is still to be written."""
        return self._profiler.is_active

    def shutdown(self) -> None:
        """Close the envs; may be called twice."""
        self._is_shut_down = True
        self._profiler.disable()
        self._close_envs()

    @abstractmethod
    def _rollout(self, num_frames: int) -> TensorDictBase:
        """A batch of so many frames, in whole steps of all envs."""

    @abstractmethod
    def _close_envs(self) -> None:
        """May be called twice."""

    @abstractmethod
    def _seed_envs(self, seed: int) -> int:
        """Returns the first seed that is not used by it."""

    def _next_batch(self) -> TensorDictBase | None:
        num_frames = self._num_wanted(self.num_frames)
        return self.rollout(num_frames) if num_frames else None

    def _start_profile(self, settings: ProfileSettings) -> None:
        self._check_open()
        self._profiler.enable(settings)

    def _check_open(self) -> None:
        if self._is_shut_down:
            raise ConfigError("the collector was shut down; make another one")

    def _rollout_in_whole(self, num_frames: int) -> TensorDictBase:
        self._check_open()
        try:
            with self._collecting, torch.no_grad(), set_interaction_type(self._options.exploration_type):
                batch = self._rollout(num_frames)
        except BaseException:
            self.reset()  # the frames up to here are lost
            raise
        return self._collected(batch)

    def _takes_new_episodes(self) -> bool:
        """Whether this batch begins with them."""
        begins_anew, self._begins_anew = self._begins_anew or self._options.reset_at_each_iter, False
        return begins_anew

    def _collected(self, batch: TensorDictBase) -> TensorDictBase:
        """Count a batch, put it where it belongs, and show it."""
        self.num_frames += batch.numel()
        if self._storing_device is not None:
            batch = batch.to(self._storing_device)
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return batch
