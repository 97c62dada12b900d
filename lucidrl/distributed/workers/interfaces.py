"""What a worker is, how its process is set up, and how errors describe it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from lucidrl.utils.nsys import worker_name

StartMethod = Literal["forkserver", "spawn", "fork"]


class Worker(Protocol):
    """Any class with a `shutdown` method; a group or pool calls its other methods."""

    def shutdown(self) -> None:
        """Release all resources, process groups included."""


class Arguments(NamedTuple):
    """The arguments of one call."""

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}


@dataclass(frozen=True)
class NodeChoice:
    """Nodes of a Ray cluster that workers may run on."""

    ids: tuple[str, ...]
    is_excluding: bool
    """Whether workers may run on all nodes except these."""

    def allows(self, node_id: str) -> bool:
        return (node_id in self.ids) != self.is_excluding


@dataclass(frozen=True)
class Hosting:
    """How the processes of workers are set up, on any machine."""

    role: str = "rank"
    """Noun for a worker in errors, such as "rank" in "rank 3"."""
    name: str = "worker"
    """First part of the workers' names in profiles, as in `worker-0`; see `lucidrl.utils.nsys`."""
    first_number: int = 0
    """Index in the pool of the first worker of this group."""
    pool_size: int | None = None
    """Number of workers in the pool; None for a group that is not in a pool."""
    size_setting: str = "cluster.num_workers"
    """Name of the setting for the number of workers; errors mention it."""
    log_dir: Path | None = None
    """Folder for `<log_name>_N.log`, the output of worker N; by default a temporary one, kept only after a failure."""
    log_name: str = "rank"
    captures_output: bool = True
    """Whether output goes to the log; otherwise it goes to the driver's output."""
    start_method: StartMethod = "spawn"
    """Start method of the processes; under Ray always `spawn`."""
    imports_main: bool = True
    """Whether the process imports the program's main module first; objects pickled by reference to it need that."""
    uses_torch: bool = True
    """Whether the process imports torch. If not, the process also has a single thread, so the worker may fork."""
    preload: Sequence[str] = ()
    """Modules that the fork server imports once for all processes."""
    nodes: NodeChoice | None = None
    """Nodes of a Ray cluster that workers may run on; by default all."""
    num_ranks: int = 1
    """Processes that a worker consists of; under Ray, it reserves `num_ranks` times the CPUs and GPUs of one worker."""
    ray_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `ray.remote` for the actor that holds a worker's resources."""
    start_setting: str = "cluster.start_timeout_s"
    """Name of the setting for the start timeout; errors mention it."""
    call_setting: str = "cluster.call_timeout_s"
    """Name of the setting for the call timeout; errors mention it."""
    phase_settings: Mapping[str, str] = field(default_factory=dict)
    """Names of the settings for the timeouts of phases that have another one."""

    @property
    def joins_process_group(self) -> bool:
        """Whether workers get torchrun's variables and a store for their rendezvous; workers of a pool do not."""
        return self.pool_size is None

    def number(self, rank: int) -> int:
        return self.first_number + rank

    def profiled_name(self, rank: int) -> str:
        """How profiling names a worker."""
        return worker_name(self.name, self.number(rank))

    def total(self, world_size: int) -> int:
        return self.pool_size or world_size


@dataclass(frozen=True)
class WorkerLabel:
    """How errors describe a worker."""

    rank: int
    hosting: Hosting
    log_path: Path | None
    """File in which the driver finds the worker's output; None if the worker writes to the driver's output."""
    node: str | None = None
    """The Ray node that the worker runs on; None for this machine."""
    wrapper: str = ""
    """The program that runs the worker, such as a profiler; empty if there is none."""
    sees_logs: bool = True
    """Whether the worker's node sees the driver's log folder."""

    @property
    def name(self) -> str:
        return f"{self.hosting.role} {self.number}"

    @property
    def number(self) -> int:
        return self.hosting.number(self.rank)


@dataclass(frozen=True)
class WorkerReport:
    """Diagnosis of a worker that did not return."""

    tail: str
    """The last lines of the worker's output."""
    stack: str = ""
    """The worker's stack, innermost frame first; empty if it was not requested or not written."""


class NodeLost(Exception):  # noqa: N818 - something observed; becomes a WorkerError
    """All workers of a node are unreachable; the message is the reason."""

    def __init__(self, node: str, ranks: Sequence[int], reason: str, tails: Sequence[str] = ()):
        super().__init__(reason)
        self.node, self.ranks = node, ranks
        self.tails = tails
        """For each worker, the last lines of its output, as far as the driver has it."""
