"""A process of `collectors.py`: measures subjects of one module in turn with the bare loop, and prints JSON.

python -m collection.measure MODULE ROUNDS SUBJECT [SUBJECT ...]
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from typing import Any

import torch

from collection.tasks import TASKS, Subject, bare_loops

TURN_S = 0.3
"""Minimum time that a candidate collects frames per turn."""
SETTLE_S = 0.1
"""Pause before a turn, until workers stop because they have collected as far ahead as they may."""
AHEAD = {
    "MultiSyncCollector x2": 2,
    "MultiAsyncCollector x2": 2,
    "AsyncBatchedCollector x2, processes": 3,
    "RayCollector x2": 2,
}
"""Batches that workers may collect ahead: they are taken before the clock starts. A turn takes a multiple of this
number, because batches of several workers arrive together."""
NEVER_PAUSES = {"AsyncBatchedCollector x2"}
"""Subjects that collect ahead without limit; they are closed after each turn."""


class Candidate:
    """A running subject, and its times: to the first batch, per frame in each turn, and of the shutdown."""

    def __init__(self, name: str, subject: Subject, task: str):
        self._subject, self._task = subject, task
        self._batches_ahead = AHEAD.get(name, 0)
        self._never_pauses = name in NEVER_PAUSES
        self._start_s: list[float] = []
        self._frame_s: list[float] = []
        self._close_s: list[float] = []
        if not self._never_pauses:
            self._open()

    def take_turn(self) -> None:
        if self._never_pauses:
            self._open()
        else:
            time.sleep(SETTLE_S)
        for _ in range(self._batches_ahead):
            self._collect()
        frames = 0
        start = time.perf_counter()
        while time.perf_counter() - start < TURN_S:
            for _ in range(max(1, self._batches_ahead)):
                frames += self._collect()
        self._frame_s.append((time.perf_counter() - start) / frames)
        if self._never_pauses:
            self._close()

    def end(self) -> dict[str, Any]:
        """Close the subject, and return its times."""
        if not self._never_pauses:
            self._close()
        return {"frame_s": self._frame_s, "start_s": self._start_s[0], "close_s": self._close_s[0]}

    def _open(self) -> None:
        start = time.perf_counter()
        self._context = self._subject(self._task)
        self._collect = self._context.__enter__()
        self._collect()
        self._start_s.append(time.perf_counter() - start)

    def _close(self) -> None:
        start = time.perf_counter()
        self._context.__exit__(None, None, None)
        self._close_s.append(time.perf_counter() - start)


def measure(task: str, subjects: dict[str, Subject], rounds: int) -> dict[str, dict[str, Any]]:
    # The bare loop has a separate process, so no thread of a subject delays it.
    all_subjects = {**subjects, "bare": bare_loops(1)}
    candidates = {name: Candidate(name, subject, task) for name, subject in all_subjects.items()}
    for _ in range(rounds):
        for candidate in candidates.values():
            candidate.take_turn()
    return {name: candidate.end() for name, candidate in candidates.items()}


def main() -> None:
    module, rounds, *names = sys.argv[1:]
    torch.set_num_threads(1)
    available = import_module(module).SUBJECTS
    subjects = {name: available[name] for name in names}
    result = {task: measure(task, subjects, int(rounds)) for task in TASKS}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
