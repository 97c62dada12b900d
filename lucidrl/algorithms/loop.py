"""The training loop of all algorithms: steps with validation, logging, checkpoints, profiles and stop requests."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from lucidrl.algorithms.config import ValidationSchedule
from lucidrl.algorithms.health import HealthMonitor, RunWarning
from lucidrl.algorithms.interfaces import TrainedPolicy
from lucidrl.algorithms.saver import Saver, processes_state, restore_processes
from lucidrl.algorithms.step_clock import LOGGING, StepClock
from lucidrl.algorithms.validation import Validation, Validator
from lucidrl.data.interfaces import LLMMessageLogType
from lucidrl.profiling.recording import Recording
from lucidrl.profiling.spans import span
from lucidrl.utils.logger.fanout import Logger
from lucidrl.utils.nsys import DRIVER, ProfilablePolicy, end_gpu_profile, maybe_gpu_profile_step
from lucidrl.utils.recorded import Recorded

_log = logging.getLogger(__name__)


class Watcher(Protocol):
    """Observes a run, such as the display of the command line."""

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def on_samples(self, step: int, message_logs: list[LLMMessageLogType], rewards: list[float]) -> None: ...

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def announce(self, message: str) -> None: ...


@dataclass
class TrainingLoop:
    """Runs the steps of any algorithm, with validation, logging, checkpoints, profiles and stop requests.

    Example:
        >>> with loop.steps(self.state_dict) as steps:
        ...     for step in steps:
        ...         result = policy.train(next_batch(), loss_fn)
        ...         loop.record(step, result.metrics)
    """

    max_steps: int
    policy: TrainedPolicy
    saver: Saver
    logger: Logger
    watcher: Watcher
    validation: ValidationSchedule
    validator: Validator | None = None
    """None turns validation off."""
    profiled: Sequence[ProfilablePolicy] = ()
    """Components to profile in addition to policy and driver, such as separate generators."""
    print_samples_every: int = 0
    """Pass validation samples to the watcher at every n-th step; 0 = never."""
    health: HealthMonitor | None = None
    """Warns of a run that does not learn."""
    should_stop: Callable[[], bool] = lambda: False
    """Called between steps; if it returns True, the run stops as it does after SIGTERM."""
    step: int = 0
    """The last completed step."""
    is_validation_skipped: bool = False
    """Whether a stop request skipped the validation of the last completed step; a resumed run validates it."""
    _clock: StepClock = field(init=False)

    @contextmanager
    def steps(self, state_dict: Callable[[], Mapping[str, Any]]) -> Iterator[Iterator[int]]:
        """Yield an iterator over the remaining steps, which ends on a stop request; time, validate and save each step.

        Args:
            state_dict: returns the state of the algorithm and of this loop; called when a checkpoint is due.
        """
        self._clock = StepClock(self.logger.spent_s)
        with (
            self.saver,
            StopRequest(self.watcher.announce, should_stop=self.should_stop) as stop,
            step_profiles(self.policy, *self.profiled) as begin_profile,
        ):
            yield self._steps(state_dict, stop, begin_profile)

    def _steps(
        self, state_dict: Callable[[], Mapping[str, Any]], stop: StopRequest, begin_profile: Callable[[int], None]
    ) -> Iterator[int]:
        if self.step == 0 or self.is_validation_skipped:
            self._validate(stop)
            if stop.is_set:
                self.watcher.announce("stopped before a step was completed; there is nothing new to save")
                return
        for step in range(self.step + 1, self.max_steps + 1):
            begin_profile(step)
            self._clock.restart()
            yield step
            self.step = step
            metrics = self._validate(stop)
            is_stopped = stop.is_set  # read once: a signal between two reads must not stop the run unsaved
            self.saver.end_step(step, state_dict, metrics, last_step=self.max_steps, is_stopped=is_stopped)
            self.logger.log_metrics(self._clock.end(), step)
            if is_stopped:
                return

    def record(self, step: int, metrics: Mapping[str, float], **amounts: float) -> None:
        """Log the metrics and timings of a step and pass them to the watcher.

        Args:
            amounts: what the step processed; `tokens=512` adds the metric `tokens_per_s`.
        """
        timings = self._clock.lap()
        with span(LOGGING):
            self._log(step, metrics, timings, amounts)

    def _log(
        self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float], amounts: Mapping[str, float]
    ) -> None:
        rates = {f"{name}_per_s": amount / timings["step_s"] for name, amount in amounts.items()}
        self.logger.log_metrics({"train": {**metrics, **rates}, "time": timings}, step)
        self.watcher.on_step(step, {**metrics, **rates, **{f"time/{name}": value for name, value in timings.items()}})
        for warning in self.health.observe(step, metrics) if self.health is not None else ():
            self.warn(step, warning)

    def warn(self, step: int, warning: RunWarning) -> None:
        """Log a warning, also to warnings.jsonl."""
        _log.warning("step %d: %s", step, warning.message)
        self.logger.log_warning(warning.name, warning.message, step)

    def _validate(self, stop: StopRequest) -> dict[str, float]:
        """Validate the last completed step if validation is due and no stop is requested; return the metrics."""
        self.is_validation_skipped = False
        if self.validator is None or not self.validation.is_due(self.step, self.max_steps):
            return {}
        with span("validate"):
            found = None if stop.is_set else self.validator.validate(self.step, lambda: stop.is_set)
            if found is None or stop.is_set:
                self.is_validation_skipped = True
                return {}
            self._record_validation(found)
        return found.metrics

    def _record_validation(self, found: Validation) -> None:
        self.logger.log_metrics(found.metrics, self.step, prefix="validation")
        self.saver.check_metric(found.metrics)
        self.watcher.on_validation(self.step, found.metrics)
        if found.rollouts is not None:
            self.logger.log_samples(found.rollouts.to_samples(), self.step, "validation")
            if is_due(self.print_samples_every, self.step):
                logs = [sample.log for sample in found.rollouts.samples]
                self.watcher.on_samples(self.step, logs, found.rollouts.rewards.tolist())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loop and of the processes, except weights and optimizers, as plain values."""
        return {
            "step": self.step,
            "is_validation_skipped": self.is_validation_skipped,
            "run_id": self.logger.run_id,
            **processes_state(self.policy),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. Call this last: creating the other components of a run may draw random numbers."""
        self.step = state["step"]
        # Version 0.1.0 validated before saving.
        self.is_validation_skipped = state.get("is_validation_skipped", False)
        restore_processes(self.policy, state, self.watcher.announce)


def is_due(every: int, step: int) -> bool:
    """Whether `step` is a multiple of `every`; 0 = never."""
    return every > 0 and step % every == 0


FINISHING = "finishing this step, then saving; a second signal stops at once, without saving"


class StopRequest:
    """Turns the first Ctrl-C, SIGTERM or SIGHUP into a stop request; the second one raises KeyboardInterrupt.

    Enter this context manager in the main thread; in other threads it catches no signals. Ignored signals, such as
    SIGHUP under nohup, stay ignored.

    Args:
        what_follows: text after the name of the first signal in the announcement.
        should_stop: returns True to request a stop without a signal.
    """

    def __init__(
        self,
        announce: Callable[[str], None],
        what_follows: str = FINISHING,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._announce, self._what_follows, self._should_stop = announce, what_follows, should_stop
        self._previous: dict[int, Any] = {}
        self._is_signalled = False

    @property
    def is_set(self) -> bool:
        """Whether a stop was requested."""
        return self._is_signalled or self._should_stop()

    def __enter__(self) -> StopRequest:
        with suppress(ValueError):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_signalled:
            raise KeyboardInterrupt
        self._is_signalled = True
        # Python raises if the signal interrupts a write to the same stream; after SIGHUP the terminal may be closed.
        with suppress(RuntimeError, OSError):
            self._announce(f"{signal.Signals(number).name}: {self._what_follows}")


@contextmanager
def step_profiles(*profiled: ProfilablePolicy) -> Iterator[Callable[[int], None]]:
    """Profile the requested steps of `profiled` and of the driver; see `lucidrl.utils.nsys`.

    Yields a function to call at the start of every step, before the clock starts. Open profiles are written at exit.
    """
    # The driver comes last, because a policy in the same process records more.
    every = (*profiled, _Driver())

    def begin(step: int) -> None:
        for part in every:
            maybe_gpu_profile_step(part, step)

    try:
        yield begin
    finally:
        for part in every:
            try:
                end_gpu_profile(part)
            except Exception as failure:  # must not hide an error of the loop
                _log.warning("the profile of the last steps could not be written: %s", failure)


class _Driver(Recorded):
    """Records the spans of the driver; torch operators in this process belong to a policy."""

    def __init__(self) -> None:
        self._recording = Recording(DRIVER, operators=False)
