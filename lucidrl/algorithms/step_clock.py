"""StepClock: where the time of a step went, by phase of the driver and by process."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from lucidrl.profiling.spans import SpanRecorder, SpanTotal, recorder
from lucidrl.profiling.worker_times import COMMUNICATION, WorkerTimes, worker_clock
from lucidrl.utils.nsys import DRIVER, POLICY

TRAINING, OTHER = "training", "other"
LOGGING = "logging"
"""Name of the span around logger, display, callbacks and health checks; also its phase."""
_PHASES_OF_SPANS = {
    "generate": "generation",
    "score": "logprobs",
    "train": TRAINING,
    "save": "checkpoint",
    "validate": "validation",
}
"""Phases of spans whose name differs; all other spans are phases themselves."""
_WHOLE = ("validate", "save", "teacher")
"""Outermost spans that count as one phase, with everything inside them."""
_NUM_CALIBRATION_SPANS = 200


class StepClock:
    """Times steps, their phases and the processes of the run.

    A step begins at `restart`. `lap` ends the training step; then come logging, validation and checkpoint, until `end`.

    Args:
        observed_s: returns the seconds spent so far in the logger and the monitor.
    """

    def __init__(self, observed_s: Callable[[], float] = lambda: 0.0) -> None:
        self._observed_s = observed_s
        self._span_s = seconds_per_span()
        self._observed_at_end_s: float | None = None
        self._slowest: WorkerTimes | None = None
        self.restart()

    def restart(self) -> None:
        recorder.drain()
        recorder.take_exclusive()
        worker_clock.drain()
        worker_clock.take_waited_s()
        self._processes: dict[str, WorkerTimes] = defaultdict(WorkerTimes)
        self._num_spans, self._own_s = 0, 0.0
        # Logging the metrics of `end` counts for the next step.
        before_s = self._observed_at_end_s
        self._observed_before_s = self._observed_s() if before_s is None else before_s
        self._step_start = self._start = time.perf_counter()

    def lap(self) -> dict[str, float]:
        """Return the seconds since the last lap as `step_s`, and `<phase>_s` for every span that ended since.

        If the ranks of the policy are other processes, spans that the driver lacks are those of the slowest rank.
        """
        now = time.perf_counter()
        elapsed, self._start = now - self._start, now
        times = self._drain_workers()
        self._slowest = slowest_rank(times)
        in_rank = self._slowest.totals if self._slowest is not None else {}
        seconds = {name: seconds for name, (seconds, _) in in_rank.items()}
        seconds |= {name: total.seconds for name, total in self._drain_spans().items()}
        self._own_s += time.perf_counter() - now
        return {"step_s": elapsed, **{f"{name}_s": value for name, value in seconds.items()}}

    def end(self) -> dict[str, Any]:
        """Return the metrics of the whole step: exclusive phases, which sum to it, and busy time by process."""
        now = time.perf_counter()
        whole_s = now - self._step_start
        self._drain_workers()
        self._drain_spans()
        phases = phases_of(recorder.take_exclusive(), self._slowest)
        phases[OTHER] = whole_s - sum(phases.values())
        busy = {DRIVER: whole_s - worker_clock.take_waited_s()}
        busy |= {name: min(times.busy_s, whole_s) for name, times in sorted(self._processes.items())}
        communication = {name: times.communication_s for name, times in sorted(self._processes.items())}
        self._own_s += time.perf_counter() - now
        return {
            "time": {
                "whole_step_s": whole_s,
                "exclusive": _named_s(phases),
                "busy": _named_s(busy),
                "communication": _named_s({name: seconds for name, seconds in communication.items() if seconds}),
            },
            "observe": {"overhead_pct": 100 * self._overhead_s() / whole_s},
        }

    def _overhead_s(self) -> float:
        """Seconds that observing took the driver and, at the same time, the worker with most spans."""
        of_worker = max((times.num_spans for times in self._processes.values()), default=0)
        of_spans = self._span_s * (self._num_spans + of_worker)
        self._observed_at_end_s = self._observed_s()
        return self._own_s + of_spans + self._observed_at_end_s - self._observed_before_s

    def _drain_workers(self) -> dict[str, WorkerTimes]:
        times = worker_clock.drain()
        for name, of_worker in times.items():
            self._processes[name].add(of_worker)
        return times

    def _drain_spans(self) -> dict[str, SpanTotal]:
        totals = recorder.drain()
        self._num_spans += sum(total.count for total in totals.values())
        return totals


def seconds_per_span() -> float:
    """Measure what a span costs in this process."""
    scratch = SpanRecorder()
    start = time.perf_counter()
    for _ in range(_NUM_CALIBRATION_SPANS):
        with scratch.span("calibration"):
            pass
    return (time.perf_counter() - start) / _NUM_CALIBRATION_SPANS


def slowest_rank(times: Mapping[str, WorkerTimes]) -> WorkerTimes | None:
    """Return the rank that the others waited for in training; None if no rank in another process trained."""
    ranks = [of_rank for name, of_rank in times.items() if name.startswith(f"{POLICY}-") and of_rank.within("train")]
    return max(ranks, key=_training_s, default=None)


def _training_s(rank: WorkerTimes) -> float:
    within = rank.within("train")
    return sum(within.values()) - within.get(COMMUNICATION, 0.0)


def phases_of(exclusive: Mapping[tuple[str, str], float], slowest: WorkerTimes | None) -> dict[str, float]:
    """Return the seconds of the driver by phase.

    Args:
        exclusive: exclusive times of the driver; see `SpanRecorder.take_exclusive`.
        slowest: the rank in another process that the driver waited for in training; its phases split that time.
    """
    phases: dict[str, float] = defaultdict(float)
    for (outermost, name), seconds in exclusive.items():
        phase = outermost if outermost in _WHOLE else name
        phases[_PHASES_OF_SPANS.get(phase, phase)] += seconds
    if slowest is not None:
        parts = {name: seconds for name, seconds in slowest.within("train").items() if name != "train"}
        # The rank worked while the driver waited. The two clocks differ a little.
        scale = min(1.0, phases[TRAINING] / max(sum(parts.values()), 1e-9))
        for name, seconds in parts.items():
            phases[name] += scale * seconds
            phases[TRAINING] -= scale * seconds
    return dict(phases)


def _named_s(seconds: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}_s": value for name, value in seconds.items()}
