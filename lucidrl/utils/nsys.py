"""GPU profiling of a range of steps, requested by two environment variables:

    NRL_NSYS_WORKER_PATTERNS='*policy*,*generation*' NRL_NSYS_PROFILE_STEP_RANGE=3:5

Workers with matching names record the steps `start` to `stop` - 1, counted from 1. Nsight Systems captures the workers
that it runs (see `lucidrl.utils.nsys_launch`); other workers use torch's profiler. Imports nothing heavy.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from lucidrl.errors import ConfigError

_log = logging.getLogger(__name__)

PATTERNS_VARIABLE, RANGE_VARIABLE = "NRL_NSYS_WORKER_PATTERNS", "NRL_NSYS_PROFILE_STEP_RANGE"

NRL_NSYS_WORKER_PATTERNS = os.environ.get("NRL_NSYS_WORKER_PATTERNS", "")
"""Shell wildcards for worker names, separated by commas; see `worker_name`."""
NRL_NSYS_PROFILE_STEP_RANGE = os.environ.get("NRL_NSYS_PROFILE_STEP_RANGE", "")
"""`start:stop`: the first step to record, and the first step after the recording."""

POLICY, TEACHER, GENERATION = "policy", "teacher", "generation"
ENV, COLLECTOR, DRIVER = "env", "collector_worker", "driver"
"""Kinds of workers. The driver is the process that runs the loop."""

_RANGE = re.compile(r"\s*(\d{1,18})\s*:\s*(\d{1,18})\s*")


class ProfilablePolicy(Protocol):
    """A policy that can record itself and its workers."""

    def start_gpu_profiling(self) -> None: ...

    def stop_gpu_profiling(self) -> None: ...


@dataclass(frozen=True)
class StepRange:
    """Steps from `start`, included, to `stop`, excluded."""

    start: int
    stop: int

    @classmethod
    def parse(cls, text: str) -> StepRange:
        """Read `start:stop`; ConfigError if it is malformed or empty."""
        found = _RANGE.fullmatch(text)
        if found is None:
            raise ConfigError(f"{text!r} is not a range of steps; write start:stop, such as 3:5 for the steps 3 and 4")
        steps = cls(int(found[1]), int(found[2]))
        if steps.start < 1:
            raise ConfigError(f"{text!r} begins at {steps.start}, but steps count from 1; write 1:{steps.stop}")
        if steps.start >= steps.stop:
            raise ConfigError(f"{text!r} has no steps; write {steps.start}:{steps.start + 1} for step {steps.start}")
        return steps

    def __contains__(self, step: int) -> bool:
        return self.start <= step < self.stop

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


@dataclass(frozen=True)
class ProfileRequest:
    """Which steps of which workers to record."""

    patterns: tuple[str, ...]
    steps: StepRange

    def matches(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


def profile_request() -> ProfileRequest | None:
    """The current request, if any.

    Raises:
        ConfigError: for one variable without the other, or an invalid range.
    """
    patterns, steps = NRL_NSYS_WORKER_PATTERNS.strip(), NRL_NSYS_PROFILE_STEP_RANGE.strip()
    if not patterns and not steps:
        return None
    if not patterns:
        raise ConfigError(f"{RANGE_VARIABLE}={steps!r} needs {PATTERNS_VARIABLE} too, such as '*'; set both or neither")
    if not steps:
        raise ConfigError(
            f"{PATTERNS_VARIABLE}={patterns!r} needs {RANGE_VARIABLE} too, such as 3:5; set both or neither"
        )
    names = tuple(filter(None, map(str.strip, patterns.split(","))))
    if not names:
        raise ConfigError(f"{PATTERNS_VARIABLE}={patterns!r} has no pattern; write patterns such as '*policy*'")
    try:
        return ProfileRequest(names, StepRange.parse(steps))
    except ConfigError as error:
        raise ConfigError(f"{RANGE_VARIABLE}: {error}") from None


def set_profile_request(patterns: str, steps: str) -> None:
    """Replace the profile request of this process and of processes that it starts; two empty strings remove it."""
    global NRL_NSYS_WORKER_PATTERNS, NRL_NSYS_PROFILE_STEP_RANGE
    NRL_NSYS_WORKER_PATTERNS, NRL_NSYS_PROFILE_STEP_RANGE = patterns, steps
    os.environ.update(request_environment())


def take_request_from_environment() -> None:
    """Read the variables again; they may have been set after this module was imported."""
    set_profile_request(os.environ.get(PATTERNS_VARIABLE, ""), os.environ.get(RANGE_VARIABLE, ""))


def request_environment() -> dict[str, str]:
    """The variables that give another process the same request."""
    return {PATTERNS_VARIABLE: NRL_NSYS_WORKER_PATTERNS, RANGE_VARIABLE: NRL_NSYS_PROFILE_STEP_RANGE}


def worker_name(kind: str, number: int) -> str:
    """Name of a worker in patterns and traces, such as `policy-0`."""
    return f"{kind}-{number}"


def check_patterns(names: Sequence[str]) -> None:
    """Raise ConfigError if the patterns of the profile request match none of the run's workers `names`."""
    request = profile_request()
    if request is not None and not any(map(request.matches, names)):
        raise ConfigError(
            f"no worker of this run matches {','.join(request.patterns)!r}; use a pattern that matches one of these: "
            f"{', '.join(names)}"
        )


def matches(name: str) -> bool:
    """Whether the profile request selects this worker."""
    request = profile_request()
    return request is not None and request.matches(name)


def is_recorded(name: str) -> bool:
    """Whether `start_gpu_profiling` records a worker of this name; without a profile request, it records all."""
    return profile_request() is None or matches(name)


# By id: a policy need not be hashable, and no attribute is set on it.
_running: dict[int, ProfilablePolicy] = {}
_done: set[int] = set()
os.register_at_fork(after_in_child=_running.clear)  # only the parent may stop them


def maybe_gpu_profile_step(policy: ProfilablePolicy, step: int) -> None:
    """Start recording at the first requested step, stop after the last; call it at the start of each step.

    A policy is recorded only once. A recording that still runs when the program exits is stopped then;
    `end_gpu_profile` stops it earlier.

    Args:
        step: counted from 1.

    Raises:
        ConfigError: for an invalid request; see `profile_request`.
    """
    request = profile_request()
    if request is None or step not in request.steps:
        end_gpu_profile(policy)
    elif id(policy) not in _running and id(policy) not in _done:
        atexit.unregister(_end_all)
        atexit.register(_end_all)  # runs before exit hooks registered earlier, such as those of workers
        _running[id(policy)] = policy
        try:
            policy.start_gpu_profiling()
        except BaseException:
            _mark_done(policy)
            raise


def end_gpu_profile(policy: ProfilablePolicy) -> None:
    """Stop the recording of this policy, if one runs."""
    if id(policy) in _running:
        _mark_done(policy)
        policy.stop_gpu_profiling()


def _mark_done(policy: ProfilablePolicy) -> None:
    """Do not record this policy again, as long as it lives."""
    del _running[id(policy)]
    with suppress(TypeError):  # no weak references to it: another object may get its id, so forget it
        weakref.finalize(policy, _done.discard, id(policy))
        _done.add(id(policy))


def _end_all() -> None:
    for policy in list(_running.values()):
        try:
            end_gpu_profile(policy)
        except Exception:  # stop the others too
            _log.warning("a recording could not be stopped", exc_info=True)
