"""What the training loops share: the watcher, the end on request, the clock, the steps that are recorded."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Protocol

from lucidrl.data.interfaces import LLMMessageLogType
from lucidrl.profiling.recording import Recording
from lucidrl.profiling.spans import recorder
from lucidrl.utils.nsys import DRIVER, ProfilablePolicy, end_gpu_profile, is_recorded, maybe_gpu_profile_step

_log = logging.getLogger(__name__)


class Watcher(Protocol):
    """Watches a run from outside; the display of the command line for instance."""

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def on_samples(self, step: int, message_logs: list[LLMMessageLogType], rewards: list[float]) -> None: ...

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def announce(self, message: str) -> None: ...


class StopRequest:
    """Turns the first Ctrl-C (or SIGTERM) into a request to stop after the current step; a second one interrupts.

    A context manager for the main thread; elsewhere signals cannot be caught, and it is never set.
    """

    def __init__(self, announce: Callable[[str], None]):
        self._announce = announce
        self._previous: dict[int, Any] = {}
        self.is_set = False

    def __enter__(self) -> StopRequest:
        with suppress(ValueError):
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        name = signal.Signals(number).name
        # Python refuses to print when the signal came in the middle of a write to the same stream.
        with suppress(RuntimeError):
            self._announce(f"{name}: finishing this step, then saving; once more stops at once, without saving")


class StepClock:
    """Times a step and its phases."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        recorder.drain()
        self._start = time.perf_counter()

    def lap(self) -> dict[str, float]:
        """Seconds since the last lap: `step_s`, and `<phase>_s` for every span that ended in it."""
        now = time.perf_counter()
        elapsed, self._start = now - self._start, now
        return {"step_s": elapsed, **{f"{name}_s": total.seconds for name, total in recorder.drain().items()}}


class StepProfiles:
    """Records the steps that are asked for, of what is given and of the driver; see `lucidrl.utils.nsys`.

    A context manager around the loop: what still records at its end, or when something raises, is written then.
    """

    def __init__(self, *profiled: ProfilablePolicy):
        # The driver comes last: a policy in its process records more than it would.
        self._profiled: tuple[ProfilablePolicy, ...] = (*profiled, _Driver())

    def begin(self, step: int) -> None:
        """To be called at the start of every step, before it is timed."""
        for profiled in self._profiled:
            maybe_gpu_profile_step(profiled, step)

    def __enter__(self) -> StepProfiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for profiled in self._profiled:
            try:
                end_gpu_profile(profiled)
            except Exception as failure:  # what ends the loop is what matters
                _log.warning("what was recorded of the last steps is lost: %s", failure)


class _Driver:
    """The process that runs the loop: its spans. What torch runs there is the work of a policy."""

    def __init__(self) -> None:
        self._recording = Recording(DRIVER, operators=False)

    def start_gpu_profiling(self) -> None:
        if is_recorded(DRIVER):
            self._recording.start()

    def stop_gpu_profiling(self) -> None:
        self._recording.stop()
