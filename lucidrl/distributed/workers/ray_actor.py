"""The Ray actor that runs workers on a node: it starts them as processes of its machine, and relays calls and replies.

Everything happens in the main thread of one actor, in calls of a second at most, so that the driver can always make the
next call, and an agent that does not reply is broken. The workers end with their agent: Linux ends them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import psutil

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.interfaces import Hosting
from lucidrl.distributed.workers.local import LocalWorkers, listen_for_ranks
from lucidrl.distributed.workers.logs import LogFolder, NewOutput
from lucidrl.distributed.workers.messages import Message
from lucidrl.distributed.workers.outcomes import Exited
from lucidrl.distributed.workers.place import LOOPBACK, node_environment
from lucidrl.distributed.workers.process import leave_signals_to_driver, main_seen_as
from lucidrl.profiling.settings import FOLDER_VARIABLE, traces_folder
from lucidrl.utils import nsys
from lucidrl.utils.nsys_launch import lacks_nsys

_POLL_S = 0.5
_PASSED = re.compile(
    r"(LUCIDRL|NRL|OMP|MKL|KMP|GLOO|NCCL|TORCH|TORCHRL|TORCHINDUCTOR|PYTORCH|TRANSFORMERS|TOKENIZERS|HF|CUBLAS|NVIDIA_TF32)_\w+"
)
_SECRET = re.compile(r"KEY|TOKEN(?!IZERS_)|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)


@dataclass(frozen=True)
class DriverProgram:
    """What other machines need to run workers as the driver's machine does; secrets are not part of it."""

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
        main = spawn.get_preparation_data("rank")
        profiling = {**nsys.request_environment(), FOLDER_VARIABLE: str(traces_folder())}
        return cls(
            paths=own_paths(),
            folder=os.getcwd(),
            arguments=tuple(sys.argv),
            main_name=main.get("init_main_from_name"),
            main_file=main.get("init_main_from_path"),
            environment={**passed_variables(), **profiling},
        )

    @property
    def runtime_env(self) -> dict[str, Any]:
        """Of an actor that runs the program's modules, on any node, in the program's version of them."""
        return {"env_vars": {"PYTHONPATH": os.pathsep.join([*self.paths, "${PYTHONPATH}"])} if self.paths else {}}

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
        if self.main_name is not None:
            with suppress(ImportError, ValueError):
                if importlib.util.find_spec(self.main_name) is not None:
                    return main_seen_as(ModuleSpec(self.main_name, None), None)
        file = self.main_file
        return main_seen_as(None, file if file is not None and Path(file).exists() else None)


def own_paths() -> list[str]:
    """Entries of the search path that do not belong to the interpreter, absolute."""
    installed = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    entries = [Path(entry).resolve() for entry in sys.path if os.path.exists(entry or ".")]
    return list(dict.fromkeys(str(entry) for entry in entries if installed.isdisjoint([entry, *entry.parents])))


def passed_variables() -> dict[str, str]:
    """Variables that change what a rank computes."""
    return {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name) and not _SECRET.search(name)}


@dataclass(frozen=True)
class NodePlan:
    """What runs on a node."""

    ranks: range
    cluster: ClusterConfig
    hosting: Hosting
    """With the driver's log folder."""
    store: tuple[str, int] | None
    """Address and port of the store at which ranks meet."""
    with_gpus: bool
    logs_mark: Path | None
    """A file in the log folder: a node that sees it shares the folder."""
    traces_mark: Path | None
    """A file in the folder of traces, if workers record."""


@dataclass(frozen=True)
class NodeStart:
    """How a plan was carried out."""

    wrappers: Sequence[str]
    """The program that runs each worker, such as a profiler; empty if none does."""
    lacks_nsys: bool
    """A worker records, and Nsight Systems, which would run it, is not installed here."""
    sees_logs: bool
    """Whether the node shares the driver's log folder."""
    keeps_traces: bool
    """A worker records into a folder that the driver does not see."""


@dataclass(frozen=True)
class NodeNews:
    """What happened on a node since the last call."""

    replies: Sequence[tuple[int, Message | Exited]] = ()
    logs: Mapping[int, bytes] = field(default_factory=dict)
    """Output of workers, if the driver cannot read it itself."""
    exit_codes: Mapping[int, int | None] = field(default_factory=dict)


class NodeAgent:
    """The class of the Ray actor.

    Args:
        program: that drives the workers.
    """

    def __init__(self, program: DriverProgram):
        import ray

        leave_signals_to_driver()
        end_with_node()
        program.enter()
        nsys.take_request_from_environment()
        self._program = program
        self._node_id, self._ip = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        self._listener: socket.socket | None = None
        self._workers: LocalWorkers | None = None
        self._output = NewOutput({})
        self._temporary_dir: Path | None = None

    def node(self) -> tuple[str, str]:
        """Id and address of the node."""
        return self._node_id, self._ip

    def listen(self, ip: str) -> int:
        """Reserve a port for the store at which ranks meet, on one address of this node; returns the port."""
        self._listener = listen_for_ranks(ip)
        return self._listener.getsockname()[1]

    def start(self, plan: NodePlan) -> NodeStart:
        """Start the processes; they wait for their first call."""
        hosting, ranks = plan.hosting, plan.ranks
        if plan.logs_mark is not None and not plan.logs_mark.exists():
            self._temporary_dir = Path(tempfile.mkdtemp(prefix="lucidrl-logs-"))
            hosting = replace(hosting, log_dir=self._temporary_dir)
        logs = LogFolder(hosting.log_dir, hosting.log_name)
        if self._temporary_dir is not None:
            self._output = NewOutput({rank: logs.of_worker(hosting.number(rank)) for rank in ranks})
        with self._program.as_main() if hosting.imports_main else nullcontext():
            self._workers = LocalWorkers(ranks, plan.cluster, hosting, logs, self._environment(plan), plan.store)
        self._workers.host_store(self._listener)
        recorded = [name for name in map(hosting.profiled_name, ranks) if nsys.matches(name)]
        return NodeStart(
            wrappers=[label.wrapper for label in self._workers.labels],
            sees_logs=self._temporary_dir is None,
            lacks_nsys=any(map(lacks_nsys, recorded)),
            keeps_traces=bool(recorded) and plan.traces_mark is not None and not plan.traces_mark.exists(),
        )

    def send(self, indices: Mapping[int, Sequence[int]], *messages: Message) -> NodeNews:
        """Send each worker its messages, given as indices; these are once in the object store of this node."""
        self.call("send", {rank: [messages[index] for index in of_rank] for rank, of_rank in indices.items()})
        return NodeNews()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the node's `LocalWorkers`."""
        assert self._workers is not None
        return getattr(self._workers, method)(*args)

    def poll(self, timeout_s: float) -> NodeNews:
        """Return new replies; wait up to `timeout_s` for the first."""
        return NodeNews(self.call("poll", timeout_s), self._output.take())

    def let_end(self, timeout_s: float) -> NodeNews:
        """Let the workers shut down and exit."""
        return NodeNews(exit_codes=self.call("let_end", timeout_s), logs=self._output.take())

    def kill(self) -> NodeNews:
        """Kill the workers; returns the rest of their output."""
        if self._workers is not None:
            self._workers.kill()
        news = NodeNews(logs=self._output.take(is_last=True))
        if self._temporary_dir is not None:
            shutil.rmtree(self._temporary_dir, ignore_errors=True)
        return news

    def _environment(self, plan: NodePlan) -> dict[str, str]:
        """Variables of all workers of the node."""
        environment = dict(node_environment(self._node_id, self._ip))
        if not plan.with_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        # Where ranks reach each other; gloo by itself would take the interface that the machine's name leads to.
        ip = self._ip if plan.cluster.num_nodes > 1 else LOOPBACK
        if plan.store is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
            for name, addresses in psutil.net_if_addrs().items():
                if ip in [each.address for each in addresses]:
                    environment["GLOO_SOCKET_IFNAME"] = name
        return environment


def end_with_node() -> None:
    """Kill this process, an actor, when its node has ended.

    Ray lets such an actor work on until the rest of the cluster has noticed, and forgets it then.
    """
    node = os.getppid()

    def watch() -> None:
        while os.getppid() == node:
            time.sleep(_POLL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="node-watch", daemon=True).start()
