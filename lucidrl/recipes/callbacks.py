"""Callbacks: code of a Python program that runs during training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lucidrl.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from lucidrl.algorithms.loop import Watcher
    from lucidrl.data.interfaces import LLMMessageLogType

log = logging.getLogger(__name__)


class StopTraining(Exception):  # noqa: N818 - a request, not a mistake
    """Raise this exception in a callback to stop the run after the current step, which is saved."""


@dataclass(frozen=True)
class TrainingResult:
    """What `train` returns."""

    last_step: int
    """The last completed step."""
    is_complete: bool
    """Whether all steps of the run are done; False after Ctrl-C or `StopTraining`."""
    metrics: dict[str, float]
    """Metrics of the last completed step, and of the last validation as `validation/<name>`."""
    run_folder: Path
    """Folder with settings, metrics, samples and checkpoints."""
    checkpoint: Path | None
    """The newest checkpoint; None if nothing was saved."""


class Callback:
    """Base class of callbacks; override the methods that you need.

    The driver waits for each call, so a slow callback slows the run down. An exception stops the run.

    Example:
        >>> class StopWhenSolved(Callback):
        ...     def on_validation(self, step, metrics):
        ...         if metrics["accuracy"] > 0.95:
        ...             raise StopTraining(f"accuracy {metrics['accuracy']:.3f}")
    """

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Called after every step with its metrics, such as `reward`, `loss` or `time/step_s`."""

    def on_validation(self, step: int, metrics: dict[str, float]) -> None:
        """Called after every validation; step 0 is the validation before the first step."""

    def on_save(self, step: int, folder: Path) -> None:
        """Called after every checkpoint is complete, with its folder."""

    def on_end(self, result: TrainingResult) -> None:
        """Called after the last step or an early stop; not after an error."""


class Callbacks:
    """Calls the callbacks of a run in the order of the list, and records the metrics of its steps.

    Raises:
        ConfigError: an entry is not a `Callback`.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                shown = callback.__name__ if isinstance(callback, type) else type(callback).__name__
                hint = f"pass an instance: {shown}()" if isinstance(callback, type) else "subclass lucidrl.Callback"
                raise ConfigError(f"callbacks has {shown}, which is not an instance of lucidrl.Callback; {hint}")
        self._callbacks = list(callbacks)
        self._records: dict[int, dict[str, Any]] = {}
        self.is_stop_requested = False
        self.run_folder: Path | None = None
        """Folder of the run, once it exists."""
        self.checkpoint: Path | None = None
        """The newest checkpoint that was saved so far."""
        self.announce: Callable[[str], None] = log.info

    @property
    def records(self) -> list[dict[str, Any]]:
        """One record per step, oldest first: `step`, the metrics of the step, and of its validation if any."""
        return [self._records[step] for step in sorted(self._records)]

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._records[step] = {"step": step, **metrics}
        self._call("on_step", step, dict(metrics))

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        record = self._records.setdefault(step, {"step": step})
        record |= {f"validation/{name}": value for name, value in metrics.items()}
        self._call("on_validation", step, dict(metrics))

    def on_save(self, step: int, folder: Path) -> None:
        self.checkpoint = folder
        self._call("on_save", step, folder)

    def end(self, last_step: int, max_steps: int, saved: Callable[[], Path | None]) -> TrainingResult:
        """Report the end of the run.

        Args:
            saved: returns the newest checkpoint of the run folder; called if this process saved none.
        """
        assert self.run_folder is not None
        self.is_stop_requested = False  # a later `train` continues
        metrics: dict[str, Any] = {}
        for record in self.records:
            validated = {name: value for name, value in metrics.items() if name.startswith("validation/")}
            metrics = validated | record
        metrics.pop("step", None)
        result = TrainingResult(last_step, last_step >= max_steps, metrics, self.run_folder, self.checkpoint or saved())
        self._call("on_end", result)
        return result

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            name = f"{type(callback).__name__}.{hook}"
            try:
                getattr(callback, hook)(*arguments)
            except StopTraining as request:
                self.is_stop_requested = True
                self.announce(f"{name} stops the run after this step: {request}".removesuffix(": "))
            except Exception as error:
                raise TrainingError(
                    f"the callback {name} raised {type(error).__name__}: {error}; fix it, then resume the run"
                ) from error


class WatcherWithCallbacks:
    """A watcher that passes its calls to another watcher and to the callbacks."""

    def __init__(self, watcher: Watcher, callbacks: Callbacks) -> None:
        self._watcher, self._callbacks = watcher, callbacks
        self.announce = callbacks.announce = watcher.announce

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._watcher.on_validation(step, metrics)
        self._callbacks.on_validation(step, metrics)

    def on_samples(self, step: int, message_logs: list[LLMMessageLogType], rewards: list[float]) -> None:
        self._watcher.on_samples(step, message_logs, rewards)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._watcher.on_step(step, metrics)
        self._callbacks.on_step(step, metrics)
