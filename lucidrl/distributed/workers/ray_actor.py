"""The Ray actor that runs workers on a node: it starts them as processes of its machine, and relays calls and answers.

Everything happens in the main thread of one actor, in calls of a second at most, so that the driver can always make the
next call, and an agent that does not answer is broken. The workers end with their agent: Linux ends them.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from lucidrl.distributed.workers.child import leave_signals_to_driver
from lucidrl.distributed.workers.environment import (
    DriverProgram,
    listen_for_ranks,
    rank_environment,
    threads_per_worker,
)
from lucidrl.distributed.workers.interfaces import Hosting, WorkerReport
from lucidrl.distributed.workers.local import LocalWorkers, child_settings
from lucidrl.distributed.workers.logs import LogFolder, NewOutput
from lucidrl.distributed.workers.messages import Message
from lucidrl.distributed.workers.outcomes import Exited
from lucidrl.distributed.workers.place import node_environment
from lucidrl.profiling.settings import traces_folder
from lucidrl.utils import nsys
from lucidrl.utils.nsys_launch import lacks_nsys

_POLL_S = 0.5


@dataclass(frozen=True)
class NodeFacts:
    """Where an agent is."""

    node_id: str
    ip: str


@dataclass(frozen=True)
class NodePlan:
    """What runs on a node."""

    hosting: Hosting
    """With the driver's log folder."""
    ranks: range
    world_size: int
    ip: str
    """Of the node: at which its workers talk to the others."""
    store: tuple[str, int] | None
    """Address and port of the store at which ranks meet."""
    num_threads: int | None
    """Of each worker; None for a share of the node's cores."""
    with_gpus: bool
    mark: str | None
    """Name of a file in the log folder: a node that sees it shares the folder."""
    profiling: Mapping[str, str]
    """Variables that say what to record, and into which folder."""
    traces_mark: str | None
    """Name of a file in that folder, if anything is recorded."""


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
    """What happened on a node since the last time."""

    answers: Sequence[tuple[int, Message | Exited]] = ()
    logs: Mapping[int, bytes] = field(default_factory=dict)
    """Output of workers, if the driver cannot read it itself."""
    exit_codes: Mapping[int, int | None] = field(default_factory=dict)


class NodeAgent:
    """The class of the Ray actor.

    Args:
        program: that drives the workers.
    """

    def __init__(self, program: DriverProgram):
        leave_signals_to_driver()
        end_with_node()
        program.enter()
        self._program = program
        self._listener: socket.socket | None = None
        self._workers: LocalWorkers | None = None
        self._output = NewOutput({})
        self._temporary_dir: Path | None = None

    def facts(self) -> NodeFacts:
        import ray

        return NodeFacts(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())

    def listen(self, ip: str) -> int:
        """Reserve a port for the store at which ranks meet, on one address of this node; returns the port."""
        self._listener = listen_for_ranks(ip)
        return self._listener.getsockname()[1]

    def start(self, plan: NodePlan) -> NodeStart:
        """Start the processes; they wait for their first call."""
        os.environ.update(plan.profiling)
        nsys.take_request_from_environment()
        hosting = plan.hosting
        if plan.mark is not None and not (Path(str(hosting.log_dir)) / plan.mark).exists():
            self._temporary_dir = Path(tempfile.mkdtemp(prefix="lucidrl-logs-"))
            hosting = replace(hosting, log_dir=self._temporary_dir)
        logs = LogFolder(hosting.log_dir, hosting.log_name)
        if self._temporary_dir is not None:
            self._output = NewOutput({rank: logs.of_worker(hosting.number(rank)) for rank in plan.ranks})
        num_threads = plan.num_threads or threads_per_worker(hosting.total(len(plan.ranks)))
        settings = [
            child_settings(rank, hosting, self._environment(plan, rank, num_threads), num_threads, logs)
            for rank in plan.ranks
        ]
        with self._program.as_main() if hosting.imports_main else nullcontext():
            self._workers = LocalWorkers(settings)
        if self._listener is not None:
            self._workers.host_store(self._listener)
        names = [nsys.worker_name(hosting.name, hosting.number(rank)) for rank in plan.ranks]
        recorded = [name for name in names if nsys.matches(name)]
        is_seen = plan.traces_mark is None or (traces_folder() / plan.traces_mark).exists()
        return NodeStart(
            wrappers=[label.wrapper for label in self._workers.labels],
            sees_logs=self._temporary_dir is None,
            lacks_nsys=any(map(lacks_nsys, recorded)),
            keeps_traces=bool(recorded) and not is_seen,
        )

    def send(self, indices: Mapping[int, Sequence[int]], *messages: Message) -> NodeNews:
        """Send each worker its messages, given as indices; these are once in the object store of this node."""
        assert self._workers is not None
        self._workers.send({rank: [messages[index] for index in of_rank] for rank, of_rank in indices.items()})
        return NodeNews()

    def poll(self, timeout_s: float) -> NodeNews:
        """Answers that have not been given yet; waits for one, or until the time is over."""
        assert self._workers is not None
        return NodeNews(self._workers.poll(timeout_s), self._output.take())

    def dead(self) -> dict[int, Exited]:
        assert self._workers is not None
        return self._workers.dead()

    def meet(self, pids: Sequence[int]) -> None:
        assert self._workers is not None
        self._workers.meet(pids)

    def report(self, numbers: Sequence[int], with_stacks: bool) -> dict[int, WorkerReport]:
        assert self._workers is not None
        return self._workers.report(numbers, with_stacks)

    def let_end(self, timeout_s: float) -> NodeNews:
        """Ask the workers to shut down and exit."""
        assert self._workers is not None
        return NodeNews(exit_codes=self._workers.let_end(timeout_s), logs=self._output.take())

    def kill(self) -> NodeNews:
        """End the workers; the rest of their output."""
        if self._workers is not None:
            self._workers.kill()
        news = NodeNews(logs=self._output.take(is_last=True))
        if self._temporary_dir is not None:
            shutil.rmtree(self._temporary_dir, ignore_errors=True)
        return news

    def _environment(self, plan: NodePlan, rank: int, num_threads: int) -> dict[str, str]:
        """Variables of a worker's process."""
        node = self.facts()
        environment = {"OMP_NUM_THREADS": str(num_threads), **nsys.request_environment()}
        environment |= node_environment(node.node_id, node.ip)
        if not plan.with_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        if plan.store is not None:
            local_rank, local_size = plan.ranks.index(rank), len(plan.ranks)
            environment |= rank_environment(
                rank, plan.world_size, local_rank=local_rank, local_size=local_size, store=plan.store
            )
            interface = _interface_with(plan.ip)
            if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
                environment["GLOO_SOCKET_IFNAME"] = interface  # gloo would take what the machine's name leads to
        return environment


def end_with_node(after_s: float = 0.0) -> None:
    """End this process, an actor, with its node.

    Ray lets an actor whose node is gone work on until the rest of the cluster has noticed, and forgets it then.

    Args:
        after_s: how long it may work on. What replaces an actor that ends before Ray has noticed may be sent to the
            same node, and be lost with it.
    """
    node = os.getppid()

    def watch() -> None:
        while os.getppid() == node:
            time.sleep(_POLL_S)
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="node-watch", daemon=True).start()


def _interface_with(ip: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == ip for address in addresses):
            return name
    return None
