"""What all collectors of frames do with their batches, wherever these are made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self, Unpack

from tensordict import TensorDictBase

from lucidrl.collectors.parts import CollectorOptions, device_of
from lucidrl.collectors.trajectories import split_trajectories
from lucidrl.errors import ConfigError
from lucidrl.profiling.gate import VARIABLES, armed_environment
from lucidrl.profiling.hook import ProfileOptions, ProfileSettings
from lucidrl.utils.imports import require_package


class FrameCollector(ABC):
    """Iterate to get batches, processed as asked for, until there were `total_frames`. See `Collector` for the
    arguments."""

    num_workers: int

    def __init__(self, options: CollectorOptions):
        self.frames_per_batch, self.total_frames = options.frames_per_batch, options.total_frames
        self._options = options
        self._storing_device = device_of(options.storing_device or options.device)
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
        """Record some of the next rollouts with torch's profiler, in the workers that make them.

            collector.enable_profile(workers=[0, 1], num_rollouts=5, save_path="traces/worker_{worker_idx}.json")

        A worker writes its trace after the last of these rollouts; or, with what there is by then, when one fails, when
        there were `total_frames`, at `disable_profile` and at `shutdown`. Then it can be enabled again. What runs
        between rollouts in the same thread is recorded too. Rollouts, policy and env have names in the trace if
        LUCIDRL_PROFILING=1 was set when `lucidrl` was imported.

        Args:
            options: fields of `lucidrl.profiling.hook.ProfileSettings`, which says what they mean.

        Raises:
            ConfigError: before anything starts, if it cannot be done as asked.
        """
        self._start_profile(ProfileSettings(**options).checked(self.num_workers))

    @classmethod
    def as_remote(cls, **options: Any) -> Any:
        """This class as a Ray actor class.

            actor = Collector.as_remote(num_cpus=1).remote(make_env, policy, frames_per_batch=200)
            batch = ray.get(actor.next.remote())

        Args:
            options: of `ray.remote`, which are left as they are. If this process has per-frame ranges, the variable
                that arms them is added to what the actor finds in its environment.
        """
        require_package("ray", f"{cls.__name__}.as_remote()")
        import ray

        options = armed(options)
        return ray.remote(**options)(cls) if options else ray.remote(cls)

    @abstractmethod
    def disable_profile(self) -> None:
        """Write what was recorded so far, and record no more; may be called twice."""

    @abstractmethod
    def set_profiling_enabled(self, enabled: bool) -> None:
        """Show the per-frame ranges in the workers from now on, or silence them; they must be armed there."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release everything; may be called twice."""

    @abstractmethod
    def _start_profile(self, settings: ProfileSettings) -> None:
        """Let the workers record that the settings name, or none of them."""

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


def armed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `ray.remote`, for actors that have per-frame ranges if this process has them; a copy.

    If the options name one of the variables that arm, they stay as they are.
    """
    own: Mapping[str, Any] = options.get("runtime_env") or {}
    variables = own.get("env_vars") or {}
    added = armed_environment() if variables.keys().isdisjoint(VARIABLES) else {}
    if not added:
        return dict(options)
    return {**options, "runtime_env": {**own, "env_vars": {**added, **variables}}}
