"""The clock of all spans, and the measured distance between the clocks of two processes. Imports nothing heavy."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import orjson

_log = logging.getLogger(__name__)

CLOCKS_NAME = "clocks.jsonl"
"""File in the traces folder: one line per worker that the driver let record, with the offset of its clock."""
NUM_READINGS = 30
"""Readings of a clock without a shorter one that end a measurement; on a busy machine, most take long."""


def now_ns() -> int:
    """Unix time of this process in nanoseconds, on the clock of its spans."""
    return unix_ns(time.perf_counter_ns())


def unix_ns(monotonic_ns: int) -> int:
    """Convert a reading of `time.perf_counter_ns` to the clock of the spans."""
    return monotonic_ns + _anchor_ns


class ClockOffset(NamedTuple):
    """How far the clock of a process is ahead of another clock."""

    offset_ns: int
    error_ns: int
    """The true offset differs from `offset_ns` by at most this much."""

    def of_relayed(self, inner: ClockOffset) -> ClockOffset:
        """Add the offset `inner` that the measured process, a relay, has measured to a third process."""
        return ClockOffset(self.offset_ns + inner.offset_ns, self.error_ns + inner.error_ns)


def measured_offset(read: Callable[[], int], own_clock: Callable[[], int] = now_ns) -> ClockOffset:
    """Measure another clock, which `read` reads, against the clock of this process.

    The other clock was read between the start and the end of the call. The shortest call has the smallest error.
    """
    best: ClockOffset | None = None
    num_longer = 0
    while best is None or num_longer < NUM_READINGS:
        before = own_clock()
        reading = read()
        after = own_clock()
        error_ns = (after - before + 1) // 2
        num_longer += 1
        if best is None or error_ns < best.error_ns:
            best, num_longer = ClockOffset(reading - (before + after) // 2, error_ns), 0
    return best


_anchor_ns = measured_offset(time.time_ns, time.perf_counter_ns).offset_ns
"""Added to the monotonic clock, it makes Unix time that never jumps."""


def write_clock(folder: Path, process: str, pid: int, node: str | None, clock: ClockOffset) -> None:
    """Append the clock of a worker to the file in the traces folder; if that fails, log a warning."""
    line = {"process": process, "pid": pid, "node": node, **clock._asdict()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / CLOCKS_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(descriptor, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.warning("the clock of %s is not recorded: %s cannot be written (%s)", process, folder / CLOCKS_NAME, error)
