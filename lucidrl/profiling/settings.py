"""What the environment says about recordings: read here alone, when one begins. Imports nothing heavy."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER_VARIABLE = "LUCIDRL_PROFILE_DIR"
"""Folder of all traces; by default `traces` in the current one."""
MEMORY_VARIABLE = "LUCIDRL_PROFILE_MEMORY"
"""1 asks for a snapshot of the GPU's memory beside each trace."""

NSYS_SESSION = "NSYS_PROFILING_SESSION_ID"
"""Nsight Systems sets it for what it runs."""


def traces_folder() -> Path:
    return Path(os.environ.get(FOLDER_VARIABLE) or "traces").absolute()


def wants_memory_snapshot() -> bool:
    return os.environ.get(MEMORY_VARIABLE) == "1"
