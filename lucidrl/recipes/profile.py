"""Which steps of a run are recorded, asked for by its settings or by the variables of `lucidrl.utils.nsys`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import field_validator, model_validator

from lucidrl.profiling import gate
from lucidrl.profiling.settings import FOLDER_VARIABLE, MEMORY_VARIABLE
from lucidrl.utils import nsys
from lucidrl.utils.config import Config

_log = logging.getLogger(__name__)

TRACES_NAME = "traces"
"""Folder of the traces, below that of the run."""
VARIABLES = (nsys.PATTERNS_VARIABLE, nsys.RANGE_VARIABLE, FOLDER_VARIABLE, MEMORY_VARIABLE, gate.VARIABLES[0])


class ProfileConfig(Config):
    """Which steps are recorded, and of whom."""

    steps: str | None = None
    """Steps whose traces are written to `traces/` of the run folder: `3:5` records the steps 3 and 4. By default what
    NRL_NSYS_PROFILE_STEP_RANGE says, which this overrules."""
    workers: str = "*"
    """Who records them: shell wildcards with commas between them, for the names `policy-0`, `policy-1`, ...,
    `generation-0`, ... and `driver`."""
    memory_snapshot: bool = False
    """Also write who held the GPU's memory; pytorch.org/memory_viz shows it."""

    @field_validator("steps", mode="before")
    @classmethod
    def _is_text(cls, steps: Any) -> Any:
        if type(steps) is int and steps >= 60:
            raise ValueError(f"{steps} is a number: YAML counts in sixties at a colon; write '3:5' with quotes")
        return steps if steps is None else str(steps)

    @field_validator("steps")
    @classmethod
    def _is_range(cls, steps: str | None) -> str | None:
        return None if steps is None else str(nsys.StepRange.parse(steps))

    @model_validator(mode="after")
    def _has_steps(self) -> ProfileConfig:
        if self.steps is None and (self.workers != "*" or self.memory_snapshot):
            raise ValueError("workers and memory_snapshot say how steps are recorded, but profile.steps is not set")
        return self


@contextmanager
def profiling_as_asked(profile: ProfileConfig) -> Iterator[None]:
    """Inside, this process and those that it starts are asked for what settings, or else variables, ask for.

    To be entered before the parts of a run are imported: per-frame ranges are there only if that is known then.

    Raises:
        ConfigError: if what the variables ask for makes no sense.
    """
    variables = {name: os.environ.get(name) for name in VARIABLES}
    asked_before = nsys.NRL_NSYS_WORKER_PATTERNS, nsys.NRL_NSYS_PROFILE_STEP_RANGE
    try:
        if profile.steps is not None:  # what else is not set is left to the variables
            patterns = asked_before[0] if "workers" not in profile.model_fields_set else ""
            nsys.set_profile_request(patterns or profile.workers, profile.steps)
            if "memory_snapshot" in profile.model_fields_set:
                os.environ[MEMORY_VARIABLE] = str(int(profile.memory_snapshot))
        if nsys.profile_request() is not None and not gate.arm():
            _log.warning(
                "ranges of single frames are missing in the traces of this process, which was at work before steps to "
                "record were asked for; set %s=1 to have them",
                gate.VARIABLES[0],
            )
        yield
    finally:
        nsys.set_profile_request(*asked_before)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def use_traces_folder(run_folder: Path) -> None:
    """Let traces go there, until `profiling_as_asked` is left.

    Raises:
        ConfigError: if they are asked for and cannot be written.
    """
    from lucidrl.profiling.trace_files import check_folder

    folder = (run_folder / TRACES_NAME).absolute()
    os.environ[FOLDER_VARIABLE] = str(folder)
    if nsys.profile_request() is not None:
        check_folder(folder, "run.root")
