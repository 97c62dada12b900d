"""What a worker is, how its process is set up, and what errors say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from lucidrl.utils.nsys import worker_name

StartMethod = Literal["forkserver", "spawn", "fork"]


class Worker(Protocol):
    """Any class whose instances can end; its other methods are what a group or pool calls."""

    def shutdown(self) -> None:
        """Release what the worker holds, process groups included."""


class Arguments(NamedTuple):
    """Of one call."""

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}


@dataclass(frozen=True)
class NodeChoice:
    """Nodes of a Ray cluster that workers may run on."""

    ids: tuple[str, ...]
    is_excluding: bool
    """Not these, but the others."""

    def allows(self, node_id: str) -> bool:
        return (node_id in self.ids) != self.is_excluding


@dataclass(frozen=True)
class Hosting:
    """How the processes of workers are set up, on whichever machine."""

    role: str = "rank"
    """What errors call a worker."""
    name: str = "worker"
    """What profiling calls the workers, with their number behind it; see `lucidrl.utils.nsys`."""
    first_number: int = 0
    """Number of the group's first worker, if the group is one of several equal ones in a pool."""
    pool_size: int | None = None
    """Workers of the pool; None if the group stands alone."""
    size_setting: str = "cluster.num_workers"
    """The setting that says how many workers there are, for errors."""
    log_dir: Path | None = None
    """For `<log_name>_N.log` with the output of worker N; by default a temporary folder, kept only after a failure."""
    log_name: str = "rank"
    captures_output: bool = True
    """Whether output goes to the log; otherwise to that of the driver."""
    start_method: StartMethod = "spawn"
    """Of the processes; under Ray always `spawn`."""
    imports_main: bool = True
    """Whether the process imports the program's main module first, as objects that were pickled by reference to it
    need."""
    preload: Sequence[str] = ()
    """Modules that a fork server imports once for all processes."""
    nodes: NodeChoice | None = None
    """Nodes of a Ray cluster that they may run on; by default all."""
    ray_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `ray.remote` for the actor that holds a worker's resources."""
    start_setting: str = "cluster.start_timeout_s"
    """The setting that limits the start, for errors."""
    call_setting: str = "cluster.call_timeout_s"
    """The setting that limits a call, for errors."""

    @property
    def joins_process_group(self) -> bool:
        """Whether workers get torchrun's variables and a store at which they meet; those of a pool do not."""
        return self.pool_size is None

    def number(self, rank: int) -> int:
        return self.first_number + rank

    def profiled_name(self, rank: int) -> str:
        """What profiling calls a worker."""
        return worker_name(self.name, self.number(rank))

    def total(self, world_size: int) -> int:
        return self.pool_size or world_size


@dataclass(frozen=True)
class WorkerLabel:
    """What errors say of a worker."""

    rank: int
    hosting: Hosting
    log_path: Path | None
    """Where the driver finds its output; None if it goes to that of the driver."""
    node: str | None = None
    """Where it runs, if not on this machine."""
    wrapper: str = ""
    """The program that runs it, such as a profiler."""
    sees_logs: bool = True
    """Whether its node sees the driver's log folder."""

    @property
    def name(self) -> str:
        return f"{self.hosting.role} {self.number}"

    @property
    def number(self) -> int:
        return self.hosting.number(self.rank)


@dataclass(frozen=True)
class WorkerReport:
    """What can be learned about a worker from outside."""

    tail: str
    """The last lines of its output."""
    stack: str = ""
    """Where it is, innermost frame first, if it was asked and could answer."""


class NodeLost(Exception):  # noqa: N818 - something observed; becomes a WorkerError
    """All workers of a node are unreachable; the message says why."""

    def __init__(self, node: str, ranks: Sequence[int], reason: str, tails: Sequence[str] = ()):
        super().__init__(reason)
        self.node, self.ranks = node, ranks
        self.tails = tails
        """The last lines of each worker's output, as far as the driver has them."""
