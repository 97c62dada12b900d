"""VerifierWorker: imports a verifier once, and runs it in forked runners that it can kill within milliseconds.

A completion can make a verifier loop in native code, exhaust memory or end its process. Each of these costs one runner
and affects only the outcome of that completion.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lucidrl.rewards.interfaces import Limits, PoolJob
from lucidrl.rewards.outcome import Verified
from lucidrl.rewards.runner import (
    BAD_ROW,
    HEADER,
    LARGE_BYTES,
    MOST_RESULT_BYTES,
    OUTCOMES,
    PR_SET_CHILD_SUBREAPER,
    READY,
    SIZE,
    TEXT,
    run,
    trim_memory,
)

_log = logging.getLogger(__name__)

_POLL_S = 0.25
"""Longest time between two checks that the parent is alive."""
_START_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 1.0
"""How long to wait for a killed process; other runners wait meanwhile."""
_REAP_POLL_S = 0.0005
_MOST_BYTES_AHEAD = 1 << 15
"""A busy runner is sent its next item in advance only if the item surely fits the socket's buffer."""
_LEAST_WAITING = 4
"""Items are sent in advance only while more than this many per runner wait; the last items go to idle runners."""
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2


class _Runner:
    """The parent's handle of a forked process that verifies items."""

    def __init__(self, verifier: PoolJob, limits: Limits) -> None:
        self._limits = limits
        parent = os.getpid()
        self.connection, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            run(theirs, verifier, limits, parent)
        theirs.close()
        self.connection.settimeout(limits.timeout_s)
        self.is_ready = False
        self.items: deque[int] = deque()
        """Indices of the items sent to the runner, the current one first."""
        self._since = time.monotonic()
        self._received = b""

    @property
    def until(self) -> float:
        """When the current item, or the start of the runner, times out."""
        if not self.is_ready:
            return self._since + _START_TIMEOUT_S
        return self._since + self._limits.timeout_s if self.items else math.inf

    def seconds(self) -> float:
        """Seconds since the current item started."""
        return time.monotonic() - self._since

    def takes(self, item: bytes, limit: int) -> bool:
        """Whether the item can be sent without blocking, and the runner then has at most `limit` items."""
        return self.is_ready and len(self.items) < limit and (not self.items or len(item) <= _MOST_BYTES_AHEAD)

    def send(self, number: int, item: bytes) -> None:
        """Send an item; if the runner has exited, `replies` reports it."""
        if not self.items:
            self._since = time.monotonic()
        self.items.append(number)
        with suppress(OSError):  # the runner exited, or did not read the item within the timeout
            self.connection.sendall(SIZE.pack(len(item)) + item)

    def replies(self) -> list[tuple[int, bool, float, str]] | None:
        """Receive new replies; return None if the runner has exited or must be killed."""
        try:
            new = self.connection.recv(1 << 16)
        except OSError:
            new = b""
        if not new:
            return None
        self._received += new
        replies: list[tuple[int, bool, float, str]] = []
        while len(self._received) >= HEADER.size:
            kind, is_last, score, num_bytes = HEADER.unpack_from(self._received)
            end = HEADER.size + num_bytes
            if num_bytes > MOST_RESULT_BYTES:  # another process wrote to the connection
                return None
            if len(self._received) < end:
                break
            text = self._received[HEADER.size : end].decode(errors="replace")
            self._received = self._received[end:]
            if kind == READY:
                self.is_ready = True
                self._since = time.monotonic()
            elif kind not in OUTCOMES or len(replies) == len(self.items):
                return None
            else:
                replies.append((kind, bool(is_last), score, text))
        return replies

    def next_starts(self) -> None:
        """Restart the clock: the runner has replied and continues with its next item, if it has one."""
        self._since = time.monotonic()

    def kill(self) -> str:
        """Kill the runner and its process group; return how the runner ended."""
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        self.connection.close()
        status = _reap(self.pid, time.monotonic() + _KILL_TIMEOUT_S)
        if status is None:
            return "its process does not end although it was sent SIGKILL"
        code = os.waitstatus_to_exitcode(status)
        return f"its process exited with code {code}" if code >= 0 else f"its process was killed by signal {-code}"


class VerifierWorker:
    """Verifies items in several runners concurrently.

    Args:
        make: makes the verifier, and imports what it needs.
        num_runners: processes that verify at the same time.
    """

    def __init__(self, make: Callable[[], PoolJob], num_runners: int, limits: Limits) -> None:
        gc.disable()  # the imports are faster without it
        try:
            self._verifier = make()
        finally:
            gc.enable()
        self._num_runners = num_runners
        self._limits = limits
        self._parent = os.getppid()
        self._runners: dict[int, _Runner] = {}
        self._selector = selectors.DefaultSelector()
        self._end_with_parent()
        gc.freeze()  # runners share the memory until they write to it
        self._fork_missing()

    def verify(self, items: Sequence[bytes]) -> list[Verified]:
        """Verify items, which are pickled pairs of `Completion` and row; return the outcomes in the same order."""
        waiting = deque(range(len(items)))
        found: dict[int, Verified] = {}
        while len(found) < len(items):
            self._fork_missing()
            self._send(items, waiting)
            until = min(runner.until for runner in self._runners.values())
            for key, _ in self._selector.select(min(max(0.0, until - time.monotonic()), _POLL_S)):
                self._read(key.data, found, waiting)
            for runner in list(self._runners.values()):
                if time.monotonic() >= runner.until:
                    self._expire(runner, found, waiting)
            if os.getppid() != self._parent:  # the parent has exited
                self._exit()
        self._kill_orphans()
        if sum(map(len, items)) > LARGE_BYTES:
            trim_memory()
        return [found[number] for number in range(len(items))]

    def modules(self) -> list[str]:
        """Names of the modules that this process has imported."""
        return sorted(sys.modules)

    def shutdown(self) -> None:
        """Kill the runners and the processes that they started; may be called twice."""
        for runner in list(self._runners.values()):
            self._end(runner)
        self._kill_orphans()

    def _fork_missing(self) -> None:
        while len(self._runners) < self._num_runners:
            runner = _Runner(self._verifier, self._limits)
            self._runners[runner.pid] = runner
            self._selector.register(runner.connection, selectors.EVENT_READ, runner)

    def _send(self, items: Sequence[bytes], waiting: deque[int]) -> None:
        """Send an item to every idle runner; if many items wait, send busy runners their next item in advance."""
        for limit in (1, 2):
            for runner in self._runners.values():
                is_worth_it = limit == 1 or len(waiting) > _LEAST_WAITING * self._num_runners
                if waiting and is_worth_it and runner.takes(items[waiting[0]], limit):
                    number = waiting.popleft()
                    runner.send(number, items[number])

    def _read(self, runner: _Runner, found: dict[int, Verified], waiting: deque[int]) -> None:
        replies = runner.replies()
        if replies is None:
            was_ready, seconds = runner.is_ready, runner.seconds()
            current, how = self._end(runner, waiting)
            if current is not None:
                found[current] = Verified("crash", detail=how, seconds=seconds)
            elif not was_ready:
                raise RuntimeError(f"a verifier's runner did not start: {how}")
            return
        for kind, is_last, score, text in replies:
            outcome = OUTCOMES[kind]
            if kind == TEXT:
                verified = Verified(outcome, text=text, seconds=runner.seconds())
            else:
                score = score if outcome == "scored" else math.nan
                verified = Verified(outcome, score, text, runner.seconds(), is_bad_row=kind == BAD_ROW)
            found[runner.items.popleft()] = verified
            runner.next_starts()
            if is_last:
                current, _ = self._end(runner, waiting)
                if current is not None:  # it was sent in advance and has not started
                    waiting.appendleft(current)
                return

    def _expire(self, runner: _Runner, found: dict[int, Verified], waiting: deque[int]) -> None:
        if not runner.is_ready:
            raise RuntimeError(f"a verifier's runner did not start within {_START_TIMEOUT_S:g} s")
        current, _ = self._end(runner, waiting)
        assert current is not None
        detail = f"exceeded its timeout of {self._limits.timeout_s:g} s"
        found[current] = Verified("timeout", detail=detail, seconds=runner.seconds())

    def _end(self, runner: _Runner, waiting: deque[int] | None = None) -> tuple[int | None, str]:
        """Kill a runner; return its current item and how it ended. An item sent in advance is queued again."""
        self._selector.unregister(runner.connection)
        del self._runners[runner.pid]
        how = runner.kill()
        self._kill_orphans()
        current = runner.items.popleft() if runner.items else None
        if waiting is not None:
            waiting.extendleft(reversed(runner.items))
        return current, how

    def _end_with_parent(self) -> None:
        """Exit by SIGTERM, not SIGKILL, when the parent dies: SIGKILL would leave the children of runners behind."""
        signal.signal(signal.SIGTERM, lambda *_: self._exit())
        if sys.platform != "linux":
            return
        prctl, is_set = ctypes.CDLL(None).prctl, ctypes.c_int()
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # adopts the processes that dead runners leave behind
        prctl(_PR_GET_PDEATHSIG, ctypes.byref(is_set))
        if is_set.value:
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    def _exit(self) -> Any:
        """Kill all children and exit at once; a signal handler may call it at any point."""
        try:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._runners = {}
            self._kill_orphans()
        finally:
            os._exit(0)

    def _kill_orphans(self) -> None:
        """Kill processes that runners left behind."""
        if left := kill_children(spared=self._runners.keys()):
            _log.warning("processes %s, started by a verifier, do not end although they were sent SIGKILL", left)


def kill_children(spared: Collection[int], timeout_s: float = _KILL_TIMEOUT_S) -> set[int]:
    """Kill all children except `spared`, with their process groups; return those that have not ended in time."""
    until = time.monotonic() + timeout_s
    while (others := child_pids() - set(spared)) and time.monotonic() < until:
        for pid in others:
            with suppress(ProcessLookupError, PermissionError):
                group = os.getpgid(pid)
                os.kill(pid, signal.SIGKILL)
                if group != os.getpgrp():
                    os.killpg(group, signal.SIGKILL)
        for pid in others:
            with suppress(ChildProcessError):
                _reap(pid, until)
    return others


def _reap(pid: int, until: float) -> int | None:
    """Wait for a killed child and return its status; None if it has not ended in time, as some system calls delay."""
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() >= until:
            return None
        time.sleep(_REAP_POLL_S)
    return found[1]


def child_pids() -> set[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    if listed.exists():
        return set(map(int, listed.read_text().split()))
    import psutil

    return {child.pid for child in psutil.Process().children()}
