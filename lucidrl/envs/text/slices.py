"""Calls of an environment that come and end at any time: each worker process runs its open calls in short slices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from lucidrl.distributed.workers.pool import WorkerPool
from lucidrl.envs.text.interfaces import EnvRequest
from lucidrl.envs.text.worker import Advanced, EnvState, NewCall, Outcome

SLICE_S = 0.1
"""A worker runs its calls for this long, or until one ends, before it takes new ones."""


@dataclass
class _OpenCalls:
    """The calls of a worker."""

    new: list[NewCall] = field(default_factory=list)
    futures: dict[int, Future[list[Outcome]]] = field(default_factory=dict)
    timeout_s: float = 0.0
    """Longest timeout of an open call."""
    is_running: bool = False


class SlicedCalls:
    """Starts calls in the workers of a pool; callable from any thread.

    Args:
        grace_s: time after the timeout of its calls until a worker that does not reply counts as lost.
        on_state: called with number and state of a worker after each slice.
    """

    def __init__(self, pool: WorkerPool, grace_s: float, on_state: Callable[[int, EnvState], None]) -> None:
        self._pool, self._grace_s, self._on_state = pool, grace_s, on_state
        self._lock = threading.Lock()
        self._workers = [_OpenCalls() for _ in pool.workers]
        self._num_calls = 0

    def start(self, number: int, call: Sequence[EnvRequest], timeout_s: float) -> Future[list[Outcome]]:
        """Start a call of a worker; the future raises LostWorkerError if the worker is lost."""
        future: Future[list[Outcome]] = Future()
        with self._lock:
            self._num_calls += 1
            state = self._workers[number]
            state.new.append(NewCall(self._num_calls, call, timeout_s))
            state.futures[self._num_calls] = future
        self._advance(number)
        return future

    def _advance(self, number: int) -> None:
        with self._lock:
            state = self._workers[number]
            if state.is_running or not state.futures:
                return
            state.is_running, new, state.new = True, state.new, []
            state.timeout_s = max([state.timeout_s, *(call.timeout_s for call in new)])
            timeout_s = state.timeout_s + self._grace_s
        slice_ = self._pool.submit(number, "advance", new, SLICE_S, timeout_s=timeout_s, phase="score")
        slice_.add_done_callback(partial(self._advanced, number))

    def _advanced(self, number: int, slice_: Future[Advanced]) -> None:
        worker, error = self._pool.workers[number], slice_.exception()
        if error is not None:
            with self._lock:
                futures, self._workers[number] = self._workers[number].futures, _OpenCalls()
            for future in futures.values():
                future.set_exception(worker.loss or error)
            return
        advanced = slice_.result()
        self._on_state(number, advanced.state)
        with self._lock:
            state = self._workers[number]
            state.is_running = False
            ended = [(state.futures.pop(key), outcomes) for key, outcomes in advanced.outcomes.items()]
            if not state.futures:
                state.timeout_s = 0.0
        if ended:
            worker.succeeded()
        for future, outcomes in ended:
            future.set_result(outcomes)
        self._advance(number)
