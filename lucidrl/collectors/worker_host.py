"""Where the workers of a collector run: what their set asks of processes of this machine, and of actors elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lucidrl.collectors.parts import Weights
from lucidrl.collectors.worker_main import Command
from lucidrl.distributed.launchers.rank_process import Outcome


@dataclass(frozen=True)
class WorkerPlan:
    """What the workers of a collector are to be, wherever they run."""

    shared_arguments: bytes
    """Of all workers' collectors, by cloudpickle."""
    own_arguments: Sequence[bytes]
    """Of each worker's collector, by cloudpickle."""
    weights: Weights
    """That the policy has to begin with."""
    num_threads: int
    """That torch uses in a worker."""
    base_seed: int
    """Of whatever is not seeded by `Seed`; workers have streams of their own."""
    timeout_s: float
    """Deadline of a batch and of a call."""
    start_timeout_s: float

    @property
    def num_workers(self) -> int:
        return len(self.own_arguments)


class Arrivals(Protocol):
    """What came from the workers, in order."""

    @property
    def here(self) -> deque[tuple[int, Outcome]]: ...

    def take_in(self, timeout_s: float) -> None:
        """Add what came to those that are `here`, as soon as there is something; with no time, all that is there."""
        ...


class Worker(Protocol):
    """One worker, as its driver holds it. Its first reply, which nobody asks for, has the specs of its env."""

    @property
    def pid(self) -> int: ...

    @property
    def has_ended(self) -> bool: ...

    @property
    def excused_until(self) -> float:
        """Nothing is late before, on the clock of `time.monotonic`: what replaces a dead worker needs time to begin."""
        ...

    @property
    def cause_of_end(self) -> BaseException | None:
        """More about the end than `how_it_ended` says, if anything is known."""
        ...

    def send(self, command: Command) -> None:
        """Returns when the command is on its way.

        Raises:
            OSError: if the worker is gone; BlockingIOError if it left no room in time.
        """
        ...

    def where(self) -> str:
        """For an error, after the worker's name; empty if it is a process of this machine."""
        ...

    def how_it_ended(self) -> str:
        """For a worker that is about to end or has ended: a verb with its cause."""
        ...

    def end(self) -> None:
        """Ask the worker to shut down and leave; does not wait."""
        ...

    def join(self, timeout_s: float) -> int | None:
        """Wait for it to end; None if it is still there."""
        ...

    def kill(self) -> None:
        """End it now, and every wait for it; may be called twice."""
        ...

    def reap(self) -> None:
        """Leave nothing after `kill`."""
        ...


class WorkerHost(Protocol):
    """Starts workers, and gives them weights."""

    @property
    def replies(self) -> Arrivals:
        """To calls."""
        ...

    @property
    def batches(self) -> Arrivals: ...

    def start(self, index: int, plan: WorkerPlan) -> Worker:
        """Begin to start a worker; does not wait."""
        ...

    def publish(self, weights: Weights, version: int) -> None:
        """What a worker takes, whole, when it begins its next batch.

        Raises:
            ConfigError: if these are not the weights of the policy; nothing has happened then.
        """
        ...

    def close(self) -> None:
        """Release what is left when all workers have ended; may be called twice."""
        ...
