"""Whether processes are gone, as tests of faults ask."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil


def is_running(pid: int) -> bool:
    """A zombie is not: how soon an orphan's is reaped is up to the machine's first process."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: Sequence[int], timeout_s: float = 6.0) -> None:
    until = time.monotonic() + timeout_s
    while any(map(is_running, pids)):
        assert time.monotonic() < until, "processes are left"
        time.sleep(0.02)
