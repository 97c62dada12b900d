"""Traces that a worker on any machine records, on their way to the folder of its driver."""

from __future__ import annotations

import logging
import shutil
import tempfile
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch.profiler import profile

from lucidrl.profiling.hook import ProfileSettings
from lucidrl.profiling.trace_files import filled

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SentTrace:
    """A file, as its worker wrote it."""

    path: Path
    """Where the driver is to put it."""
    content: bytes | None
    """None if the worker could not write it."""

    def save(self, worker_idx: int) -> None:
        """Put it where it belongs, all of it or nothing; that it cannot be is a warning."""
        if self.content is None:
            _log.warning("the trace of collector worker %d is lost: it could not write any", worker_idx)
            return
        new = self.path.with_name(f".{self.path.name}-{uuid.uuid4().hex}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(self.content)
            new.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                new.unlink()
            _log.warning(
                "the trace of collector worker %d is lost: %s cannot be written (%s)", worker_idx, self.path, error
            )


class TraceOutbox:
    """The worker's end: keeps the traces of its process until they are sent."""

    def __init__(self) -> None:
        self._traces: list[SentTrace] = []

    def take(self) -> list[SentTrace]:
        """Those that have not been taken yet."""
        traces, self._traces = self._traces, []
        return traces

    def redirected(self, settings: ProfileSettings, worker_idx: int) -> ProfileSettings:
        """The same recording, whose trace comes here when it is done."""
        template = settings.path_template
        if template is None:
            return settings
        destination = filled(template, worker_idx)
        # A folder that is there while the trace is written; the suffix says whether to compress.
        here = Path(tempfile.gettempdir(), f"lucidrl-trace-{uuid.uuid4().hex}", f"trace{destination.suffix}")
        return replace(
            settings,
            save_path=str(here).replace("{", "{{").replace("}", "}}"),
            on_trace_ready=partial(self._put, here, destination, settings.on_trace_ready),
        )

    def _put(self, here: Path, destination: Path, then: Callable[[profile], object] | None, profiler: profile) -> None:
        self._traces.append(SentTrace(destination, here.read_bytes() if here.exists() else None))
        shutil.rmtree(here.parent, ignore_errors=True)
        if then is not None:
            then(profiler)
