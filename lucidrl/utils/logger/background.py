"""One thread per back end, so the training loop never waits."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Generic, Literal, NamedTuple, TypeVar

from lucidrl.utils.logger.interface import LoggerInterface
from lucidrl.utils.logger.values import described

B = TypeVar("B", bound=LoggerInterface | None)

log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 0.5
_MOST_REASONS = 5
_MOST_REASON_CHARS = 300


class Losses:
    """Counts the records that a back end lost, by reason."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._steps: set[int] = set()
        self._lock = threading.Lock()

    def add(self, reason: str, step: int | None) -> None:
        reason = reason if len(reason) <= _MOST_REASON_CHARS else f"{reason[:_MOST_REASON_CHARS]}…"
        with self._lock:
            # Errors with a time or an address in them would fill the list.
            if len(self._reasons) >= _MOST_REASONS and reason not in self._reasons:
                reason = "other reasons"
            self._reasons[reason] += 1
            if step is not None:
                self._steps = {min(self._steps, default=step), max(self._steps, default=step), step}

    @property
    def count(self) -> int:
        return self._reasons.total()

    def __str__(self) -> str:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in self._reasons.most_common())
        if not self._steps:
            return reasons
        first, last = min(self._steps), max(self._steps)
        return f"{'step' if first == last else 'steps'} {first}{f' to {last}' if last > first else ''}: {reasons}"


class _Call(NamedTuple):
    """A call of the back end in progress."""

    since: float
    step: int | None
    what: Literal["start", "write", "finish"]


class BackgroundWriter(Generic[B]):
    """Creates, feeds and finishes one back end in a separate thread.

    Drops a record if `capacity` records already wait, or if its call raises. Dropped records are counted, and logged at
    the end.

    Args:
        name: name of the back end in messages.
        start: creates the back end; may be slow, and may fail.
        capacity: maximum number of waiting records.
        max_wait_s: how long `put` may wait for a place in a full queue, on average per record; more than 0 for a back
            end that should lose no records.
    """

    def __init__(self, name: str, start: Callable[[], B], capacity: int, max_wait_s: float = 0.0) -> None:
        self.name = name
        self.cpu_s = 0.0
        """CPU time of the thread so far, in seconds."""
        self.losses = Losses()
        self._num_put = itertools.count()
        self._start, self._capacity, self._max_wait_s = start, capacity, max_wait_s
        self._wait_left_s = 0.0
        self._tasks: queue.SimpleQueue[tuple[Callable[[B], None], int | None] | None] = queue.SimpleQueue()
        self._busy: _Call | None = _Call(time.monotonic(), None, "start")
        self.is_closed = False
        self._is_abandoned = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lucidrl-{name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[B], None], step: int | None = None) -> None:
        """Queue `call` for the back end."""
        next(self._num_put)
        self._wait_left_s = min(self._wait_left_s + self._max_wait_s, _LONGEST_WAIT_S)
        if self._tasks.qsize() < self._capacity or self._wait_for_room():
            self._tasks.put((call, step))
        else:
            self._lose(f"more than {self._capacity} records were waiting", step)

    def close(self) -> None:
        """Let the back end finish after the queued calls; `join` waits for it."""
        self.is_closed = True
        self._tasks.put(None)

    def join(self, until_s: float, timeout_s: float) -> None:
        """Wait for the end until `until_s` (monotonic clock), then give up and log the lost records.

        A call in progress gets only what is left of `timeout_s` since it began.
        """
        busy = self._busy
        if busy is not None:
            until_s = min(until_s, busy.since + timeout_s)
        # Garbage collection may end a logger in any thread, including this one. An event, because Python 3.11 takes a
        # thread for ended once a signal has interrupted its `join`.
        if self._thread is not threading.current_thread():
            self._is_over.wait(max(0.0, until_s - time.monotonic()))
        if not self._is_over.is_set():
            self._abandon(timeout_s)
        if self.losses.count:
            total = next(self._num_put)
            log.warning("%s lost %d of %d records: %s", self.name, self.losses.count, total, self.losses)

    def _wait_for_room(self) -> bool:
        """Whether the queue has a free place before the allowed wait is over."""
        start = time.monotonic()
        while (waited_s := time.monotonic() - start) < self._wait_left_s:
            time.sleep(0.001)
            if self._tasks.qsize() < self._capacity:
                break
        self._wait_left_s -= waited_s
        return self._tasks.qsize() < self._capacity

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._is_over.set()

    def _serve(self) -> None:
        try:
            backend = self._start()
        except BaseException as error:
            if not self._is_abandoned:  # else its lost records were already logged
                log.warning("%s could not start, the run continues without it: %s", self.name, described(error, str))
            reason = f"it could not start: {described(error)}"
            while (task := self._tasks.get()) is not None and not self._is_abandoned:  # also later records
                self.losses.add(reason, task[1])
            return
        finally:
            self._rest()
        while (task := self._tasks.get()) is not None and not self._is_abandoned:
            call, step = task
            self._busy = _Call(time.monotonic(), step, "write")
            try:
                call(backend)
            except BaseException as error:
                self._lose(f"it raised {described(error)}", step)
            self._rest()
        self._busy = _Call(time.monotonic(), None, "finish")
        try:
            if backend is not None:
                backend.finish()
        except BaseException as error:
            log.warning("%s failed to close: %s", self.name, described(error))
        self._rest()

    def _rest(self) -> None:
        self._busy = None
        self.cpu_s = time.thread_time()

    def _lose(self, reason: str, step: int | None) -> None:
        if not self.losses.count:
            record = "a record" if step is None else f"the record of step {step}"
            log.warning("%s lost %s: %s; further lost records are only counted", self.name, record, reason)
        self.losses.add(reason, step)

    def _abandon(self, timeout_s: float) -> None:
        self._is_abandoned = True
        busy, reason = self._busy, f"not written within {timeout_s:g} s"
        if busy is not None and busy.what == "write":
            self.losses.add(reason, busy.step)
        elif busy is not None and busy.what == "finish":
            log.warning("%s did not close within %g s; its last records may be missing", self.name, timeout_s)
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                self._tasks.put(None)  # in case the call returns later
                return
            if task is not None:
                self.losses.add(reason, task[1])
