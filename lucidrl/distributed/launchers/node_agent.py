"""What runs on each node of a Ray cluster: it starts the ranks there as the local launcher does, and relays.

Everything is done in the main thread of one actor, in calls of a second at most, so that the driver can always ask the
next thing, and an agent that does not answer is out of order. The ranks end with it: Linux sees to that.
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
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from lucidrl.distributed.launchers.driver_program import DriverProgram
from lucidrl.distributed.launchers.interfaces import Part, RankReport
from lucidrl.distributed.launchers.log_copies import NewOutput
from lucidrl.distributed.launchers.messages import Message
from lucidrl.distributed.launchers.rank_environment import (
    listen_for_ranks,
    rank_environment,
    threads_of_a_rank,
)
from lucidrl.distributed.launchers.rank_main import RankSettings
from lucidrl.distributed.launchers.rank_process import Died
from lucidrl.distributed.launchers.rank_set import RankSet
from lucidrl.distributed.place import node_environment
from lucidrl.profiling.settings import traces_folder
from lucidrl.utils import nsys
from lucidrl.utils.nsys_launch import lacks_nsys, nsys_command

_POLL_S = 0.5


@dataclass(frozen=True)
class NodeFacts:
    """Where an agent is."""

    node_id: str
    ip: str


@dataclass(frozen=True)
class NodePlan:
    """What runs on a node."""

    role: str
    name: str
    """What profiling calls the workers, with their rank behind it."""
    part: Part
    ranks: range
    world_size: int
    ip: str
    """Of the node: at which its ranks talk to the others."""
    store: tuple[str, int]
    """Address and port."""
    num_threads: int | None
    """Of each rank; None for a share of the node's cores."""
    with_gpus: bool
    log_dir: Path
    """Where the driver wants the logs."""
    mark: str
    """Name of a file there: a node that sees it has the same folder."""
    profiling: Mapping[str, str]
    """Variables that say what is to be recorded, and into which folder."""
    traces_mark: str | None
    """Name of a file in that folder, if anything is to be recorded."""


@dataclass(frozen=True)
class NodeStart:
    """What became of a plan."""

    wrappers: Sequence[str]
    """The program that runs each rank, if it is not run as it is."""
    lacks_nsys: bool
    """A rank records, and Nsight Systems, which would run it, is not here."""
    sees_logs: bool
    """Ranks write their logs where the driver wants them, and whatever else into the same file system."""
    keeps_traces: bool
    """A rank records, and the driver does not see into what."""


@dataclass(frozen=True)
class NodeNews:
    """What happened on a node since the last time."""

    answers: Sequence[tuple[int, Message | Died]] = ()
    logs: Mapping[int, bytes] = field(default_factory=dict)
    """What ranks wrote, if the driver cannot read it itself."""
    exit_codes: Mapping[int, int | None] = field(default_factory=dict)


class NodeAgent:
    """The class of the Ray actor.

    Args:
        program: that drives the ranks.
    """

    def __init__(self, program: DriverProgram):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the driver decides
        end_with_node()
        program.enter()
        self._program = program
        self._listener: socket.socket | None = None
        self._ranks: RankSet | None = None
        self._output = NewOutput({})
        self._temporary_dir: Path | None = None

    def facts(self) -> NodeFacts:
        import ray

        return NodeFacts(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())

    def listen(self, ip: str) -> int:
        """Host the store of the ranks, on one address of this node; returns the port."""
        self._listener = listen_for_ranks(ip)
        return self._listener.getsockname()[1]

    def start(self, plan: NodePlan) -> NodeStart:
        """Start the processes; they wait for their first message."""
        os.environ.update(plan.profiling)
        nsys.take_request_from_environment()
        log_dir = plan.log_dir
        if not (log_dir / plan.mark).exists():
            log_dir = self._temporary_dir = Path(tempfile.mkdtemp(prefix="lucidrl-logs-"))
            self._output = NewOutput({rank: _log_path(plan, rank, log_dir) for rank in plan.ranks})
        node = self.facts()
        settings = [_settings(plan, local_rank, log_dir, node) for local_rank in range(len(plan.ranks))]
        with self._program.as_main():
            self._ranks = RankSet(settings, self._listener)
        recorded = [name for rank in plan.ranks if nsys.matches(name := _worker_name(plan, rank))]
        is_seen = plan.traces_mark is None or (traces_folder() / plan.traces_mark).exists()
        return NodeStart(
            wrappers=[label.wrapper for label in self._ranks.labels],
            sees_logs=self._temporary_dir is None,
            lacks_nsys=any(map(lacks_nsys, recorded)),
            keeps_traces=bool(recorded) and not is_seen,
        )

    def send(self, ranks: Sequence[Sequence[int]], *messages: Message) -> NodeNews:
        """Give each message to its ranks; they read it from this node's object store, where it is once."""
        assert self._ranks is not None
        self._ranks.send({rank: message for of_one, message in zip(ranks, messages, strict=True) for rank in of_one})
        return NodeNews()

    def poll(self, timeout_s: float) -> NodeNews:
        """Answers that have not been given yet; waits for one, or until the time is over."""
        assert self._ranks is not None
        return NodeNews(self._ranks.poll(timeout_s), self._output.take())

    def dead(self) -> dict[int, Died]:
        assert self._ranks is not None
        return self._ranks.dead()

    def meet(self, pids: Sequence[int]) -> None:
        assert self._ranks is not None
        self._ranks.meet(pids)

    def report(self, numbers: Sequence[int], with_stacks: bool) -> dict[int, RankReport]:
        assert self._ranks is not None
        return self._ranks.report(numbers, with_stacks)

    def let_end(self, timeout_s: float) -> NodeNews:
        """Ask the ranks to shut down and leave."""
        assert self._ranks is not None
        return NodeNews(exit_codes=self._ranks.let_end(timeout_s), logs=self._output.take())

    def kill(self) -> NodeNews:
        """End the ranks; the rest of what they wrote."""
        if self._ranks is not None:
            self._ranks.kill()
        news = NodeNews(logs=self._output.take(is_last=True))
        if self._temporary_dir is not None:
            shutil.rmtree(self._temporary_dir, ignore_errors=True)
        return news


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


def _settings(plan: NodePlan, local_rank: int, log_dir: Path, node: NodeFacts) -> RankSettings:
    rank, local_size = plan.ranks[local_rank], len(plan.ranks)
    num_threads = plan.num_threads or threads_of_a_rank(plan.part.total or local_size)
    environment = rank_environment(
        rank,
        plan.world_size,
        local_rank=local_rank,
        local_size=local_size,
        store=plan.store,
        num_threads=num_threads,
    )
    environment |= node_environment(node.node_id, node.ip)
    if not plan.with_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    interface = _interface_with(plan.ip)
    if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        environment["GLOO_SOCKET_IFNAME"] = interface  # gloo would take what the machine's name leads to
    wrapper = nsys_command(_worker_name(plan, rank))
    return RankSettings(
        rank,
        plan.role,
        environment | nsys.request_environment(),
        num_threads,
        _log_path(plan, rank, log_dir),
        # What wraps a rank may start it from any thread of its own.
        die_with_starting_thread=threading.current_thread() is threading.main_thread() and not wrapper,
        part=plan.part,
        wrapper=wrapper,
    )


def _worker_name(plan: NodePlan, rank: int) -> str:
    return nsys.worker_name(plan.name, plan.part.first + rank)


def _log_path(plan: NodePlan, rank: int, log_dir: Path) -> Path:
    return log_dir / f"rank_{plan.part.first + rank}.log"


def _interface_with(ip: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == ip for address in addresses):
            return name
    return None
