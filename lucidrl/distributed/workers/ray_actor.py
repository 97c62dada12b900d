"""`NodeAgent`: the Ray actor that starts the workers of a node as local processes and relays calls and replies.

Everything runs in the actor's main thread, in calls of a second at most, so an agent that does not reply is broken.
Linux kills the workers when their agent exits.
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

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.interfaces import Hosting
from lucidrl.distributed.workers.local import LocalWorkers, listen_for_ranks
from lucidrl.distributed.workers.logs import LogFolder, NewOutput
from lucidrl.distributed.workers.messages import Message
from lucidrl.distributed.workers.outcomes import Exited
from lucidrl.distributed.workers.place import LOOPBACK, interface_of, node_environment
from lucidrl.distributed.workers.process import leave_signals_to_driver, main_seen_as
from lucidrl.profiling.clock import now_ns
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
    """The driver's modules, main module and variables, for workers on other machines; without secrets."""

    paths: Sequence[str]
    """The module search path without installed packages."""
    folder: str
    """The working directory, for relative paths."""
    arguments: Sequence[str]
    main_name: str | None
    """The main module, if it was started as `python -m`."""
    main_file: str | None
    """The file of the main module otherwise; None in a notebook."""
    environment: Mapping[str, str]

    @classmethod
    def of_this_process(cls) -> DriverProgram:
        # This raises in a rank that imports the main module of a program without `if __name__ == "__main__":`.
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
        """Ray's `runtime_env` of an actor that imports the driver's version of the modules, on any node."""
        return {"env_vars": {"PYTHONPATH": os.pathsep.join([*self.paths, "${PYTHONPATH}"])} if self.paths else {}}

    def enter(self) -> None:
        """Give this process and its children the modules, working directory and variables of the driver."""
        sys.path[:0] = [path for path in self.paths if path not in sys.path]
        sys.argv = list(self.arguments)
        with suppress(OSError):  # this machine does not have the folder
            os.chdir(self.folder)
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it for all processes of a node
        os.environ.update(self.environment)

    def as_main(self) -> AbstractContextManager[None]:
        """Context manager: new processes inside it import the driver's main module, if it exists on this machine."""
        if self.main_name is not None:
            with suppress(ImportError, ValueError):
                if importlib.util.find_spec(self.main_name) is not None:
                    return main_seen_as(ModuleSpec(self.main_name, None), None)
        file = self.main_file
        return main_seen_as(None, file if file is not None and Path(file).exists() else None)


def own_paths() -> list[str]:
    """Absolute entries of the search path that do not belong to the interpreter."""
    installed = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    entries = [Path(entry).resolve() for entry in sys.path if os.path.exists(entry or ".")]
    return list(dict.fromkeys(str(entry) for entry in entries if installed.isdisjoint([entry, *entry.parents])))


def passed_variables() -> dict[str, str]:
    """Environment variables to pass on to Ray actors, since they affect what a rank computes."""
    return {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name) and not _SECRET.search(name)}


@dataclass(frozen=True)
class NodePlan:
    """The workers to start on a node."""

    ranks: range
    cluster: ClusterConfig
    hosting: Hosting
    """Settings of the processes; `log_dir` is the driver's log folder."""
    store: tuple[str, int] | None
    """Address and port of the store for the rendezvous of the ranks."""
    with_gpus: bool
    logs_mark: Path | None
    """A file in the log folder: a node that sees the file shares the folder with the driver."""
    traces_mark: Path | None
    """The same for the folder of traces, if workers record."""


@dataclass(frozen=True)
class NodeStart:
    """What a node reports after starting the workers of its `NodePlan`."""

    wrappers: Sequence[str]
    """The program that runs each worker, such as a profiler; empty strings without one."""
    lacks_nsys: bool
    """Whether a worker should run under Nsight Systems, which is not installed here."""
    sees_logs: bool
    """Whether the node shares the driver's log folder."""
    keeps_traces: bool
    """Whether a worker writes traces into a folder that the driver does not see."""


@dataclass(frozen=True)
class NodeNews:
    """Replies, output and exits of the workers on a node since the driver last polled the node."""

    replies: Sequence[tuple[int, Message | Exited]] = ()
    logs: Mapping[int, bytes] = field(default_factory=dict)
    """New output of workers, if the driver does not see their log files."""
    exit_codes: Mapping[int, int | None] = field(default_factory=dict)


class NodeAgent:
    """The Ray actor of a node.

    Args:
        program: the program of the driver.
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

    def clock(self) -> int:
        """The clock of this process; see `lucidrl.profiling.clock`."""
        return now_ns()

    def listen(self, ip: str) -> int:
        """Reserve a port for the rendezvous store at one address of this node; returns the port."""
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
        """Send each rank the messages at its `indices`; so this node gets each message once, even if ranks share it."""
        self.call("send", {rank: [messages[index] for index in of_rank] for rank, of_rank in indices.items()})
        return NodeNews()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the node's `LocalWorkers`."""
        assert self._workers is not None
        return getattr(self._workers, method)(*args)

    def poll(self, timeout_s: float) -> NodeNews:
        """Return new replies; wait up to `timeout_s` for the first."""
        return NodeNews(self.call("poll", timeout_s), self._output.take())

    def shutdown(self, timeout_s: float) -> NodeNews:
        """Let the workers shut down and exit."""
        return NodeNews(exit_codes=self.call("shutdown", timeout_s), logs=self._output.take())

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
        # Without the variable, gloo uses the interface that the machine's name resolves to.
        ip = self._ip if plan.cluster.num_nodes > 1 else LOOPBACK
        if plan.store is not None and "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_of(ip)):
            environment["GLOO_SOCKET_IFNAME"] = name
        return environment


def end_with_node() -> None:
    """Kill this actor process when its Ray node exits; Ray itself would wait until it reports the node dead."""
    node = os.getppid()

    def watch() -> None:
        while os.getppid() == node:
            time.sleep(_POLL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="node-watch", daemon=True).start()
