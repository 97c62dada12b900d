"""Environment variables of profiling, read only here, when a recording starts. Imports nothing heavy."""

from __future__ import annotations

import os
from pathlib import Path

KEY = "lucidrl"
"""Key of our metadata in a trace."""
FOLDER_VARIABLE = "LUCIDRL_PROFILE_DIR"
"""Folder of all traces; by default `traces` in the working directory."""
MEMORY_VARIABLE = "LUCIDRL_PROFILE_MEMORY"
"""1 requests a snapshot of the GPU's memory with each trace."""

NSYS_SESSION = "NSYS_PROFILING_SESSION_ID"
"""Variable that Nsight Systems sets for the processes that it runs."""


def traces_folder() -> Path:
    return Path(os.environ.get(FOLDER_VARIABLE) or "traces").absolute()


def set_traces_folder(folder: Path) -> None:
    """Let this process and its children write traces to another folder."""
    os.environ[FOLDER_VARIABLE] = str(folder)


def wants_memory_snapshot() -> bool:
    return os.environ.get(MEMORY_VARIABLE) == "1"
