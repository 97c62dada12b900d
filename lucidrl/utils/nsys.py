"""GPU profiling of a range of steps, asked for by two environment variables:

    NRL_NSYS_WORKER_PATTERNS='*policy*,*generation*' NRL_NSYS_PROFILE_STEP_RANGE=3:5

Workers whose names match record the steps from `start` on and before `stop`, counted from 1. Those that Nsight Systems
runs (see `lucidrl.utils.nsys_launch`) have it capture them; others record with torch's profiler. Imports nothing heavy.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from lucidrl.errors import ConfigError

_log = logging.getLogger(__name__)

PATTERNS_VARIABLE, RANGE_VARIABLE = "NRL_NSYS_WORKER_PATTERNS", "NRL_NSYS_PROFILE_STEP_RANGE"

NRL_NSYS_WORKER_PATTERNS = os.environ.get("NRL_NSYS_WORKER_PATTERNS", "")
"""Shell wildcards for the names of workers, with commas between them; see `worker_name`."""
NRL_NSYS_PROFILE_STEP_RANGE = os.environ.get("NRL_NSYS_PROFILE_STEP_RANGE", "")
"""`start:stop`"""

POLICY, GENERATION, DRIVER = "policy", "generation", "driver"
"""Kinds of workers. The driver is the process that runs the loop; there is one."""

_RANGE = re.compile(r"\s*(\d{1,18})\s*:\s*(\d{1,18})\s*")


class ProfilablePolicy(Protocol):
    """Whatever can record itself, its workers included."""

    def start_gpu_profiling(self) -> None: ...

    def stop_gpu_profiling(self) -> None: ...


@dataclass(frozen=True)
class StepRange:
    """Steps from `start` on and before `stop`."""

    start: int
    stop: int

    @classmethod
    def parse(cls, text: str) -> StepRange:
        """Read `start:stop`.

        Raises:
            ConfigError: if it is not that, or has no steps.
        """
        found = _RANGE.fullmatch(text)
        if found is None:
            raise ConfigError(f"{text!r} is not a range of steps; write start:stop, such as 3:5 for the steps 3 and 4")
        steps = cls(int(found[1]), int(found[2]))
        if steps.start < 1:
            raise ConfigError(f"{text!r} begins at {steps.start}, but steps are counted from 1; write 1:{steps.stop}")
        if steps.start >= steps.stop:
            raise ConfigError(
                f"{text!r} has no steps, since {steps.stop} is not one of them; "
                f"write {steps.start}:{steps.start + 1} for step {steps.start} alone"
            )
        return steps

    def __contains__(self, step: int) -> bool:
        return self.start <= step < self.stop

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


@dataclass(frozen=True)
class ProfileRequest:
    """Which steps of which workers are to be recorded."""

    patterns: tuple[str, ...]
    steps: StepRange

    def matches(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


def profile_request() -> ProfileRequest | None:
    """What is asked for now, if anything is.

    Raises:
        ConfigError: for one variable without the other, or a range that is none.
    """
    patterns, steps = NRL_NSYS_WORKER_PATTERNS.strip(), NRL_NSYS_PROFILE_STEP_RANGE.strip()
    if not patterns and not steps:
        return None
    for missing, value, example in ((PATTERNS_VARIABLE, patterns, "*"), (RANGE_VARIABLE, steps, "3:5")):
        if not value:
            given = RANGE_VARIABLE if missing == PATTERNS_VARIABLE else PATTERNS_VARIABLE
            raise ConfigError(
                f"{given}={patterns or steps!r} says nothing without {missing}; set that too, such as to {example!r}, "
                "or neither"
            )
    names = tuple(filter(None, map(str.strip, patterns.split(","))))
    if not names:
        raise ConfigError(f"{PATTERNS_VARIABLE}={patterns!r} has no name in it; write patterns such as '*policy*'")
    try:
        return ProfileRequest(names, StepRange.parse(steps))
    except ConfigError as error:
        raise ConfigError(f"{RANGE_VARIABLE}: {error}") from None


def set_profile_request(patterns: str, steps: str) -> None:
    """Ask for other steps or workers, from this process and those that it starts; nothing of both asks for none."""
    global NRL_NSYS_WORKER_PATTERNS, NRL_NSYS_PROFILE_STEP_RANGE
    NRL_NSYS_WORKER_PATTERNS, NRL_NSYS_PROFILE_STEP_RANGE = patterns, steps
    os.environ.update(request_environment())


def take_request_from_environment() -> None:
    """Ask for what the variables say now; they may have been set after this module was imported."""
    set_profile_request(os.environ.get(PATTERNS_VARIABLE, ""), os.environ.get(RANGE_VARIABLE, ""))


def request_environment() -> dict[str, str]:
    """The variables that ask another process for what this one is asked for."""
    return {PATTERNS_VARIABLE: NRL_NSYS_WORKER_PATTERNS, RANGE_VARIABLE: NRL_NSYS_PROFILE_STEP_RANGE}


def worker_name(kind: str, number: int) -> str:
    """What patterns and traces call a worker, such as `policy-0`."""
    return f"{kind}-{number}"


def check_patterns(names: Sequence[str]) -> None:
    """Refuse a request that none of a run's workers is meant by.

    Raises:
        ConfigError: naming the workers that there are.
    """
    request = profile_request()
    if request is not None and not any(map(request.matches, names)):
        raise ConfigError(
            f"no worker of this run matches {','.join(request.patterns)!r}, so nothing would be recorded; "
            f"the names are {', '.join(names)}"
        )


def matches(name: str) -> bool:
    """Whether a worker of this name is to be recorded."""
    request = profile_request()
    return request is not None and request.matches(name)


def is_recorded(name: str) -> bool:
    """Whether a worker of this name records when it is told to: all do if no names were asked for."""
    return profile_request() is None or matches(name)


# By identity, because a policy need not be hashable, and nothing is left on it.
_running: dict[int, ProfilablePolicy] = {}
_done: dict[int, weakref.ref[ProfilablePolicy]] = {}
os.register_at_fork(after_in_child=_running.clear)  # what records is the parent's to stop


def maybe_gpu_profile_step(policy: ProfilablePolicy, step: int) -> None:
    """To be called at the start of each step: start to record at the first of those asked for, stop after the last.

    Both happen once for a policy. What still records when the program ends is stopped then; `end_gpu_profile` does so
    earlier, at the end of a loop. (One that Python cannot refer to weakly is forgotten when it has stopped.)

    Args:
        step: counted from 1.

    Raises:
        ConfigError: if what is asked for makes no sense; see `profile_request`.
    """
    request = profile_request()
    if request is None or step not in request.steps:
        end_gpu_profile(policy)
    elif id(policy) not in _running and not _is_done(policy):
        if not _running:
            atexit.register(_end_all)
        _running[id(policy)] = policy
        try:
            policy.start_gpu_profiling()
        except BaseException:
            _forget(policy)
            raise


def end_gpu_profile(policy: ProfilablePolicy) -> None:
    """Stop to record, if it does."""
    if id(policy) in _running:
        _forget(policy)
        policy.stop_gpu_profiling()


def _forget(policy: ProfilablePolicy) -> None:
    """It records no more, and not again."""
    del _running[id(policy)]
    if not _running:
        atexit.unregister(_end_all)
    _remember(policy)


def _remember(policy: ProfilablePolicy) -> None:
    """That it has recorded, for as long as it lives."""
    key = id(policy)
    try:
        _done[key] = weakref.ref(policy, lambda _: _done.pop(key, None))
    except TypeError:  # it has __slots__ without __weakref__: nobody would tell when another object has its place
        return


def _is_done(policy: ProfilablePolicy) -> bool:
    found = _done.get(id(policy))
    return found is not None and found() is policy


def _end_all() -> None:
    for policy in list(_running.values()):
        try:
            end_gpu_profile(policy)
        except Exception:  # the others are to be stopped too
            _log.warning("a recording could not be ended", exc_info=True)
