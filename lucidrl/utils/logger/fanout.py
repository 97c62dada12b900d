"""`Logger`: records to the run folder and to every enabled tracker."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from lucidrl.errors import ConfigError
from lucidrl.utils.logger.backends import TRACKERS, check_trackers, make_monitor, tracker_makers
from lucidrl.utils.logger.background import BackgroundWriter
from lucidrl.utils.logger.config import LoggerConfig, validated
from lucidrl.utils.logger.folders import path_inside
from lucidrl.utils.logger.interface import DrawnFigure, LoggerInterface
from lucidrl.utils.logger.jsonl import JsonlLogger, text_columns, write_rows
from lucidrl.utils.logger.redact import redacted
from lucidrl.utils.logger.token_error import token_error_figure
from lucidrl.utils.logger.values import PlainMetrics, WarnOnce, described, frozen, metric_name, plain_metrics
from lucidrl.utils.run_folder import (
    BREAKDOWN_NAME,
    ENVIRONMENT_NAME,
    LOCK_NAME,
    METRICS_NAME,
    REPORT_NAME,
    WARNINGS_NAME,
)

if TYPE_CHECKING:
    from lucidrl.utils.logger.monitor import Monitor

_MOST_WAITING_RECORDS = 10_000
# metrics.jsonl loses no line and is at most moments behind: a loop that logs faster waits for it.
_MOST_WAITING_LINES, _MAX_WAIT_S = 1000, 0.002
_MOST_WAITING_BATCHES = 16  # of rows or curves, which may be many megabytes each
_FINISH_TIMEOUT_S = 10.0
_OWN_FILES = (
    *(METRICS_NAME, WARNINGS_NAME, BREAKDOWN_NAME, ENVIRONMENT_NAME, REPORT_NAME, LOCK_NAME),
    *("hyperparams.json", "config.yaml"),
)
_OWN_NAMES = frozenset(
    {*_OWN_FILES, "checkpoints", "plots", *TRACKERS}
)  # names in a run folder that batches of rows must not use


class Logger(LoggerInterface):
    """Records to `<log_dir>/metrics.jsonl` and to every tracker that `cfg` enables.

    The constructor raises ConfigError for an unwritable run folder, a wrong setting or a missing package. After that,
    logging never stops or slows a run: callers queue a copy, each back end has a thread and a bounded queue, and lost
    records are counted and logged. The first metrics of each step include the cost of logging the previous step
    (`logger/caller_s`, `logger/background_cpu_s`) and the number of records lost so far (`logger/lost_records`).

    Args:
        cfg: where to record, see `LoggerConfig`.
        extra_backends: further back ends; the logger finishes them too.

    Example:
        >>> with Logger({"log_dir": "runs/a", "tensorboard_enabled": True}) as logger:
        ...     logger.log_metrics({"reward": 0.5}, step=1, prefix="train")
    """

    def __init__(self, cfg: LoggerConfig, extra_backends: Sequence[LoggerInterface] = ()) -> None:
        cfg = validated(LoggerConfig, cfg)
        self.run_id = cfg.get("run_id") or uuid.uuid4().hex
        """Id of the run in every tracker; a logger with the same id continues it."""
        self._log_dir = Path(cfg["log_dir"])
        self._timeout_s = cfg.get("finish_timeout_s", _FINISH_TIMEOUT_S)
        self._warn_once = WarnOnce()
        self._newest_step = -1
        self._caller_s = self._reported_caller_s = self._reported_cpu_s = 0.0
        self._lock = threading.Lock()
        check_trackers(cfg)
        try:
            jsonl = JsonlLogger(self._log_dir / METRICS_NAME)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"log_dir={cfg['log_dir']!r} cannot be written ({error}); choose another folder"
            ) from error
        self._writers: list[BackgroundWriter[Any]] = [
            BackgroundWriter(METRICS_NAME, lambda: jsonl, _MOST_WAITING_LINES, _MAX_WAIT_S)
        ]
        makers = tracker_makers(cfg, self._log_dir, self.run_id)
        makers += [(type(backend).__name__, _returning(backend)) for backend in extra_backends]
        self._writers += [BackgroundWriter(name, make, _MOST_WAITING_RECORDS) for name, make in makers]
        # A separate thread: rows and curves take long, and must not delay metrics.
        self._batches = BackgroundWriter("samples and plots", lambda: None, _MOST_WAITING_BATCHES)
        # The monitor gets a proxy: if a thread held a reference to the logger, the logger would never be collected.
        self._monitor = monitor = make_monitor(cfg, weakref.proxy(self))
        self._end = weakref.finalize(self, _end_parts, monitor, self._batches, self._writers, self._timeout_s)
        _end_with_process(self)
        if monitor is not None:
            monitor.start()

    def log_metrics(
        self, metrics: dict[str, Any], step: int, prefix: str | None = "", step_metric: str | None = None
    ) -> None:
        with self._guarded("metrics", step):
            step = _whole_number(step)
            if not isinstance(metrics, Mapping):
                raise TypeError(f"a {type(metrics).__name__} is not a mapping of names to values")
            axis = None if step_metric is None else metric_name(step_metric)
            copy, cost, warn_once = frozen(metrics), {}, self._warn_once
            if step_metric is None and step > self._newest_step:
                self._newest_step = step
                cost = self._own_cost()

            @functools.cache
            def plain() -> dict[str, Any]:  # the first back end converts for all of them, in its thread
                return plain_metrics(copy, prefix, step_metric, warn_once) | cost

            def write(backend: LoggerInterface) -> None:
                backend.log_metrics(PlainMetrics(plain()), step, "", axis)

            # Lost records are reported by training step, so not by a separate axis such as seconds.
            self._each(write, step if step_metric is None else None)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        with self._guarded("hyperparameters"):
            copy = redacted(params)
            self._each(lambda backend: backend.log_hyperparams(copy))

    def log_plot(self, figure: Any, step: int, name: str) -> None:
        """Record a matplotlib figure. It is drawn later: do not change it (closing it in pyplot is fine)."""
        with self._guarded(f"plot {name}", step):
            self._plot(lambda: figure, step, name)

    def log_batched_dict_as_jsonl(self, to_log: Mapping[str, Any], filename: str) -> None:
        """Write a batch to `<log_dir>/<filename>`, one line per row with its fields and `idx`; replaces the file.

        Token-aligned tensors are cut to the row's `input_lengths`, if the batch has them.

        Raises:
            ConfigError: if the file name leads out of the log folder, or the run itself uses it.
        """
        path = path_inside(self._log_dir, filename)
        if path.relative_to(self._log_dir.resolve()).parts[0] in _OWN_NAMES:
            raise ConfigError(
                f"the run itself uses the file name {filename!r}; choose another, for example samples/{filename}"
            )
        with self._guarded(f"rows of {filename}"):
            batch, warn_once = frozen(to_log), self._warn_once

            def write(_: None) -> None:
                try:
                    write_rows(batch, path, warn_once)
                except Exception as error:
                    raise RuntimeError(f"{filename}: {described(error)}") from error

            if not self._is_finished():
                self._batches.put(write)

    def log_samples(self, samples: Mapping[str, Any], step: int, name: str) -> None:
        """Write samples to `samples/<name>_<step>.jsonl`, and as the table `samples/<name>` to trackers with tables.

        Args:
            samples: equally long columns, among them `messages`; the table splits these into prompt and completion.
        """
        self.log_batched_dict_as_jsonl(samples, f"samples/{name}_{step}.jsonl")
        with self._guarded(f"samples of {name}", step):
            table = text_columns(samples)
            self._each(lambda backend: backend.log_table(table, step, f"samples/{name}"), step)

    def log_warning(self, name: str, message: str, step: int) -> None:
        """Append a line to `warnings.jsonl`: the step, the name of the warning, and its message."""
        with self._guarded(f"warning {name}", step):
            line = orjson.dumps(
                {"step": step, "time": time.time(), "name": name, "message": message}, option=orjson.OPT_APPEND_NEWLINE
            )
            path = self._log_dir / WARNINGS_NAME

            def write(_: None) -> None:
                with path.open("ab") as file:
                    file.write(line)

            if not self._is_finished():
                self._batches.put(write)

    def log_plot_token_mult_prob_error(self, data: dict[str, Any], step: int, name: str) -> None:
        """Plot the sample whose token probabilities differ most between generation and training.

        Reads `generation_logprobs`, `prev_logprobs`, `token_mask`, `sample_mask`, `prompt_lengths` and `full_lengths`.
        The error of a token is exp(|difference of log-probabilities|), the error of a sample is the mean over its valid
        tokens. If there is nothing to plot, the reason is logged.
        """
        with self._guarded(f"plot {name}", step):
            columns, warn_once = frozen(dict(data)), self._warn_once

            def draw() -> Any:
                figure, reason = token_error_figure(columns)
                if figure is None:
                    warn_once(f"{name}: {reason}", "plot %s of step %d is skipped: %s", name, step, reason)
                return figure

            self._plot(draw, step, name)

    def spent_s(self) -> float:
        """Seconds of callers in the logger, and CPU seconds of its threads and the monitor's, since the start."""
        background_s = sum(writer.cpu_s for writer in self._all_writers())
        return self._caller_s + background_s + (self._monitor.cpu_s if self._monitor is not None else 0.0)

    def finish(self) -> None:
        """Write the queued records and close every back end, each within its timeout; may be called twice."""
        self._end()

    def forget(self) -> None:
        """Record nothing more and leave the files to the parent; for a forked process, which has no threads."""
        self._end.detach()
        for writer in self._all_writers():
            writer.is_closed = True

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.finish()

    def __del__(self) -> None:
        """Finish a logger that was neither finished nor used in `with`."""
        if hasattr(self, "_end"):
            self.finish()

    @contextmanager
    def _guarded(self, records: str, step: Any = None) -> Iterator[None]:
        """Time what the caller spends on logging, and log any error instead of raising it."""
        start = time.perf_counter()
        try:
            yield
        except Exception as error:  # logging must not stop the run
            reason = described(error)
            of_step = "" if step is None else f" of step {step}"
            self._warn_once(f"{records}: {reason}", "the %s%s are not logged: %s", records, of_step, reason)
        with self._lock:
            self._caller_s += time.perf_counter() - start

    def _each(self, call: Callable[[LoggerInterface], None], step: int | None = None) -> None:
        if not self._is_finished():
            for writer in self._writers:
                writer.put(call, step)

    def _plot(self, make_figure: Callable[[], Any], step: int, name: str) -> None:
        """Draw a figure in the background, then send it to every back end."""
        writers, name = self._writers, metric_name(name)

        def draw(_: None) -> None:
            if (figure := make_figure()) is not None:
                drawn = DrawnFigure(figure)
                for writer in writers:
                    writer.put(lambda backend: backend.log_plot(drawn, step, name), step)

        if not self._is_finished():
            self._batches.put(draw, step)

    def _is_finished(self) -> bool:
        if not self._batches.is_closed:
            return False
        self._warn_once("finished", "the logger is finished and records nothing more")
        return True

    def _all_writers(self) -> list[BackgroundWriter[Any]]:
        return [self._batches, *self._writers]

    def _own_cost(self) -> dict[str, float]:
        """The cost of logging since the last call."""
        writers = self._all_writers()
        with self._lock:
            caller_s, self._reported_caller_s = self._caller_s - self._reported_caller_s, self._caller_s
            cpu_s = sum(writer.cpu_s for writer in writers)
            background_s, self._reported_cpu_s = cpu_s - self._reported_cpu_s, cpu_s
        return {
            "logger/caller_s": caller_s,
            "logger/background_cpu_s": background_s,
            "logger/lost_records": sum(writer.losses.count for writer in writers),
        }


def _whole_number(step: Any) -> int:
    number = int(step)
    if number != step:
        raise ValueError(f"step={step!r} is not a whole number")
    return number


def _returning(backend: LoggerInterface) -> Callable[[], LoggerInterface]:
    return lambda: backend


def _end_parts(
    monitor: Monitor | None,
    batches: BackgroundWriter[Any],
    writers: list[BackgroundWriter[Any]],
    timeout_s: float,
) -> None:
    """End the parts of a logger; also at garbage collection and at interpreter exit."""
    try:
        if monitor is not None:
            monitor.stop()
        # First the thread that draws: its plots go to the other back ends.
        for closing in ([batches], writers):
            for writer in closing:
                writer.close()
            until_s = time.monotonic() + timeout_s
            for writer in closing:
                writer.join(until_s, timeout_s)
    except BaseException:  # another Ctrl-C: do not wait, but still log the losses
        for writer in (batches, *writers):
            writer.close()
            writer.join(until_s=0.0, timeout_s=0.0)
        raise


_alive: weakref.WeakSet[Logger] = weakref.WeakSet()
_has_hooks = False


def _end_with_process(logger: Logger) -> None:
    """Finish the logger at the end of the process, and forget it in forked processes."""
    global _has_hooks
    if not _has_hooks:
        _has_hooks = True
        # This module registers exit hooks when imported, which is too late once `_finish_all` runs.
        import concurrent.futures.thread  # noqa: F401

        # The usual hooks run when threads can no longer be started; only this private function runs earlier.
        getattr(threading, "_register_atexit", atexit.register)(_finish_all)
        os.register_at_fork(after_in_child=_forget_all)
    _alive.add(logger)


def _finish_all() -> None:
    for logger in list(_alive):
        logger.finish()


def _forget_all() -> None:
    for logger in list(_alive):
        logger.forget()
    _alive.clear()
