"""Starts workers under Nsight Systems, which captures the requested steps. Imports nothing heavy."""

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
    # Capture only between a worker's start and stop; the worker continues, and nsys writes the report.
    "capture-range": "cudaProfilerApi",
    "capture-range-end": "stop",
    "force-overwrite": "true",
}
"""Options of `nsys profile`, without the output."""
_RAY_KEYS = {"trace": "t", "output": "o"}
"""Names of options for Ray, which completes the path of a report only if the option has its short name."""


def nsys_command(name: str) -> list[str]:
    """Command-line prefix that runs a worker under Nsight Systems.

    Empty if the worker is not recorded, if Nsight Systems runs the driver (and so sees the workers too), or if Nsight
    Systems is not installed (logged once).
    """
    if not _is_for_nsys(name):
        return []
    return _command(_options(name))


def warn_of_no_report(name: str) -> None:
    """Log how Nsight Systems can record a worker in this process."""
    if nsys.matches(name) and NSYS_SESSION not in os.environ and shutil.which(PROGRAM) is not None:
        command = shlex.join(_command(OPTIONS))
        _warn_once(
            f"{name} is in this process and records with torch's profiler; for Nsight Systems, start the program as "
            f"`{command} COMMAND`"
        )


def lacks_nsys(name: str) -> bool:
    """Whether Nsight Systems should run this worker but is not installed here."""
    return nsys.matches(name) and NSYS_SESSION not in os.environ and shutil.which(PROGRAM) is None


def warn_of_no_nsys(where: str = "") -> None:
    """Log that workers use torch's profiler; `where` names another machine."""
    _warn_once(
        f"no `{PROGRAM}` on PATH{where}: workers record with torch's profiler; install Nsight Systems for GPU traces"
    )


def ray_nsight_options(name: str) -> dict[str, str]:
    """`runtime_env["nsight"]` for a worker's Ray actor; empty when `nsys_command` is empty."""
    if not _is_for_nsys(name):
        return {}
    return {_RAY_KEYS.get(option, option): value for option, value in _options(name).items()}


def runtime_env_for(name: str) -> dict[str, Any]:
    """Ray runtime environment that lets an actor record like a local worker."""
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


def _command(options: dict[str, str]) -> list[str]:
    return [PROGRAM, "profile", *(f"--{option}={value}" for option, value in options.items())]


def _options(name: str) -> dict[str, str]:
    folder = str(traces_folder()).replace("%", "%%")  # nsys expands %h and %p
    return {**OPTIONS, "output": f"{folder}/{name}_%h_%p"}


@functools.cache
def _warn_once(sentence: str) -> None:
    """Warn once per process: the warning concerns all workers of a run."""
    _log.warning("%s", sentence)
