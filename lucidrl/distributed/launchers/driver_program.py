"""The program that drives ranks, as its ranks on other machines need it.

Processes of this machine inherit all of it. Elsewhere it has to be told: where its own modules are, which module is the
main one, and those variables that change what a rank computes. Secrets are not among them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from lucidrl.distributed.child_process import main_seen_as

_PASSED = re.compile(
    r"(LUCIDRL|NRL|OMP|MKL|KMP|GLOO|NCCL|TORCH|TORCHRL|TORCHINDUCTOR|PYTORCH|TRANSFORMERS|TOKENIZERS|HF|CUBLAS|NVIDIA_TF32)_\w+"
)
_SECRET = re.compile(r"KEY|TOKEN(?!IZERS_)|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)


@dataclass(frozen=True)
class DriverProgram:
    """What is told."""

    paths: Sequence[str]
    """Where Python looks for the program's own modules: its search path without what was installed."""
    folder: str
    """Its working directory, for relative paths."""
    arguments: Sequence[str]
    main_name: str | None
    """The main module, if it was started as `python -m`."""
    main_file: str | None
    """Its file otherwise; None in a notebook."""
    environment: Mapping[str, str]

    @classmethod
    def of_this_process(cls) -> DriverProgram:
        # Refuses to go on while the main module is being imported by a rank: the program lacks the usual guard.
        told = spawn.get_preparation_data("rank")
        return cls(
            paths=own_paths(),
            folder=os.getcwd(),
            arguments=tuple(sys.argv),
            main_name=told.get("init_main_from_name"),
            main_file=told.get("init_main_from_path"),
            environment=passed_variables(),
        )

    @property
    def runtime_env(self) -> dict[str, Any]:
        """What Ray has to know to start an actor that runs the program's modules, on any node."""
        return {"env_vars": search_path_variable(self.paths)}

    def enter(self) -> None:
        """Make this process, and those that it starts, see modules, files and variables as the program does."""
        sys.path[:0] = [path for path in self.paths if path not in sys.path]
        sys.argv = list(self.arguments)
        with suppress(OSError):  # not on this machine
            os.chdir(self.folder)
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it, for all processes of a node together
        os.environ.update(self.environment)

    def as_main(self) -> AbstractContextManager[None]:
        """Processes that are started meanwhile import the program's main module, if it is on this machine."""
        if self.main_name is not None and _is_here(self.main_name):
            return main_seen_as(ModuleSpec(self.main_name, None), None)
        file = self.main_file
        return main_seen_as(None, file if file is not None and Path(file).exists() else None)


def own_paths() -> list[str]:
    """Entries of the search path that do not belong to the interpreter, absolute."""
    installed = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    entries = [Path(entry).resolve() for entry in sys.path if os.path.exists(entry or ".")]
    return list(dict.fromkeys(str(entry) for entry in entries if installed.isdisjoint([entry, *entry.parents])))


def search_path_variable(paths: Sequence[str]) -> dict[str, str]:
    """For a process of Ray's: it finds the program's modules before those of its node, so that all run one version."""
    return {"PYTHONPATH": os.pathsep.join([*paths, "${PYTHONPATH}"])} if paths else {}


def passed_variables() -> dict[str, str]:
    """Variables that change what a rank computes."""
    return {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name) and not _SECRET.search(name)}


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
