"""`Logger`: every record goes to the run folder and to each tracker that is switched on."""

from __future__ import annotations

import atexit
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from lucidrl.errors import ConfigError
from lucidrl.utils.logger.backends import TRACKERS, check_trackers, make_monitor, tracker_makers
from lucidrl.utils.logger.background import BackgroundWriter
from lucidrl.utils.logger.config import LoggerConfig, validated
from lucidrl.utils.logger.folders import path_inside
from lucidrl.utils.logger.interface import LoggerInterface
from lucidrl.utils.logger.jsonl import JsonlLogger
from lucidrl.utils.logger.redact import redacted
from lucidrl.utils.logger.rows import write_rows
from lucidrl.utils.logger.token_error import token_error_figure
from lucidrl.utils.logger.tracker import DrawnFigure
from lucidrl.utils.logger.values import MetricsRecord, PlainMetrics, WarnOnce, described, frozen, metric_name

if TYPE_CHECKING:
    from lucidrl.utils.logger.monitor import Monitor

_MOST_WAITING_RECORDS = 10_000
# The run folder is complete and never far behind, so that a kill costs it moments only: a tight loop waits for it.
_MOST_WAITING_LINES, _PATIENCE_S = 1000, 0.002
_MOST_WAITING_BATCHES = 16  # of rows or curves, which may be many megabytes each
_FINISH_TIMEOUT_S = 10.0
_OWN_NAMES = frozenset(
    {"metrics.jsonl", "hyperparams.json", "config.yaml", "run.lock", "checkpoints", "plots", *TRACKERS}
)  # what a run folder has beside rows


class Logger(LoggerInterface):
    """Records to `<log_dir>/metrics.jsonl` always, and to every tracker that `cfg` enables.

    Building it fails if the run folder cannot be written, a setting is wrong or a package is missing. Afterwards
    nothing it does stops or slows a run: the caller only leaves a copy of what is to be recorded, each back end has a
    thread and a bounded queue of its own, and what it could not take is counted and named. The first metrics of each
    step carry what logging the one before cost: `logger/caller_s`, `logger/background_cpu_s` (threads of this process)
    and, in all so far, `logger/lost_records`.

    Args:
        cfg: where to record, see `LoggerConfig`.
        extra_backends: back ends of your own, fed like the others and finished with them.

    Example:
        >>> with Logger({"log_dir": "runs/a", "tensorboard_enabled": True}) as logger:
        ...     logger.log_metrics({"reward": 0.5}, step=1, prefix="train")
    """

    def __init__(self, cfg: LoggerConfig, extra_backends: Sequence[LoggerInterface] = ()) -> None:
        cfg = validated(LoggerConfig, cfg)
        self.run_id = cfg.get("run_id") or uuid.uuid4().hex
        """Names the run in every tracker; a logger with the same id goes on there."""
        self._log_dir = Path(cfg["log_dir"])
        self._timeout_s = cfg.get("finish_timeout_s", _FINISH_TIMEOUT_S)
        self._warn_once = WarnOnce()
        self._newest_step = -1
        self._caller_s = self._reported_cpu_s = 0.0
        self._lock = threading.Lock()
        check_trackers(cfg)
        # The run folder first: without the record that all others are copies of, no run starts.
        try:
            jsonl = JsonlLogger(self._log_dir / "metrics.jsonl")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"log_dir={cfg['log_dir']!r} cannot be written ({error}); choose another folder"
            ) from error
        self._writers: list[BackgroundWriter[Any]] = [
            BackgroundWriter("metrics.jsonl", lambda: jsonl, _finish, _MOST_WAITING_LINES, _PATIENCE_S)
        ]
        for name, make in tracker_makers(cfg, self._log_dir, self.run_id).items():
            self._writers.append(BackgroundWriter(name, make, _finish, _MOST_WAITING_RECORDS))
        for backend in extra_backends:
            ready = partial(_itself, backend)
            self._writers.append(BackgroundWriter(type(backend).__name__, ready, _finish, _MOST_WAITING_RECORDS))
        # Rows and curves take long to write, and must not keep metrics waiting.
        self._batches: BackgroundWriter[None] = BackgroundWriter(
            "samples and plots", lambda: None, lambda _: None, _MOST_WAITING_BATCHES
        )
        # Threads that knew the logger would keep it alive for ever: the monitor has a proxy, the writers nothing.
        monitor = make_monitor(cfg, weakref.proxy(self))
        self._end = weakref.finalize(self, _end_parts, monitor, self._batches, self._writers, self._timeout_s)
        _end_with_process(self)
        if monitor is not None:
            monitor.start()

    def log_metrics(
        self,
        metrics: dict[str, Any],
        step: int,
        prefix: Optional[str] = "",  # noqa: UP045
        step_metric: Optional[str] = None,  # noqa: UP045
    ) -> None:
        with self._guarded("metrics", step):
            step = _whole_number(step)
            axis = None if step_metric is None else metric_name(step_metric)
            record = MetricsRecord(metrics, prefix, step_metric)
            if step_metric is None and step > self._newest_step:
                self._newest_step = step
                record.add(self._own_cost())
            warn_once = self._warn_once

            def write(backend: LoggerInterface) -> None:
                own_copy = PlainMetrics(record.plain(warn_once))
                backend.log_metrics(own_copy, step, "", axis)

            # An axis of its own, such as seconds, would make no sense among the steps that a loss is told by.
            self._each(write, step if step_metric is None else None)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        with self._guarded("hyperparameters"):
            copy = redacted(params)
            self._each(lambda backend: backend.log_hyperparams(copy))

    def log_plot(self, figure: Any, step: int, name: str) -> None:
        """Record a matplotlib figure; it is drawn later, so leave it as it is (closing it in pyplot is fine)."""
        with self._guarded(f"plot {name}", step):
            self._plot(lambda: figure, step, name)

    def log_batched_dict_as_jsonl(self, to_log: Mapping[str, Any], filename: str) -> None:
        """Write the rows of a batch to `<log_dir>/<filename>`, one line a row with its fields and `idx`.

        Token-aligned tensors are cut to the row's `input_lengths` where the batch has them. An existing file is
        replaced.

        Raises:
            ConfigError: if the file name leads out of the log folder.
        """
        path = path_inside(self._log_dir, filename)
        if path.relative_to(self._log_dir.resolve()).parts[0] in _OWN_NAMES:
            raise ConfigError(f"file name {filename!r} is one that the run itself uses; choose another, as in samples/")
        with self._guarded(f"rows of {filename}"):
            batch, warn_once = frozen(to_log), self._warn_once

            def write(_: None) -> None:
                try:
                    write_rows(batch, path, warn_once)
                except Exception as error:
                    raise RuntimeError(f"{filename}: {described(error)}") from error

            if not self._is_finished():
                self._batches.put(write)

    def log_plot_token_mult_prob_error(self, data: dict[str, Any], step: int, name: str) -> None:
        """Plot the sample whose token probabilities differ most between generation and training.

        Reads `generation_logprobs`, `prev_logprobs`, `token_mask`, `sample_mask`, `prompt_lengths` and `full_lengths`.
        The error of a token is exp(|difference|), that of a sample its mean over valid tokens. Where there is nothing
        to plot, the log says why.
        """
        with self._guarded(f"plot {name}", step):
            columns, warn_once = frozen(dict(data)), self._warn_once

            def draw() -> Any:
                figure, reason = token_error_figure(columns)
                if figure is None:
                    warn_once(f"{name}: {reason}", "plot %s of step %d is skipped: %s", name, step, reason)
                return figure

            self._plot(draw, step, name)

    def finish(self) -> None:
        """Write what is pending and close every back end, each within its deadline; may be called twice."""
        self._end()

    def forget(self) -> None:
        """In a forked process, which has none of the threads: record nothing, and leave the files to the other one."""
        self._end.detach()
        for writer in self._all_writers():
            writer.is_closed = True

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.finish()

    def __del__(self) -> None:
        """A last net for a logger that nobody finished; `with` or `finish` is the way to end one."""
        if hasattr(self, "_end"):
            self.finish()

    @contextmanager
    def _guarded(self, what: str, step: Any = None) -> Iterator[None]:
        """Time what the caller spends, and turn any error into a warning."""
        start = time.perf_counter()
        try:
            yield
        except Exception as error:  # the run matters more than its record
            reason = described(error)
            self._warn_once(f"{what}: {reason}", "the %s of step %s are not logged: %s", what, step, reason)
        with self._lock:
            self._caller_s += time.perf_counter() - start

    def _each(self, call: Callable[[LoggerInterface], None], step: int | None = None) -> None:
        if not self._is_finished():
            for writer in self._writers:
                writer.put(call, step)

    def _plot(self, make_figure: Callable[[], Any], step: int, name: str) -> None:
        """Draw a figure in the background, then hand it to every back end."""
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
        self._warn_once("finished", "nothing is recorded any more: the logger is finished")
        return True

    def _all_writers(self) -> list[BackgroundWriter[Any]]:
        return [self._batches, *self._writers]

    def _own_cost(self) -> dict[str, float]:
        """What logging cost since this was last asked."""
        writers = self._all_writers()
        with self._lock:
            caller_s, self._caller_s = self._caller_s, 0.0
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
        raise ValueError(f"step={step!r} is no whole number")
    return number


def _itself(backend: LoggerInterface) -> LoggerInterface:
    return backend


def _finish(backend: LoggerInterface) -> None:
    backend.finish()


def _end_parts(
    monitor: Monitor | None,
    batches: BackgroundWriter[Any],
    writers: list[BackgroundWriter[Any]],
    timeout_s: float,
) -> None:
    """End the parts of a logger; also called when it is forgotten, or the interpreter exits."""
    try:
        if monitor is not None:
            monitor.stop()
        # Plots that are still being drawn go to the back ends, so these close later.
        for closing in ([batches], writers):
            for writer in closing:
                writer.close()
            deadline = time.monotonic() + timeout_s
            for writer in closing:
                writer.join(deadline, timeout_s)
    except BaseException:  # another Ctrl-C: nothing is waited for any more, but what is lost is still named
        for writer in (batches, *writers):
            writer.close()
            writer.join(deadline=0.0, timeout_s=0.0)
        raise


_alive: weakref.WeakSet[Logger] = weakref.WeakSet()
_has_hooks = False


def _end_with_process(logger: Logger) -> None:
    """Have the logger finished at the end of the process if it still exists then, and forgotten in forked ones."""
    global _has_hooks
    if not _has_hooks:
        _has_hooks = True
        # An import of this module at the end would be too late for the hooks of its own.
        import concurrent.futures.thread  # noqa: F401

        # While threads can still be started, which is before the usual hooks run. Nothing but this private name offers
        # that; without it, the usual hooks are a little late.
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
