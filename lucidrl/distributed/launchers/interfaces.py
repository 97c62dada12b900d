"""What a worker is, and what every way of running workers offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from lucidrl.distributed.launchers.messages import Message
    from lucidrl.distributed.launchers.rank_process import Died


class Worker(Protocol):
    """Any class whose instances can end; its other methods are what a group calls."""

    def shutdown(self) -> None:
        """Release what the worker holds, process groups included."""


class Arguments(NamedTuple):
    """Of one call."""

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Part:
    """Which part of a whole a group is, where groups that do not know each other do the same work side by side."""

    first: int = 0
    """Number of its first rank among the ranks of all."""
    total: int | None = None
    """Ranks of all; None if the group is all there is."""
    setting: str = "cluster.num_workers"
    """What says how many there are."""


WHOLE = Part()
"""A group that stands alone."""


@dataclass(frozen=True)
class NodeChoice:
    """Nodes of a Ray cluster that a group may run on."""

    ids: tuple[str, ...]
    is_excluding: bool
    """Not these, but the others."""

    def allows(self, node_id: str) -> bool:
        return (node_id in self.ids) != self.is_excluding


class Launcher(Protocol):
    """Processes that were started, one a rank, each for a worker."""

    is_recording: bool
    """Whether workers were told to record, and so may have something to write when they end."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def blind_nodes(self) -> Sequence[str]:
        """Nodes with workers that do not see the folder of the logs."""

    def make_workers(self) -> None:
        """Make the worker of every rank; comes before all calls."""

    def run(self, method: str, calls: Sequence[Arguments], timeout_s: float) -> list[Any]:
        """Call the method on every rank with its own arguments; the results, by rank."""

    def check(self) -> None:
        """Raise, as a call would, if a worker has died since the last one."""

    def shutdown(self) -> None:
        """End all workers; may be called twice."""

    def kill(self) -> None:
        """End all workers in the middle of whatever they do, also from another thread, whose call fails then."""


@dataclass(frozen=True)
class RankLabel:
    """What errors say of a rank."""

    rank: int
    role: str
    """What errors call such a process, in the singular."""
    log_path: Path
    """Where the driver finds what it wrote."""
    part: Part = WHOLE
    """Of the group."""
    node: str | None = None
    """Where it runs, if that is not simply this machine."""
    wrapper: str = ""
    """The program that runs it, if it is not run as it is."""
    sees_logs: bool = True
    """Whether the folder of the logs is there where it runs, and not only where the driver is."""

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"

    @property
    def number(self) -> int:
        return self.part.first + self.rank


@dataclass(frozen=True)
class RankReport:
    """What can be learned about a rank from outside."""

    tail: str
    """The last lines that it wrote."""
    stack: str = ""
    """Where it is, innermost frame first, if it was asked and could say."""


class NodeLost(Exception):  # noqa: N818 - something observed; becomes a WorkerError
    """All ranks of a node are out of reach; the message says why."""

    def __init__(self, node: str, ranks: Sequence[int], reason: str, tails: Sequence[str] = ()):
        super().__init__(reason)
        self.node, self.ranks = node, ranks
        self.tails = tails
        """The last lines that each of them wrote, as far as the driver has them."""


class Ranks(Protocol):
    """Processes of ranks, wherever they are. `send`, `poll`, `dead` and `report` may raise `NodeLost`."""

    @property
    def labels(self) -> Sequence[RankLabel]:
        """Of all, in order."""

    def send(self, messages: Mapping[int, Message]) -> None:
        """Give every rank its message; `poll` then gives their answers."""

    def poll(self, timeout_s: float) -> Sequence[tuple[int, Message | Died]]:
        """Answers that have not been given yet; waits for one, or until the time is over."""

    def dead(self) -> Mapping[int, Died]:
        """Ranks that have ended; to be asked while none has a message."""

    def meet(self, pids: Sequence[int]) -> None:
        """Learn which processes are the workers' own, since another program may run them."""

    def report(self, numbers: Sequence[int], with_stacks: bool) -> Mapping[int, RankReport]:
        """What is known of some ranks; with stacks, each that is busy is asked where."""

    def let_end(self, timeout_s: float) -> Mapping[int, int | None]:
        """Ask all to shut down and leave; their exit codes, None for those that have not left in time.

        Those that are out of reach are missing.
        """

    def kill(self) -> None:
        """End all now and free what was held for them; may be called twice."""
