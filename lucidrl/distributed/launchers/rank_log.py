"""The file with everything that a rank wrote, as its driver reads it."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable
from pathlib import Path

from lucidrl.distributed.launchers import rank_main

_TAIL_LINES = 15
_LINE_CHARACTERS = 300
_TAIL_BYTES = 1 << 16
_STACK_FRAMES = 12
_DUMP_DEADLINE_S = 2.0
_THREAD_HEADER = re.compile(r"^(?:Current thread|Thread) 0x.*\(most recent call first\):$", re.MULTILINE)


class RankLog:
    """Output of a rank since its start; the file may hold that of earlier runs before it."""

    def __init__(self, path: Path):
        self.path = path
        self._start = self.size_bytes()

    def size_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def tail(self) -> str:
        """The last lines."""
        text = self._text_from(max(self._start, self.size_bytes() - _TAIL_BYTES))
        lines = text.rstrip().splitlines()[-_TAIL_LINES:]
        # A fatal signal makes Python name every extension module that was loaded, on one line.
        return "\n".join(f"{line[:_LINE_CHARACTERS]}…" if len(line) > _LINE_CHARACTERS else line for line in lines)

    def stack_from(self, offset: int) -> str:
        """Where the worker was, innermost frame first, as faulthandler wrote it after `offset`; empty if it did not."""
        _, *stacks = _THREAD_HEADER.split(self._text_from(offset))
        if not stacks:
            return ""
        main_thread = stacks[-1]  # threads are written newest first
        frames = [line for line in main_thread.splitlines() if line.startswith("  File ")]
        frames = list(itertools.takewhile(lambda line: rank_main.__file__ not in line, frames)) or frames
        return "\n".join(frames[:_STACK_FRAMES])

    def _text_from(self, offset: int) -> str:
        if not self.path.exists():
            return ""
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")


def wait_for_growth(logs: Iterable[tuple[RankLog, int]]) -> None:
    """Wait until every log has grown beyond its given size, for a short time at most."""
    until = time.monotonic() + _DUMP_DEADLINE_S
    while time.monotonic() < until and not all(log.size_bytes() > size for log, size in logs):
        time.sleep(0.02)
    time.sleep(0.1)  # for the rest of what began to be written
