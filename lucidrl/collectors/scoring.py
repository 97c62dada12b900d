"""Threads that score completions as they come, several calls of the environment at a time."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lucidrl.collectors.groups import Ticket
from lucidrl.collectors.rollouts import Sample
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.profiling.spans import span


@dataclass(frozen=True)
class Job:
    """A completion to score."""

    ticket: Ticket
    sample: Sample
    turn: int
    request: EnvRequest


class ScoringThreads:
    """Scores completions; a free thread takes its share of those that wait, one each if there are enough threads.

    Args:
        on_scored: called with jobs and their step results, in one of the threads.
        on_failure: called with an error that the environment or `on_scored` raised; the thread ends.
    """

    def __init__(
        self,
        runner: EnvRunner,
        number: int,
        on_scored: Callable[[Sequence[Job], Sequence[EnvReply | None]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._runner, self._on_scored, self._on_failure = runner, on_scored, on_failure
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._num_idle = 0
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"environment calls {index}", daemon=True)
            for index in range(number)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> None:
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Start no more calls; calls that run end with the runner."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            while jobs := self._take():
                with span("environment"):
                    results = self._runner.step([job.request for job in jobs])
                self._on_scored(jobs, results)
        except BaseException as error:  # this thread has no caller
            self._on_failure(error)

    def _take(self) -> list[Job]:
        """Wait for completions and take some; [] at the end."""
        with self._changed:
            self._num_idle += 1
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            number = 0 if self._is_closed else math.ceil(len(self._waiting) / self._num_idle)
            self._num_idle -= 1
            return [self._waiting.popleft() for _ in range(number)]
