"""VerifierPool: runs a verifier in processes that can be killed, because it is CPU-heavy or reads hostile completions.

One worker process imports the verifier and forks the runners that execute it; see `lucidrl.rewards.worker`. The worker
never imports torch, so it starts quickly and stays small.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Self

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.interfaces import Arguments, Hosting
from lucidrl.distributed.workers.pool import WorkerPool
from lucidrl.distributed.workers.process import num_cores
from lucidrl.errors import ConfigError, EnvironmentFailure, LostWorkerError
from lucidrl.rewards.interfaces import DEFAULT_LIMITS, Completion, Limits, PoolJob
from lucidrl.rewards.outcome import Verified
from lucidrl.rewards.worker import VerifierWorker

_MOST_ITEMS_PER_RUNNER = 64
"""Most items per runner in one call of the worker; if the worker is lost, all items of the call are verified again."""
_MOST_BYTES = 4 << 20
"""A call with this many bytes of items gets no further item, except to give every runner one: runners forked during
the call copy its items."""
_SPARE_S = 1.0
"""Time that the worker has after the timeout of an item to kill the runner and report the outcome."""
_CALL_SPARE_S = 30.0
_GATHERING_S = 0.005
"""How long to wait for further items before a call starts: items of the next call wait until this call ends."""
_SHUTDOWN_TIMEOUT_S = 3.0
_START_TIMEOUT_S = 60.0

_Item = tuple[bytes, "Future[Verified]"]


class VerifierPool:
    """Verifies completions in forked processes; the verifier is ready when the constructor returns.

    Args:
        name: name of the verifier in errors.
        make: makes the verifier; must be picklable, and import what the verifier needs.
        limits: timeout, from the start of the verification, and memory limit per completion.
        num_workers: completions verified at the same time; by default the number of cores.
        max_restarts: most consecutive restarts of the worker process; a call that returns its outcomes resets the
            count. Once no restart is left, `Future.result` of the submitted completions raises EnvironmentFailure.
        role: what the pool runs, in errors.

    Raises:
        LucidError: if the verifier cannot be made.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], PoolJob],
        *,
        limits: Limits = DEFAULT_LIMITS,
        num_workers: int | None = None,
        max_restarts: int = 3,
        role: str = "verifier",
    ) -> None:
        self.name = name
        self._title = f"{role} {name}"
        self.num_workers = num_workers or num_cores()
        self._timeout_s = limits.timeout_s
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._is_closed = False
        hosting = Hosting(
            role=self._title,
            name=role,
            log_name=role,
            start_method="spawn",  # the fork server of the program may have imported torch
            imports_main=False,
            uses_torch=False,
        )
        try:
            self._pool = WorkerPool(
                VerifierWorker,
                [Arguments((make, self.num_workers, limits))],
                cluster=ClusterConfig(num_threads=1, start_timeout_s=_START_TIMEOUT_S),
                hosting=hosting,
                max_restarts=max_restarts,
            )
        except ConfigError as error:  # without the notes about the worker
            raise ConfigError(str(error)) from error.__cause__
        atexit.register(
            self.shutdown
        )  # runs before the exit handler of the worker pool, which would wait for a busy worker
        threading.Thread(target=self._work, name=self._title, daemon=True).start()

    @property
    def num_restarts(self) -> int:
        """Restarts of the worker process so far."""
        return self._pool.num_restarts

    @property
    def pid(self) -> int:
        """Process id of the worker; the runners are its children."""
        return self._pool.workers[0].process.pids[0]

    def submit(self, completion: Completion, row: Mapping[str, Any]) -> Future[Verified]:
        """Start to verify a completion; return the future outcome.

        `Future.result` raises EnvironmentFailure if the worker process cannot be restarted or the pool is shut down.
        """
        future: Future[Verified] = Future()
        item = pickle.dumps((completion, dict(row)), protocol=5)
        with self._closing:
            if self._is_closed:
                raise EnvironmentFailure(f"{self._title} was shut down; make another pool")
            self._items.put((item, future))
        return future

    async def verify(self, items: Sequence[tuple[Completion, Mapping[str, Any]]]) -> list[Verified]:
        """Verify completions with their rows; return the outcomes in the same order."""
        return await asyncio.gather(*[asyncio.wrap_future(self.submit(*item)) for item in items])

    def modules(self) -> list[str]:
        """Names of the modules that the worker process has imported."""
        names: list[str] = self._pool.submit(0, "modules").result()
        return names

    def shutdown(self) -> None:
        """Kill all processes, even during a verification; may be called twice."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            self._items.put(None)
        atexit.unregister(self.shutdown)
        with suppress(ProcessLookupError, IndexError):
            os.kill(self.pid, signal.SIGTERM)  # even a busy worker then kills its runners and exits
        self._pool.shutdown(_SHUTDOWN_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _work(self) -> None:
        """Group waiting items into calls of the worker, and make one call after the other."""
        while (first := self._items.get()) is not None:
            chunk, size_bytes = [first], len(first[0])
            with suppress(queue.Empty):
                while len(chunk) % self.num_workers or (  # no runner is idle while items wait
                    len(chunk) < self.num_workers * _MOST_ITEMS_PER_RUNNER and size_bytes < _MOST_BYTES
                ):
                    if (item := self._items.get(timeout=_GATHERING_S)) is None:
                        break
                    chunk.append(item)
                    size_bytes += len(item[0])
            try:
                outcomes = self._call([item for item, _ in chunk])
            except Exception as error:
                failure = EnvironmentFailure(f"{self._title} stopped: {error}")
                failure.__cause__ = error
                for _, future in chunk:
                    _resolve(future, failure)
            else:
                for (_, future), outcome in zip(chunk, outcomes, strict=True):
                    _resolve(future, outcome)
            del chunk, first
            if self._is_closed:
                break
        with suppress(queue.Empty):
            while item := self._items.get_nowait():
                _resolve(
                    item[1],
                    EnvironmentFailure(f"{self._title} was shut down before it verified this completion"),
                )

    def _call(self, items: Sequence[bytes]) -> list[Verified]:
        """Return the outcomes of the items; restart a lost worker and resend the items."""
        rounds = math.ceil(len(items) / self.num_workers)
        timeout_s = rounds * (self._timeout_s + _SPARE_S) + _CALL_SPARE_S
        while True:
            try:
                found: list[Verified] = self._pool.submit(0, "verify", items, timeout_s=timeout_s).result()
                self._pool.workers[0].succeeded()
                return found
            except LostWorkerError as loss:
                if self._is_closed:
                    raise EnvironmentFailure("the pool was shut down") from loss
                self._pool.restart_lost()


def _resolve(future: Future[Verified], result: Verified | EnvironmentFailure) -> None:
    with suppress(Exception):  # the future was cancelled, such as at the timeout of an environment
        if isinstance(result, Verified):
            future.set_result(result)
        else:
            future.set_exception(result)
