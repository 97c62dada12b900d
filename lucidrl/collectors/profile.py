"""The profiler of a collector's rollouts, in the process that makes them."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import util
from typing import TypeVar

from lucidrl.errors import ConfigError
from lucidrl.profiling.hook import ProfileSettings, _ProfilerHook, profiler_obstacle

BatchT = TypeVar("BatchT")


class RolloutProfiler:
    """Records the rollouts of one worker that it is asked to, for one trace at a time.

    Args:
        role: what traces call the process.
    """

    def __init__(self, role: str = "collector worker"):
        self._role = role
        self._hooks: list[_ProfilerHook] = []  # at most one
        self._num_enabled = 0
        # Runs when nobody has this any more, and at exit, also that of a process of multiprocessing, unlike `atexit`.
        util.Finalize(self, _stop, (self._hooks,), exitpriority=0)

    @property
    def is_active(self) -> bool:
        """Whether a trace is still to be written."""
        return any(not hook.is_done for hook in self._hooks)

    @property
    def num_ended(self) -> int:
        """How many traces were written, or are lost."""
        return self._num_enabled - self.is_active

    def obstacle(self, settings: ProfileSettings) -> str | None:
        """Why rollouts cannot be recorded so; None if they can."""
        if any(hook.is_ending for hook in self._hooks):
            return "the trace before is not written yet; its thread does that before its next rollout"
        if self.is_active:
            return "rollouts are being recorded already; wait for their trace, or call disable_profile() first"
        return profiler_obstacle(settings.activities)

    def enable(self, settings: ProfileSettings, worker_idx: int = 0) -> None:
        """Record from the next rollout on, or from that after the warm-up.

        Raises:
            ConfigError: if there is an obstacle.
        """
        if obstacle := self.obstacle(settings):
            raise ConfigError(obstacle)
        self._num_enabled += 1
        self._hooks[:] = [_ProfilerHook(settings, worker_idx, self._role)]

    def disable(self) -> None:
        """Write what was recorded so far; may be called twice."""
        _stop(self._hooks)

    def forget(self) -> None:
        """Write nothing, in a process that is about to end."""
        self._hooks.clear()

    def run(self, rollout: Callable[[], BatchT]) -> BatchT:
        """Make a rollout, recorded if it is one of those that were asked for."""
        if not self.is_active:
            return rollout()
        (hook,) = self._hooks
        hook.before_rollout()
        try:
            batch = rollout()
        except BaseException:
            hook.stop()
            raise
        hook(batch)
        return batch


def _stop(hooks: list[_ProfilerHook]) -> None:
    for hook in hooks:
        hook.stop()
