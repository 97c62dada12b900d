"""A thread that does the slow part of logging, so that the training loop never waits for it."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Generic, Literal, NamedTuple, TypeVar

from lucidrl.utils.logger.values import described, message_of

B = TypeVar("B")

log = logging.getLogger(__name__)

_MOST_PATIENCE_S = 0.5
_MOST_REASONS = 5
_MOST_REASON_CHARS = 300


class Losses:
    """Which records did not arrive, and why."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._steps: set[int] = set()
        self._lock = threading.Lock()

    def add(self, reason: str, step: int | None) -> None:
        reason = reason if len(reason) <= _MOST_REASON_CHARS else f"{reason[:_MOST_REASON_CHARS]}…"
        with self._lock:
            # Errors that name a time or an address would make a list without end.
            if len(self._reasons) >= _MOST_REASONS and reason not in self._reasons:
                reason = "other reasons"
            self._reasons[reason] += 1
            if step is not None:
                self._steps = {min(self._steps | {step}), max(self._steps | {step})}

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
    """A call of the back end that goes on."""

    since: float
    step: int | None
    what: Literal["start", "write", "finish"]


class BackgroundWriter(Generic[B]):
    """Owns one back end: makes it, feeds it and finishes it in a thread of its own.

    When the back end is slower than the run, `capacity` records pile up and further ones are lost. A record whose call
    raises is lost, the next one is tried. Every loss is counted, and named at the end.

    Args:
        name: what messages call it.
        start: makes the back end; it may be slow, and may fail.
        finish: closes the back end.
        capacity: most records that wait.
        patience_s: how long `put` may wait for room, on average over the records: for a back end that must be complete
            and is only a little slower than a tight loop.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], B],
        finish: Callable[[B], None],
        capacity: int,
        patience_s: float = 0.0,
    ) -> None:
        self.name = name
        self.cpu_s = 0.0
        """CPU time of the thread so far."""
        self.losses = Losses()
        self._num_put = itertools.count()
        self._start, self._finish = start, finish
        self._capacity, self._patience_s = capacity, patience_s
        self._patience_left_s = 0.0
        self._tasks: queue.SimpleQueue[tuple[Callable[[B], None], int | None] | None] = queue.SimpleQueue()
        self._busy: _Call | None = _Call(time.monotonic(), None, "start")
        self.is_closed = False
        self._is_abandoned = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lucidrl-{name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[B], None], step: int | None = None) -> None:
        """Have the back end do `call` when it gets there."""
        next(self._num_put)
        self._patience_left_s = min(self._patience_left_s + self._patience_s, _MOST_PATIENCE_S)
        if self._tasks.qsize() < self._capacity or self._wait_for_room():
            self._tasks.put((call, step))
        else:
            self._lose(f"more than {self._capacity} records were waiting", step)

    def close(self) -> None:
        """Ask the back end to finish after what was put; `join` waits for it."""
        self.is_closed = True
        self._tasks.put(None)

    def join(self, deadline: float, timeout_s: float) -> None:
        """Wait for the end until `deadline` (monotonic clock), then give up and say what is lost.

        A back end that is already stuck in one call gets what remains of `timeout_s` since that call began.
        """
        busy = self._busy
        if busy is not None:
            deadline = min(deadline, busy.since + timeout_s)
        # A forgotten logger may be collected, and ended, in any thread, also this one. Not by joining the thread, which
        # counts as ended for Python 3.11 once a signal has interrupted that.
        if self._thread is not threading.current_thread():
            self._is_over.wait(max(0.0, deadline - time.monotonic()))
        if not self._is_over.is_set():
            self._abandon(timeout_s)
        if self.losses.count:
            total = next(self._num_put)
            log.warning("%s lost %d of %d records: %s", self.name, self.losses.count, total, self.losses)

    def _wait_for_room(self) -> bool:
        """Whether there is room before patience ends."""
        start = time.monotonic()
        while (waited_s := time.monotonic() - start) < self._patience_left_s:
            time.sleep(0.001)
            if self._tasks.qsize() < self._capacity:
                break
        self._patience_left_s -= waited_s
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
            if not self._is_abandoned:  # else its loss was named already
                log.warning("%s could not start, the run goes on without it: %s", self.name, message_of(error))
            self._lose_all(f"it could not start: {described(error)}")
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
            self._finish(backend)
        except BaseException as error:
            log.warning("%s failed at its end: %s", self.name, described(error))
        self._rest()

    def _rest(self) -> None:
        self._busy = None
        self.cpu_s = time.thread_time()

    def _lose(self, reason: str, step: int | None) -> None:
        if not self.losses.count:
            what = "a record" if step is None else f"the record of step {step}"
            log.warning("%s lost %s: %s; further losses are counted", self.name, what, reason)
        self.losses.add(reason, step)

    def _lose_all(self, reason: str) -> None:
        """Lose what waits and what will come, until the end."""
        while (task := self._tasks.get()) is not None and not self._is_abandoned:
            self.losses.add(reason, task[1])

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
                self._tasks.put(None)  # should it ever wake up
                return
            if task is not None:
                self.losses.add(reason, task[1])
