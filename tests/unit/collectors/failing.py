"""How tests let a collector run into a failure."""

from __future__ import annotations

import time

from lucidrl.errors import WorkerError


def collect_until_it_fails(collector, error=WorkerError):
    """The failure, and how long the consumer waited for it."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        begun = time.monotonic()
        try:
            collector.next()
        except error as failure:
            return failure, time.monotonic() - begun
    raise AssertionError("nothing failed")
