"""Checks whether processes have exited, for tests of faults."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil


def own_children() -> set[int]:
    """Processes that this one started, zombies included; Python's resource tracker stays for good."""
    return {
        child.pid
        for child in psutil.Process().children(recursive=True)
        if child.status() == psutil.STATUS_ZOMBIE or not any("resource_tracker" in word for word in child.cmdline())
    }


def is_running(pid: int) -> bool:
    """A zombie is not: how soon an orphan's is reaped is up to the machine's first process."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: Sequence[int], timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while any(map(is_running, pids)):
        assert time.monotonic() < until, "processes are left"
        time.sleep(0.02)
