"""Records the rollouts of a worker with torch's profiler, and sends traces to a driver on another machine."""

from __future__ import annotations

import logging
import shutil
import tempfile
import uuid
from dataclasses import dataclass, replace
from multiprocessing import util
from pathlib import Path

from torch.profiler import profile

from lucidrl.errors import ConfigError
from lucidrl.profiling.hook import ProfileSettings, _ProfilerHook, profiler_obstacle
from lucidrl.profiling.trace_files import filled
from lucidrl.utils.logger.folders import whole_file

_log = logging.getLogger(__name__)


class RolloutProfiler:
    """Records rollouts of one worker, one trace at a time. Run every rollout inside it, as a context manager.

    Args:
        role: name of the process in traces.
    """

    def __init__(self, role: str = "collector worker"):
        self._role = role
        self._hooks: list[_ProfilerHook] = []  # at most one
        self._recording: list[_ProfilerHook] = []  # the hook of the current rollout
        # Runs at garbage collection and at exit; unlike `atexit`, it also runs in a process of multiprocessing.
        util.Finalize(self, _stop, (self._hooks,), exitpriority=0)

    @property
    def is_active(self) -> bool:
        """Whether a trace is not written yet."""
        return any(not hook.is_done for hook in self._hooks)

    def obstacle(self, settings: ProfileSettings) -> str | None:
        """Return why rollouts cannot be recorded; None if they can."""
        if any(hook.is_ending for hook in self._hooks):
            return "the previous trace is not written yet; the recording thread writes it before its next rollout"
        if self.is_active:
            return "rollouts are already being recorded; wait for their trace, or call disable_profile() first"
        return profiler_obstacle(settings.activities)

    def enable(self, settings: ProfileSettings, worker_idx: int = 0) -> None:
        """Record the rollouts after the warm-up.

        Raises:
            ConfigError: the rollouts cannot be recorded.
        """
        if obstacle := self.obstacle(settings):
            raise ConfigError(obstacle)
        self._hooks[:] = [_ProfilerHook(settings, worker_idx, self._role)]

    def disable(self) -> None:
        """Write the trace recorded so far; may be called twice."""
        _stop(self._hooks)

    def forget(self) -> None:
        """Drop the unwritten trace; for a process that is about to end."""
        self._hooks.clear()

    def __enter__(self) -> None:
        self._recording = self._hooks[:] if self.is_active else []
        for hook in self._recording:
            hook.before_rollout()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for hook in self._recording:
            if kind is None:
                hook(None)
            else:
                hook.stop()


def _stop(hooks: list[_ProfilerHook]) -> None:
    for hook in hooks:
        hook.stop()


@dataclass(frozen=True)
class SentTrace:
    """The content of a trace file."""

    path: Path
    """Where the driver saves the file."""
    content: bytes | None
    """None if the worker could not write the trace."""

    def save(self, worker_idx: int) -> None:
        """Write the file atomically; log a warning if this fails."""
        if self.content is None:
            _log.warning("the trace of collector worker %d is lost; the log of the worker has the reason", worker_idx)
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self.path) as file:
                file.write(self.content)
        except OSError as error:
            _log.warning(
                "the trace of collector worker %d is lost: %s cannot be written (%s)", worker_idx, self.path, error
            )


def redirected(settings: ProfileSettings, worker_idx: int, traces: list[SentTrace]) -> ProfileSettings:
    """Return the settings, changed so that the finished trace is appended to `traces` and not saved at its path."""
    template = settings.path_template
    if template is None or worker_idx not in settings.workers:
        return settings
    destination = filled(template, worker_idx)
    # The profiler writes to a temporary folder. The suffix stays, because it decides whether the trace is compressed.
    here = Path(tempfile.gettempdir(), f"lucidrl-trace-{uuid.uuid4().hex}", f"trace{destination.suffix}")

    def put(profiler: profile) -> None:
        traces.append(SentTrace(destination, here.read_bytes() if here.exists() else None))
        shutil.rmtree(here.parent, ignore_errors=True)
        if settings.on_trace_ready is not None:
            settings.on_trace_ready(profiler)

    return replace(settings, save_path=str(here).replace("{", "{{").replace("}", "}}"), on_trace_ready=put)
