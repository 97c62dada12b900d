"""What surrounds a worker's process: the program that drives it, torchrun's variables and store, its threads.

Processes of this machine inherit the program. Other machines get where its own modules are, which module is the main
one, and those variables that change what a worker computes. Secrets are not among them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from multiprocessing import spawn
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lucidrl.distributed.workers.process import main_seen_as, num_cores

if TYPE_CHECKING:
    from torch.distributed import TCPStore

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


def listen_for_ranks(ip: str) -> socket.socket:
    """A socket for the store of ranks: on one address of this machine, at a free port, from now on.

    No other program can take the port before the ranks start, and groups that start at once cannot mix.
    """
    return socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET)


def host_store(listener: socket.socket) -> TCPStore:
    """The store, at the listener's address; it ends with the object."""
    from torch.distributed import TCPStore

    ip, port = listener.getsockname()[:2]
    return TCPStore(ip, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def rank_environment(
    rank: int, world_size: int, *, local_rank: int, local_size: int, store: tuple[str, int]
) -> dict[str, str]:
    """Variables of a rank, as torchrun sets them.

    Args:
        rank, world_size: among all ranks.
        local_rank, local_size: among those of its machine.
        store: address and port of the store.
    """
    ip, port = store
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": ip,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # tells torch that the store is there, and rank 0 need not host it
    }


def threads_per_worker(num_workers: int) -> int:
    """What OMP_NUM_THREADS says or, unset, an equal share of the cores that this process may use."""
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # OpenMP takes a list, one number a nesting level
    if told.isdigit() and int(told) > 0:
        return int(told)
    return max(1, num_cores() // num_workers)
