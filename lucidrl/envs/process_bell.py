"""How a driver and its env processes wait for each other: a byte on a socket says that it is the other's turn.

The byte stays until it is taken, so that no wake-up is lost, and arrays that were written before it are seen after it,
on every machine. Whoever waits spins for a moment first if there is a core for everybody, because to fall asleep and be
woken takes longer than many a step. Processes that outnumber the cores would only keep each other from work with that.
"""

from __future__ import annotations

import os
import select
import time

from lucidrl.distributed.child_process import num_cores

_SPIN_S = 50e-6


def spin_time_s(num_processes: int) -> float:
    """How long to spin for a driver and that many env processes."""
    return _SPIN_S if num_processes < num_cores() else 0.0


def wait_readable(poll: select.poll, timeout_s: float | None, spin_s: float) -> list[int]:
    """Descriptors among those of `poll` that have something to read or whose other end is gone, as soon as any has.

    Args:
        timeout_s: after that the list is empty; None waits for ever.
        spin_s: how much of it to spin.
    """
    ready = poll.poll(0)
    if not ready and timeout_s != 0:
        until = time.perf_counter() + spin_s
        while not ready and time.perf_counter() < until:
            os.sched_yield()  # other programs may want the core
            ready = poll.poll(0)
        if not ready:
            ready = poll.poll(None if timeout_s is None else timeout_s * 1000)
    return [descriptor for descriptor, _ in ready]
