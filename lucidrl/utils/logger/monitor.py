"""What both monitors of the machines share: the thread that looks at them, and handing over what it saw."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from typing import Any, Optional, TypedDict

from lucidrl.utils.logger.config import GPUMonitoringConfig, validated
from lucidrl.utils.logger.interface import LoggerInterface
from lucidrl.utils.logger.values import WarnOnce

log = logging.getLogger(__name__)

BYTES_PER_GB = 1024**3

_MOST_SNAPSHOTS = 10_000
_SHORTEST_DEADLINE_S, _LONGEST_DEADLINE_S = 1.0, 5.0


class GpuMetricSnapshot(TypedDict):
    """What one look at the machines found."""

    step: int
    """Milliseconds since the monitor was first started; every snapshot has a larger one than the last."""
    metrics: dict[str, Any]
    """Numbers by name, without prefix."""


class Monitor(ABC):
    """Looks at the machines in a daemon thread and hands what it saw to a logger.

    On every node i: `node.{i}.cpu.util` (percent of all cores), `node.{i}.mem_gb` and `node.{i}.mem_total_gb`; on each
    of its GPUs j: `node.{i}.gpu.{j}.util` (percent) and `node.{i}.gpu.{j}.mem_gb`. A GB is 1024**3 bytes. The models
    of the GPUs, `node.{i}.gpu.{j}.type`, are text and no metrics: the log names them when they are first seen.

    A look that fails costs a warning and that look. May be started and stopped repeatedly; steps go on.

    Args:
        collection_interval: seconds between two looks.
        flush_interval: seconds between handing snapshots to the parent.
        metric_prefix: prefix of all names but the step metric's.
        step_metric: full name of the metric that holds the seconds since the monitor was first started.
        parent_logger: gets the snapshots; may be a weak proxy, and the monitor ends with what it stands for. Without
            one, the latest 10,000 snapshots stay in `metrics_buffer`.
    """

    def __init__(
        self,
        collection_interval: int | float,
        flush_interval: int | float,
        metric_prefix: str,
        step_metric: str,
        parent_logger: Optional[LoggerInterface] = None,  # noqa: UP045 - the documented signature
    ) -> None:
        intervals = validated(
            GPUMonitoringConfig, {"collection_interval": collection_interval, "flush_interval": flush_interval}
        )
        self.metrics_buffer: deque[GpuMetricSnapshot] = deque(maxlen=_MOST_SNAPSHOTS)
        """Snapshots that were not handed over yet, oldest first."""
        self._collection_interval_s = intervals["collection_interval"]
        self._flush_interval_s = intervals["flush_interval"]
        self._timeout_s = min(max(self._collection_interval_s, _SHORTEST_DEADLINE_S), _LONGEST_DEADLINE_S)
        self._metric_prefix = metric_prefix
        self._step_metric = step_metric
        self._parent_logger = parent_logger
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._first_start_s: float | None = None
        self._last_step = -1
        self._gpu_types: dict[str, str] = {}
        self._warn_once = WarnOnce()
        # Reentrant: a forgotten logger may be garbage-collected, and stop its monitor, at any point of any thread.
        self._lock = threading.RLock()
        self._flushing = threading.Lock()

    @abstractmethod
    def _collect(self, metrics: bool = False, sku: bool = False) -> dict[str, Any]:
        """What there is to see now: the metrics, the models of the GPUs, or both; within `_timeout_s`."""

    def _check(self) -> None:  # noqa: B027 - optional by design
        """Refuse to start where nothing could be seen."""

    def start(self) -> None:
        """Begin to look, at once and then at every interval; a monitor that runs already goes on as it is."""
        self._check()
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                log.debug("%s is running already", type(self).__name__)
                return
            if self._first_start_s is None:
                self._first_start_s = time.monotonic()
            # A thread that an earlier `stop` gave up on keeps its own event, and cannot come back to life.
            self._stopping = threading.Event()
            self._thread = threading.Thread(target=self._collection_loop, name="lucidrl-monitor", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, waiting no longer than a look may take, and hand over the rest; may be called twice."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stopping.set()
        # It is the monitor's own thread if that held the last reference to the parent.
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._timeout_s)
        self.flush()

    def flush(self) -> None:
        """Hand the snapshots to the parent logger, in order.

        If it raises, what it did not take stays for the next time. While another thread flushes, nothing is done here.
        """
        parent = self._parent_logger
        if parent is None or not self._flushing.acquire(blocking=False):
            return
        try:
            while self.metrics_buffer:
                snapshot = self.metrics_buffer[0]
                metrics = snapshot["metrics"] | {self._step_metric: snapshot["step"] / 1000}
                parent.log_metrics(metrics, snapshot["step"], self._metric_prefix, self._step_metric)
                with self._lock:
                    if self.metrics_buffer[0] is snapshot:  # else it has just fallen out of a full buffer
                        self.metrics_buffer.popleft()
        except ReferenceError:  # the logger behind the proxy is gone, and nobody will stop us
            self._stopping.set()
        except Exception as error:
            self._warn_once("flush", "the use of the machines waits to be recorded, the logger failed: %r", error)
        finally:
            self._flushing.release()

    def _collection_loop(self) -> None:
        """Look, hand over when it is time, and wait; until stopped."""
        stopping = self._stopping
        next_flush_s = time.monotonic() + self._flush_interval_s
        while not stopping.is_set():
            look_s = time.monotonic()
            self._look()
            if time.monotonic() >= next_flush_s:
                self.flush()
                next_flush_s += self._flush_interval_s
            stopping.wait(max(0.0, look_s + self._collection_interval_s - time.monotonic()))

    def _look(self) -> None:
        """Add a snapshot, if there is anything to see."""
        try:
            found = self._collect(metrics=True, sku=True)
        except Exception as error:  # whatever a driver or a cluster may raise, the next look may do better
            self._warn_once("collect", "the use of the machines cannot be seen for now: %r", error)
            return
        gpu_types = {name: value for name, value in found.items() if isinstance(value, str)}
        metrics = {name: value for name, value in found.items() if name not in gpu_types}
        self._announce(gpu_types)
        if metrics:
            self._add_snapshot(metrics)

    def _announce(self, gpu_types: dict[str, str]) -> None:
        new = {name: gpu_type for name, gpu_type in gpu_types.items() if name not in self._gpu_types}
        if new:
            self._gpu_types |= new
            counts = Counter(new.values())
            log.info("GPUs seen: %s", ", ".join(f"{count} x {gpu_type}" for gpu_type, count in counts.items()))

    def _add_snapshot(self, metrics: dict[str, Any]) -> None:
        assert self._first_start_s is not None
        with self._lock:
            if len(self.metrics_buffer) == _MOST_SNAPSHOTS and self._parent_logger is not None:
                self._warn_once("full", "the oldest of %d unrecorded snapshots are dropped", _MOST_SNAPSHOTS)
            elapsed_ms = int((time.monotonic() - self._first_start_s) * 1000)
            self._last_step = max(self._last_step + 1, elapsed_ms)
            self.metrics_buffer.append({"step": self._last_step, "metrics": metrics})

    def _collect_metrics(self) -> dict[str, Any]:
        """The metrics of all nodes now."""
        return self._collect(metrics=True)

    def _collect_gpu_sku(self) -> dict[str, str]:
        """The models of the GPUs of all nodes."""
        return self._collect(sku=True)
