"""Output of workers: the folder of their logs, the tail of a log for errors, and copies from other nodes."""

from __future__ import annotations

import itertools
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from lucidrl.distributed.workers import process

_TAIL_LINES = 15
_LINE_CHARACTERS = 300
_TAIL_BYTES = 1 << 16
_STACK_FRAMES = 12
_DUMP_TIMEOUT_S = 2.0
_MOST_BYTES, _MOST_LAST_BYTES = 1 << 16, 1 << 20
_THREAD_HEADER = re.compile(r"^(?:Current thread|Thread) 0x.*\(most recent call first\):$", re.MULTILINE)


class WorkerLog:
    """Output of a worker since its start; the file may begin with the output of earlier runs."""

    def __init__(self, path: Path):
        self.path = path
        self._start = self.size_bytes()

    def size_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def tail(self) -> str:
        """The last lines."""
        text = self._text_from(max(self._start, self.size_bytes() - _TAIL_BYTES))
        lines = text.rstrip().splitlines()[-_TAIL_LINES:]
        # After a fatal signal Python lists every loaded extension module on one line.
        return "\n".join(f"{line[:_LINE_CHARACTERS]}…" if len(line) > _LINE_CHARACTERS else line for line in lines)

    def stack_from(self, offset: int) -> str:
        """The stack that faulthandler wrote after `offset`, innermost frame first; empty if there is none."""
        _, *stacks = _THREAD_HEADER.split(self._text_from(offset))
        if not stacks:
            return ""
        main_thread = stacks[-1]  # threads are written newest first
        frames = [line for line in main_thread.splitlines() if line.startswith("  File ")]
        frames = list(itertools.takewhile(lambda line: process.__file__ not in line, frames)) or frames
        return "\n".join(frames[:_STACK_FRAMES])

    def _text_from(self, offset: int) -> str:
        if not self.path.exists():
            return ""
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")


def wait_for_growth(logs: Iterable[tuple[WorkerLog, int]]) -> None:
    """Wait until every log has grown beyond the size paired with it, for two seconds at most."""
    until = time.monotonic() + _DUMP_TIMEOUT_S
    while time.monotonic() < until and not all(log.size_bytes() > size for log, size in logs):
        time.sleep(0.02)
    time.sleep(0.1)  # for the rest of the output


class LogFolder:
    """A folder with `<name>_N.log` for each worker N.

    Args:
        given: the folder, created at first use; by default a temporary one, kept only after a failure.
    """

    def __init__(self, given: Path | None, name: str):
        self._given, self._name = given, name

    @cached_property
    def path(self) -> Path:
        path = self._given or Path(tempfile.mkdtemp(prefix="lucidrl-workers-"))
        path.mkdir(parents=True, exist_ok=True)
        return path

    def of_worker(self, number: int) -> Path:
        return self.path / f"{self._name}_{number}.log"

    def end(self, everything_went_well: bool) -> None:
        """Remove a temporary folder, after a failure only if it is empty; may be called twice."""
        if self._given is not None or "path" not in vars(self):
            return
        if everything_went_well:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            with suppress(OSError):  # it is not empty
                self.path.rmdir()


@contextmanager
def marked(folder: Path) -> Iterator[Path]:
    """Context manager: a temporary file in the folder. A node that sees the file shares the folder."""
    file = folder / f".seen-{secrets.token_hex(8)}"
    file.touch()
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


class NewOutput:
    """New output of the workers on this machine, for the driver.

    Args:
        paths: log files of the workers, by rank.
    """

    def __init__(self, paths: Mapping[int, Path]):
        self._paths = paths
        self._sent = dict.fromkeys(paths, 0)

    def take(self, is_last: bool = False) -> dict[int, bytes]:
        """Output since the last call, by rank: at most 64 KiB per worker; with `is_last`, the newest MiB."""
        taken = {}
        for rank, path in self._paths.items():
            new_bytes = path.stat().st_size - self._sent[rank] if path.exists() else 0
            note, left_out = b"", new_bytes - _MOST_LAST_BYTES
            if is_last and left_out > 0:
                self._sent[rank] += left_out
                note = b"\n[%d bytes are left out here]\n" % left_out
            if new_bytes:
                with path.open("rb") as file:
                    file.seek(self._sent[rank])
                    content = file.read(_MOST_LAST_BYTES if is_last else _MOST_BYTES)
                self._sent[rank] += len(content)
                taken[rank] = note + content
        return taken
