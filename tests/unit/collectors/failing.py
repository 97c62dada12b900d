"""Collect until a failure, for tests."""

from __future__ import annotations

import time

from lucidrl.errors import WorkerError


def collect_until_it_fails(collector, error=WorkerError):
    """Returns the failure, and how long the consumer waited for it."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        begun = time.monotonic()
        try:
            collector.next()
        except error as failure:
            return failure, time.monotonic() - begun
    raise AssertionError("nothing failed")
