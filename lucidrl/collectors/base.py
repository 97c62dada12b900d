"""Options and interface of the frame collectors, which step envs of control tasks, and post-processing of batches."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, Unpack

from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from lucidrl.collectors.trajectories import split_trajectories
from lucidrl.collectors.weights import Device, device_of
from lucidrl.errors import ConfigError
from lucidrl.profiling.gate import VARIABLES, armed_environment
from lucidrl.profiling.hook import ProfileOptions, ProfileSettings
from lucidrl.utils.imports import require_package

log = logging.getLogger(__name__)


class ReplayBuffer(Protocol):
    """Stores batches of collectors, and samples batches for training. TorchRL's replay buffers fit this protocol."""

    def extend(self, data: Any) -> Any:
        """Store the entries of a batch along its first dim; collectors call this method."""
        ...

    def sample(self, batch_size: int) -> Any:
        """Return `batch_size` stored entries, sampled at random; the training loop calls this method."""
        ...


@dataclass(frozen=True, kw_only=True)
class CollectorOptions:
    """Keyword arguments of all frame collectors; `Collector` documents them."""

    frames_per_batch: int
    total_frames: int = -1
    device: Device = None
    storing_device: Device = None
    policy_device: Device = None
    init_random_frames: int = 0
    max_frames_per_traj: int | None = None
    split_trajs: bool = False
    reset_at_each_iter: bool = False
    exploration_type: InteractionType = InteractionType.RANDOM
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = None
    replay_buffer: ReplayBuffer | None = None
    seed: int | None = None
    post_collect_hook: Callable[[TensorDictBase], object] | None = None

    def __post_init__(self) -> None:
        if self.frames_per_batch < 1:
            raise ConfigError(f"frames_per_batch={self.frames_per_batch} is less than 1; set it to at least 1")
        if self.replay_buffer is not None and not callable(getattr(self.replay_buffer, "extend", None)):
            raise ConfigError(
                f"replay_buffer={self.replay_buffer!r:.60} has no method extend, which collectors call to store "
                "batches; pass an object with extend(batch) and sample(batch_size)"
            )
        if self.total_frames < -1 or self.total_frames == 0:
            raise ConfigError(f"total_frames={self.total_frames} collects nothing; set at least 1, or -1 for no limit")

    def warn_if_rounded(self, num_envs: int) -> None:
        """Warn if `frames_per_batch` or `total_frames` is not a multiple of `num_envs`, as all envs step together."""
        numbers = {"frames_per_batch": self.frames_per_batch, "total_frames": self.total_frames}
        for name, number in numbers.items():
            if number > 0 and number % num_envs:
                log.warning(
                    "%s=%d is not a multiple of the %d envs, which step together; rounding it up to %d",
                    name,
                    number,
                    num_envs,
                    math.ceil(number / num_envs) * num_envs,
                )


class FrameCollector(ABC):
    """Iterate to get batches until `total_frames` are collected; a frame is one step of one env.

    See `Collector` for the arguments.
    """

    num_workers: int

    def __init__(self, options: CollectorOptions):
        self.frames_per_batch, self.total_frames = options.frames_per_batch, options.total_frames
        self._options = options
        self._storing_device = device_of(options.storing_device or options.device)
        self.policy_version = 0
        """Version of the newest weights; counts the updates."""
        self.num_frames = 0
        """Frames collected so far."""

    def __iter__(self) -> Iterator[TensorDictBase]:
        while (batch := self.next()) is not None:
            yield batch

    def next(self) -> TensorDictBase | None:
        """Return the next batch, or None after `total_frames`; apply `split_trajs`, `postproc` and `replay_buffer`."""
        batch = self._next_batch()
        if batch is None:
            self.disable_profile()
            return None
        options = self._options
        if options.split_trajs:
            batch = split_trajectories(batch)
        if options.postproc is not None:
            batch = options.postproc(batch)
        if options.replay_buffer is not None:
            options.replay_buffer.extend(batch)
        return batch

    def enable_profile(self, **options: Unpack[ProfileOptions]) -> None:
        """Record some of the next rollouts with torch's profiler, in the workers that collect them.

            collector.enable_profile(workers=[0, 1], num_rollouts=5, save_path="traces/worker_{worker_idx}.json")

        A worker writes its trace after the last of these rollouts. It writes the rollouts recorded so far when a
        rollout fails, after `total_frames`, at `disable_profile` and at `shutdown`. The trace includes what the same
        thread runs between rollouts. It has named ranges for rollouts, policy and env if LUCIDRL_PROFILING=1 was set
        when `lucidrl` was imported.

        Args:
            options: fields of `lucidrl.profiling.hook.ProfileSettings`.

        Raises:
            ConfigError: the rollouts cannot be recorded; no recording has started.
        """
        self._start_profile(ProfileSettings(**options).checked(self.num_workers))

    @classmethod
    def as_remote(cls, **options: Any) -> Any:
        """Return this class as a Ray actor class.

            actor = Collector.as_remote(num_cpus=1).remote(make_env, policy, frames_per_batch=200)
            batch = ray.get(actor.next.remote())

        Args:
            options: passed to `ray.remote`. If this process has per-frame profiling ranges, the actor has them too.
        """
        require_package("ray", f"{cls.__name__}.as_remote()")
        import ray

        options = armed(options)
        return ray.remote(**options)(cls) if options else ray.remote(cls)

    @abstractmethod
    def disable_profile(self) -> None:
        """Write the rollouts recorded so far and stop recording; may be called twice."""

    @abstractmethod
    def shutdown(self) -> None:
        """Close envs and end workers; may be called twice."""

    @abstractmethod
    def _start_profile(self, settings: ProfileSettings) -> None:
        """Start recording in all workers that the settings name, or raise without starting any recording."""

    @abstractmethod
    def _next_batch(self) -> TensorDictBase | None:
        """Return the next batch before post-processing, or None after `total_frames`."""

    def _num_or_default(self, num_frames: int | None) -> int:
        if num_frames is None:
            return self.frames_per_batch
        if num_frames < 1:
            raise ConfigError(f"num_frames={num_frames} is less than 1; set it to at least 1")
        return num_frames

    def _num_wanted(self, num_requested: int) -> int:
        """Return the size of the next batch after `num_requested` frames; 0 if they already reach `total_frames`."""
        if self.total_frames < 0:
            return self.frames_per_batch
        return max(0, min(self.total_frames - num_requested, self.frames_per_batch))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()


def check_calls(list_of_args: Sequence[tuple[Any, ...]], num_workers: int) -> None:
    """Refuse arguments of `map_fn` that are not one tuple per worker."""
    if len(list_of_args) != num_workers:
        raise ConfigError(
            f"list_of_args has {len(list_of_args)} tuples for {num_workers} worker(s); pass one tuple per worker"
        )
    if wrong := [args for args in list_of_args if not isinstance(args, list | tuple)]:
        raise ConfigError(f"list_of_args has {wrong[0]!r}, which is not a tuple; pass one argument tuple per worker")


def method_of(target: object, name: str) -> Callable[..., Any]:
    """Return the method of `target` that `map_fn` calls."""
    method = getattr(target, name, None)
    if not callable(method):
        kind = target if isinstance(target, type) else type(target)
        raise ConfigError(f"{kind.__name__} has no method {name!r}; pass the name of an existing method")
    return method


def armed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `ray.remote` options with the environment variables that turn on per-frame profiling ranges.

    Nothing is added if this process has no such ranges, or if the options already set one of the variables.
    """
    runtime_env: Mapping[str, Any] = options.get("runtime_env") or {}
    variables = runtime_env.get("env_vars") or {}
    added = armed_environment() if variables.keys().isdisjoint(VARIABLES) else {}
    if not added:
        return dict(options)
    return {**options, "runtime_env": {**runtime_env, "env_vars": {**added, **variables}}}
