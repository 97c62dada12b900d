"""What all collectors of frames do with their batches, wherever these are made."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from torch import nn

from lucidrl.collectors.parts import (
    Device,
    ReplayBuffer,
    call_method,
    check_calls,
    check_frames,
    device_of,
    load_weights,
    on_device,
)
from lucidrl.collectors.trajectories import split_trajectories
from lucidrl.errors import ConfigError


class FrameCollector(ABC):
    """Iterate to get batches, processed as asked for, until there were `total_frames`. See `Collector` for the
    arguments."""

    num_workers: int

    def __init__(
        self,
        *,
        frames_per_batch: int,
        total_frames: int,
        storing_device: Device,
        split_trajs: bool,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None,
        replay_buffer: ReplayBuffer | None,
    ):
        check_frames(frames_per_batch, total_frames, 1)
        self.frames_per_batch, self.total_frames = frames_per_batch, total_frames
        self._storing_device = device_of(storing_device)
        self._split_trajs, self._postproc, self._replay_buffer = split_trajs, postproc, replay_buffer
        self.policy_version = 0
        """Of the newest weights; counts the updates."""
        self.num_frames = 0
        """Collected so far."""

    def __iter__(self) -> Iterator[TensorDictBase]:
        while (batch := self.next()) is not None:
            yield batch

    def next(self) -> TensorDictBase | None:
        """The next batch, processed as asked for; None when there were `total_frames`."""
        batch = self._next_batch()
        if batch is None:
            return None
        if self._split_trajs:
            batch = split_trajectories(batch)
        if self._postproc is not None:
            batch = self._postproc(batch)
        if self._replay_buffer is not None:
            self._replay_buffer.extend(batch)
        return batch

    @abstractmethod
    def shutdown(self) -> None:
        """Release everything; may be called twice."""

    @abstractmethod
    def _next_batch(self) -> TensorDictBase | None:
        """A batch as it was collected; None when there were `total_frames`."""

    def _num_or_default(self, num_frames: int | None) -> int:
        """Frames of a rollout that was asked for."""
        if num_frames is None:
            return self.frames_per_batch
        if num_frames < 1:
            raise ConfigError(f"num_frames={num_frames} makes no batch; give at least 1")
        return num_frames

    def _num_wanted(self, num_asked: int) -> int:
        """Frames of the next batch, if so many were asked for; 0 at the end."""
        if self.total_frames < 0:
            return self.frames_per_batch
        return max(0, min(self.total_frames - num_asked, self.frames_per_batch))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


class LocalCollector(FrameCollector):
    """A collector whose policy acts in this process, which is its only worker."""

    num_workers = 1

    def __init__(
        self,
        policy: Any,
        *,
        device: Device,
        policy_device: Device,
        storing_device: Device,
        post_collect_hook: Callable[[TensorDictBase], object] | None,
        **batches: Any,
    ):
        super().__init__(storing_device=storing_device or device, **batches)
        self._computes_on = device_of(policy_device or device)
        self._source, self.policy = policy, on_device(policy, self._computes_on)
        self.post_collect_hook = post_collect_hook
        self._begins_anew = False
        self._collecting = threading.RLock()  # what other threads ask for comes between two batches

    def update_policy_weights_(self, policy_or_weights: Any = None, *, version: int | None = None) -> None:
        """From now on, act with newer weights.

        Args:
            policy_or_weights: a state dict, a TensorDict of parameters, or a module to take them from; by default the
                policy that the collector was given, which need not be said if it computes where it is.
            version: what frames are stamped with; by default one more than before.
        """
        with self._collecting:
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

    @abstractmethod
    def rollout(self, num_frames: int | None = None) -> TensorDictBase:
        """A batch of `num_frames`, by default `frames_per_batch`, as it was collected."""

    @abstractmethod
    def _seed_envs(self, seed: int) -> int:
        """Returns the first seed that is not used by it."""

    def _next_batch(self) -> TensorDictBase | None:
        num_frames = self._num_wanted(self.num_frames)
        return self.rollout(num_frames) if num_frames else None

    def _collected(self, batch: TensorDictBase) -> TensorDictBase:
        """Count a batch, put it where it belongs, and show it."""
        self.num_frames += batch.numel()
        if self._storing_device is not None:
            batch = batch.to(self._storing_device)
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return batch
