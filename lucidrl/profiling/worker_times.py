"""What worker processes did for their driver: each reply of a worker carries the times of its call.

Nothing here imports torch: workers without torch report their times too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

COMMUNICATION = "communication"
"""Name of the spans around collectives. They include the time in which a rank waits for the other ranks."""


class CallTimes(NamedTuple):
    """Times of one call of a worker; small enough to travel with every reply."""

    call_s: float
    """Duration of the call."""
    exclusive: Mapping[tuple[str, str], float] = {}
    """See `SpanRecorder.take_exclusive`."""
    totals: Mapping[str, tuple[float, int]] = {}
    """Seconds and number of the spans, by name; see `SpanRecorder.drain`."""


@dataclass
class WorkerTimes:
    """Sums over the calls of one worker."""

    call_s: float = 0.0
    exclusive: dict[tuple[str, str], float] = field(default_factory=dict)
    totals: dict[str, tuple[float, int]] = field(default_factory=dict)

    @property
    def communication_s(self) -> float:
        """Seconds in collectives."""
        return sum(seconds for (_, name), seconds in self.exclusive.items() if name == COMMUNICATION)

    @property
    def busy_s(self) -> float:
        """Seconds in calls, without collectives."""
        return self.call_s - self.communication_s

    @property
    def num_spans(self) -> int:
        return sum(count for _, count in self.totals.values())

    def within(self, outermost: str) -> dict[str, float]:
        """Exclusive seconds by name of the spans inside the outermost spans of this name, itself included."""
        return {name: seconds for (outer, name), seconds in self.exclusive.items() if outer == outermost}

    def add(self, times: CallTimes | WorkerTimes) -> None:
        self.call_s += times.call_s
        for key, seconds in times.exclusive.items():
            self.exclusive[key] = self.exclusive.get(key, 0.0) + seconds
        for name, (seconds, count) in times.totals.items():
            before_s, count_before = self.totals.get(name, (0.0, 0))
            self.totals[name] = (before_s + seconds, count_before + count)


class WorkerClock:
    """Collects the times of all workers of this process, by worker, such as `policy-0`; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: dict[str, WorkerTimes] = {}
        self._waits = _Waits()

    def add(self, worker: str, times: CallTimes) -> None:
        with self._lock:
            self._times.setdefault(worker, WorkerTimes()).add(times)

    def drain(self) -> dict[str, WorkerTimes]:
        """Times of the calls that have ended since the last `drain`, by worker."""
        with self._lock:
            taken, self._times = self._times, {}
        return taken

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as time in which this thread only waits for workers."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._waits.seconds += time.perf_counter() - start

    def take_waited_s(self) -> float:
        """Seconds that this thread has waited since its last call."""
        waited_s, self._waits.seconds = self._waits.seconds, 0.0
        return waited_s


class _Waits(threading.local):
    seconds = 0.0


worker_clock = WorkerClock()
"""The clock of this process."""
