"""A profiler for the thread that makes rollouts."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError, with_config
from torch.profiler import ProfilerActivity, profile, supported_activities
from typing_extensions import TypedDict  # the one that pydantic accepts before Python 3.12

from lucidrl.errors import ConfigError
from lucidrl.profiling.trace_files import ProcessName, check_folder, check_template, filled, write_trace

_log = logging.getLogger(__name__)

DEFAULT_PATH = "traces/{host}_{pid}_worker_{worker_idx}.json"
_PROFILER_OPTIONS = ("record_shapes", "profile_memory", "with_stack", "with_flops")
_LONGEST_NAME = 255 - 38  # the temporary name in `write_trace` has 38 more characters


@with_config(ConfigDict(strict=True, arbitrary_types_allowed=True))
class ProfileOptions(TypedDict, total=False):
    """Arguments of `enable_profile`; see `ProfileSettings`."""

    workers: Annotated[Sequence[int] | range, Field(min_length=1)]
    num_rollouts: PositiveInt
    warmup_rollouts: NonNegativeInt
    save_path: str | os.PathLike[str] | None
    activities: Annotated[Sequence[ProfilerActivity], Field(min_length=1)] | None
    record_shapes: bool
    profile_memory: bool
    with_stack: bool
    with_flops: bool
    on_trace_ready: Callable[[profile], object] | None


@dataclass(frozen=True)
class ProfileSettings:
    """Which rollouts of a collector to record. Shapes and stacks multiply the time and the size of a trace.

    Raises:
        ConfigError: for options that cannot be recorded or written.
    """

    workers: Sequence[int] = (0,)
    """Workers to record, each in a separate trace."""
    num_rollouts: int = 3
    """Rollouts until the trace is written, including the warm-up."""
    warmup_rollouts: int = 1
    """Rollouts before the recording starts; 0 starts with the next rollout."""
    save_path: str | os.PathLike[str] | None = None
    """Path of the trace, compressed if it ends in .gz; each worker fills in `{worker_idx}`, `{pid}` and `{host}`. By
    default `traces/{host}_{pid}_worker_{worker_idx}.json`, or no file with `on_trace_ready`."""
    activities: Sequence[ProfilerActivity] | None = None
    """Activities that torch's profiler records; by default the CPU, and the GPU if there is one."""
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    on_trace_ready: Callable[[profile], object] | None = None
    """Called in the worker with the profiler at the end. With a `save_path`, the callback cannot export the trace
    again: torch can export it only once."""

    def __post_init__(self) -> None:
        try:
            TypeAdapter(ProfileOptions).validate_python(vars(self))
        except ValidationError as error:
            problem = error.errors()[0]
            raise ConfigError(f"{problem['loc'][0]}: {problem['input']!r} is not valid: {problem['msg']}") from None
        if "\0" in str(self.save_path):
            raise ConfigError(f"save_path={str(self.save_path)!r} has a null character; remove it")
        if self.warmup_rollouts >= self.num_rollouts:
            raise ConfigError(
                f"warmup_rollouts={self.warmup_rollouts} of num_rollouts={self.num_rollouts} leaves nothing to record; "
                "lower warmup_rollouts, or raise num_rollouts"
            )

    def checked(self, num_workers: int) -> ProfileSettings:
        """These settings with an absolute path, checked for a collector with `num_workers` workers.

        Raises:
            ConfigError: if they cannot be recorded or written.
        """
        for index in self.workers:
            if not 0 <= index < num_workers:
                raise ConfigError(f"workers has {index!r}, but workers are numbered from 0 to {num_workers - 1}")
        if len(set(self.workers)) < len(self.workers):
            raise ConfigError(f"workers={list(self.workers)} has a worker twice; list each once")
        template = self.path_template
        if template is None:
            return self
        found = check_template(template)
        if len(self.workers) > 1 and not found & {"worker_idx", "pid"}:
            raise ConfigError(
                f"save_path={template!r} is the same for {len(self.workers)} workers; put {{worker_idx}} into it"
            )
        if template.endswith(os.sep) or any(os.path.isdir(filled(template, index)) for index in self.workers):
            raise ConfigError(f"save_path={template!r} is a folder; use a file name")
        if any(len(os.fsencode(filled(template, index).name)) > _LONGEST_NAME for index in self.workers):
            raise ConfigError(f"save_path={template!r} has a file name that is too long; use a shorter one")
        here = os.getcwd().replace("{", "{{").replace("}", "}}")
        template = os.path.join(here, template)
        # Only the part before the first placeholder: each process creates the rest.
        check_folder(Path(template.partition("{")[0] + "_").parent, "save_path")
        return replace(self, save_path=template)

    @property
    def path_template(self) -> str | None:
        """Path template of the traces, if any are written."""
        if self.save_path is None:
            return None if self.on_trace_ready is not None else DEFAULT_PATH
        return os.fspath(self.save_path)


@dataclass(frozen=True)
class _Running:
    profiler: profile
    process: ProcessName
    thread: threading.Thread
    """The only thread that may stop the profiler."""
    pid: int


class _ProfilerHook:
    """Records rollouts of one worker and writes the trace; errors are logged and never stop a rollout.

    The thread that makes rollouts calls `before_rollout` before each one, and the hook itself, with the batch, after
    it: torch's profiler records only the thread that starts it.

    Args:
        role: name of the process in the trace.
    """

    def __init__(self, settings: ProfileSettings, worker_idx: int = 0, role: str = "collector worker"):
        self._settings, self._worker_idx = settings, worker_idx
        self._name = f"{role} {worker_idx}"
        self._num_rollouts = 0
        self._running: _Running | None = None
        self._is_to_stop = False
        self.is_done = False
        """Whether the trace was written, or never will be."""

    @property
    def is_ending(self) -> bool:
        """Whether the rollout thread still has to write the trace."""
        return self._is_to_stop and not self.is_done

    def before_rollout(self) -> None:
        """Start recording, if the warm-up is over."""
        if self._is_to_stop:
            self.stop()
        if self._running is not None or self.is_done or self._num_rollouts < self._settings.warmup_rollouts:
            return
        process = ProcessName(self._name)
        try:
            options = {name: getattr(self._settings, name) for name in _PROFILER_OPTIONS}
            profiler = started_profiler(self._settings.activities, **options)
        except Exception as error:
            self.is_done = True
            _log.warning("no trace of %s will be written: %s", self._name, error)
        else:
            self._running = _Running(profiler, process, threading.current_thread(), os.getpid())

    def __call__(self, batch: object) -> None:
        """Count a rollout; stop after the last one."""
        self._num_rollouts += 1
        if self._is_to_stop or self._num_rollouts >= self._settings.num_rollouts:
            self.stop()

    def stop(self) -> None:
        """Write the trace recorded so far and record no more; may be called twice.

        From another thread this is only a request: the rollout thread stops after its current rollout, or before the
        next one.
        """
        running, was_asked, self._is_to_stop = self._running, self._is_to_stop, True
        if running is not None and running.pid != os.getpid():  # a fork does not own its parent's recording
            self._running, self.is_done = None, True
            return
        if running is not None and running.thread is not threading.current_thread() and running.thread.is_alive():
            if not was_asked:
                _log.warning("the rollout thread of %s will write the trace when its rollout ends", self._name)
            return
        # Release the profiler first: it holds much memory, and a failed stop would fail again.
        was_done, self._running, self.is_done = self.is_done, None, True
        if running is None:
            if not was_done:
                done, warmup = self._num_rollouts, self._settings.warmup_rollouts
                _log.warning("no trace of %s: it stopped after %d of %d warm-up rollouts", self._name, done, warmup)
            return
        try:
            running.profiler.stop()
            if running.thread is threading.current_thread():
                self._deliver(running)
            else:
                _log.warning("the trace of %s is lost: the thread that made the rollouts has ended", self._name)
        except Exception:
            _log.warning("the trace of %s is lost", self._name, exc_info=True)

    def _deliver(self, running: _Running) -> None:
        """Write the trace to `save_path` and call `on_trace_ready`, as the settings say."""
        template = self._settings.path_template
        if template is not None:
            path = filled(template, self._worker_idx)
            try:
                write_trace(running.profiler, path, running.process)
            except OSError as error:
                _log.warning("the trace of %s is lost: %s cannot be written (%s)", self._name, path, error)
            else:
                _log.info("the trace of %s is in %s", self._name, path)
        if self._settings.on_trace_ready is not None:
            try:
                self._settings.on_trace_ready(running.profiler)
            except Exception:  # of user code; rollouts continue
                _log.warning("the callback on_trace_ready raised; collection continues", exc_info=True)


def profiler_obstacle(activities: Sequence[ProfilerActivity] | None) -> str | None:
    """The reason why torch's profiler cannot record these activities here, or None."""
    if torch.autograd.profiler._is_profiler_enabled:
        return "a torch profiler already records in this process, which can have only one; stop that profiler first"
    if missing := sorted(activity.name for activity in set(activities or ()) - supported_activities()):
        return f"activities has {missing[0]}, which this machine cannot record; leave it out"
    return None


def started_profiler(activities: Sequence[ProfilerActivity] | None = None, **options: Any) -> profile:
    """Start torch's profiler for this thread; by default it records the CPU, and the GPU if there is one.

    Only this thread may stop the profiler: if another thread stops it and exports the trace, torch crashes the process.

    Raises:
        ConfigError: if it cannot record.
    """
    if obstacle := profiler_obstacle(activities):
        raise ConfigError(obstacle)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's library prints each start and stop
    if activities is None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    profiler = profile(activities=list(activities), **options)
    profiler.start()
    return profiler
