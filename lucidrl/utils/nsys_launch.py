"""Starts workers under Nsight Systems, so that it captures the steps that they are told to record.

Imports nothing heavy.
"""

from __future__ import annotations

import functools
import logging
import os
import shlex
import shutil
from typing import Any

from lucidrl.profiling.gate import armed_environment
from lucidrl.profiling.settings import (
    FOLDER_VARIABLE,
    MEMORY_VARIABLE,
    NSYS_SESSION,
    traces_folder,
    wants_memory_snapshot,
)
from lucidrl.utils import nsys

_log = logging.getLogger(__name__)

PROGRAM = "nsys"
OPTIONS = {
    "trace": "cuda,cudnn,cublas,nvtx",
    "sample": "none",
    "cpuctxsw": "none",
    "cuda-graph-trace": "node",
    # Only what is between a worker's start and stop; it runs on after that, and then the report is written.
    "capture-range": "cudaProfilerApi",
    "capture-range-end": "stop",
    "force-overwrite": "true",
}
"""Of `nsys profile`, beside the output."""
_RAY_KEYS = {"trace": "t", "output": "o"}
"""Ray completes the path of a report under its short name alone."""


def nsys_command(name: str) -> list[str]:
    """Words before the command of a worker that make Nsight Systems run it; none if it runs as it is.

    That is so for names that are not to be recorded, where the driver is run by Nsight Systems already, which then sees
    its workers too, and where there is no such program, which is said once.
    """
    if not _is_for_nsys(name):
        return []
    return [PROGRAM, "profile", *(f"--{option}={value}" for option, value in _options(name).items())]


def warn_of_no_report(name: str) -> None:
    """Say how Nsight Systems can record a worker that is part of this process."""
    if nsys.matches(name) and NSYS_SESSION not in os.environ and shutil.which(PROGRAM) is not None:
        command = shlex.join([PROGRAM, "profile", *(f"--{option}={value}" for option, value in OPTIONS.items())])
        _say(
            f"{name} is part of this process, which Nsight Systems did not start, and records with torch's profiler; "
            f"run the whole command under it instead: {command} COMMAND"
        )


def lacks_nsys(name: str) -> bool:
    """Whether Nsight Systems would run a worker of this name, if it were on this machine."""
    return nsys.matches(name) and NSYS_SESSION not in os.environ and shutil.which(PROGRAM) is None


def warn_of_no_nsys(where: str = "") -> None:
    """Say what that means.

    Args:
        where: the machine, if it is another one.
    """
    _say(
        f"there is no `{PROGRAM}` on PATH{where}, so workers record with torch's profiler; "
        "install Nsight Systems for more"
    )


def ray_nsight_options(name: str) -> dict[str, str]:
    """What `runtime_env["nsight"]` of a worker's Ray actor has to be; nothing if it runs as it is."""
    if not _is_for_nsys(name):
        return {}
    return {_RAY_KEYS.get(option, option): value for option, value in _options(name).items()}


def runtime_env_for(name: str) -> dict[str, Any]:
    """What the Ray runtime environment of an actor has to have for it to record as a worker of this machine would."""
    variables = armed_environment()
    if nsys.profile_request() is not None:
        variables |= {FOLDER_VARIABLE: str(traces_folder()), **nsys.request_environment()}
        variables[MEMORY_VARIABLE] = str(int(wants_memory_snapshot()))
    options = ray_nsight_options(name)
    return {**({"env_vars": variables} if variables else {}), **({"nsight": options} if options else {})}


def _is_for_nsys(name: str) -> bool:
    if lacks_nsys(name):
        warn_of_no_nsys()
        return False
    return nsys.matches(name) and NSYS_SESSION not in os.environ


def _options(name: str) -> dict[str, str]:
    folder = str(traces_folder()).replace("%", "%%")  # which begins what nsys fills in
    return {**OPTIONS, "output": f"{folder}/{name}_%h_%p"}


@functools.cache
def _say(sentence: str) -> None:
    """Once in a process: all workers of a run meet the same."""
    _log.warning("%s", sentence)
