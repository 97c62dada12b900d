"""Select the steps to profile, from the settings or else from the environment variables of `lucidrl.utils.nsys`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import field_validator, model_validator

from lucidrl.profiling import gate
from lucidrl.profiling.settings import FOLDER_VARIABLE, MEMORY_VARIABLE
from lucidrl.report.timeline import write_timeline
from lucidrl.utils import nsys
from lucidrl.utils.config import Config
from lucidrl.utils.run_folder import TRACES_NAME

_log = logging.getLogger(__name__)

VARIABLES = (nsys.PATTERNS_VARIABLE, nsys.RANGE_VARIABLE, FOLDER_VARIABLE, MEMORY_VARIABLE, gate.VARIABLES[0])


class ProfileConfig(Config):
    """Which steps are profiled, in which processes."""

    steps: str | None = None
    """Steps to profile, as start:stop; `3:5` writes traces of steps 3 and 4 to `traces/` in the run folder, and merges
    them into `traces/timeline.json.gz` when the run ends. Default: the environment variable
    NRL_NSYS_PROFILE_STEP_RANGE."""
    workers: str = "*"
    """Processes to profile: comma-separated shell patterns for the names `policy-0`, `policy-1`, ...,
    `generation-0`, ..., `env-0`, ... and `driver`."""
    memory_snapshot: bool = False
    """Also write a snapshot of GPU memory by allocation; pytorch.org/memory_viz shows it."""

    @field_validator("steps", mode="before")
    @classmethod
    def _is_text(cls, steps: Any) -> Any:
        if type(steps) is int and steps >= 60:
            raise ValueError(f"{steps} is a number: YAML reads 3:5 without quotes in base 60; write '3:5' with quotes")
        return steps if steps is None else str(steps)

    @field_validator("steps")
    @classmethod
    def _is_range(cls, steps: str | None) -> str | None:
        return None if steps is None else str(nsys.StepRange.parse(steps))

    @model_validator(mode="after")
    def _has_steps(self) -> ProfileConfig:
        if self.steps is None and (self.workers != "*" or self.memory_snapshot):
            raise ValueError("workers and memory_snapshot need steps; set profile.steps too, such as profile.steps=3:5")
        return self


@contextmanager
def profiling_as_configured(profile: ProfileConfig) -> Iterator[None]:
    """Context manager: request profiles of this process and its children.

    The settings take precedence over the environment variables of `lucidrl.utils.nsys`.

    Enter it before importing the modules of a run: an import decides whether per-frame ranges are recorded.

    Raises:
        ConfigError: the environment variables are invalid.
    """
    variables = {name: os.environ.get(name) for name in VARIABLES}
    previous_request = nsys.NRL_NSYS_WORKER_PATTERNS, nsys.NRL_NSYS_PROFILE_STEP_RANGE
    try:
        if profile.steps is not None:  # settings that are not set keep the values of the variables
            patterns = previous_request[0] if "workers" not in profile.model_fields_set else ""
            nsys.set_profile_request(patterns or profile.workers, profile.steps)
            if "memory_snapshot" in profile.model_fields_set:
                os.environ[MEMORY_VARIABLE] = str(int(profile.memory_snapshot))
        if nsys.profile_request() is not None and not gate.arm():
            _log.warning(
                "the traces of this process have no ranges per environment frame, because lucidrl was imported before "
                "the profile was requested; to record them, set %s=1 before you start Python",
                gate.VARIABLES[0],
            )
        yield
    finally:
        nsys.set_profile_request(*previous_request)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def use_traces_folder(run_folder: Path) -> None:
    """Write traces below the run folder until `profiling_as_configured` exits.

    Raises:
        ConfigError: traces are requested and cannot be written.
    """
    from lucidrl.profiling.trace_files import check_folder

    folder = (run_folder / TRACES_NAME).absolute()
    os.environ[FOLDER_VARIABLE] = str(folder)
    if nsys.profile_request() is not None:
        check_folder(folder, "run.root")


@contextmanager
def timeline_at_end(run_folder: Path, announce: Callable[[str], None]) -> Iterator[None]:
    """Context manager: merge the traces of the run when it ends, even by an error, if a profile is requested."""
    try:
        yield
    finally:
        if nsys.profile_request() is not None:
            try:
                sentences = write_timeline(run_folder).described()
            except Exception as error:  # must not hide an error of the run
                sentences = [f"the run has no timeline: {error}"]
            for sentence in sentences:
                announce(sentence)
                _log.info("%s", sentence)
