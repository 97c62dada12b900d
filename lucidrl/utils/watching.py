"""Wait for futures while calling a health check."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait
from typing import Any

_EVERY_S = 2.0


def wait_watching(
    futures: Collection[Future[Any]],
    watch: Callable[[], None],
    *,
    timeout_s: float = float("inf"),
    until_one_raises: bool = False,
) -> set[Future[Any]]:
    """Wait until all futures are done, one raised (`until_one_raises`) or the timeout passed; return unfinished ones.

    Args:
        watch: called every few seconds; an error that it raises ends the wait.
    """
    until = time.monotonic() + timeout_s
    return_when = FIRST_EXCEPTION if until_one_raises else ALL_COMPLETED
    while True:
        remaining_s = max(0.0, until - time.monotonic())
        done, running = wait(futures, min(remaining_s, _EVERY_S), return_when)
        if not (running and remaining_s) or (until_one_raises and any(future.exception() for future in done)):
            return running
        watch()
