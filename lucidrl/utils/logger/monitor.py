"""Monitors: threads that collect and log the use of CPUs, memory and GPUs.

The monitor of this machine needs no Ray.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any, Optional, TypedDict

import psutil

from lucidrl.utils.logger.config import GPUMonitoringConfig, validated
from lucidrl.utils.logger.interface import LoggerInterface
from lucidrl.utils.logger.values import WarnOnce

log = logging.getLogger(__name__)

BYTES_PER_GB = 1024**3

_MOST_SNAPSHOTS = 10_000
_MIN_TIMEOUT_S, _MAX_TIMEOUT_S = 1.0, 5.0


class GpuMetricSnapshot(TypedDict):
    """The metrics of the machines at one moment."""

    step: int
    """Milliseconds since the first start of the monitor; strictly increasing."""
    metrics: dict[str, Any]
    """Numbers by name, without prefix."""


class Monitor(ABC):
    """Collects snapshots of the machines in a daemon thread and sends them to a logger.

    Per node i: `node.{i}.cpu.util` (percent of all cores), `node.{i}.mem_gb`, `node.{i}.mem_total_gb`; per GPU j of it:
    `node.{i}.gpu.{j}.util` (percent), `node.{i}.gpu.{j}.mem_gb`. A GB is 1024**3 bytes. GPU models,
    `node.{i}.gpu.{j}.type`, are text, so they are not metrics but one log message.

    A failed collection logs one warning. The monitor may be started and stopped repeatedly; the step numbers continue.

    Args:
        collection_interval: seconds between two snapshots.
        flush_interval: seconds between sending snapshots to the parent logger.
        metric_prefix: prefix of all names except the step metric's.
        step_metric: full name of the metric with the seconds since the first start.
        parent_logger: gets the snapshots; if it is a weak proxy, the monitor stops when the logger behind it is
            deleted. Without a parent logger, the latest 10,000 snapshots stay in `metrics_buffer`.
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
        """Snapshots not sent yet, oldest first."""
        self.cpu_s = 0.0
        """CPU time of the current thread so far, in seconds."""
        self._collection_interval_s = intervals["collection_interval"]
        self._flush_interval_s = intervals["flush_interval"]
        self._timeout_s = min(max(self._collection_interval_s, _MIN_TIMEOUT_S), _MAX_TIMEOUT_S)
        self._metric_prefix = metric_prefix
        self._step_metric = step_metric
        self._parent_logger = parent_logger
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._first_start_s: float | None = None
        self._last_step = -1
        self._seen_gpus: set[str] = set()
        self._warn_once = WarnOnce()
        # Reentrant: a forgotten logger may be garbage-collected, and stop its monitor, at any point of any thread.
        self._lock = threading.RLock()
        self._flushing = threading.Lock()

    @abstractmethod
    def _collect(self, metrics: bool = False, sku: bool = False) -> dict[str, Any]:
        """Collect the metrics, the GPU models, or both, within `_timeout_s`."""

    def _check(self) -> None:  # noqa: B027 - optional by design
        """Raise ConfigError if the monitor cannot work here."""

    def start(self) -> None:
        """Collect once immediately, then once per interval; does nothing if already running."""
        self._check()
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            if self._first_start_s is None:
                self._first_start_s = time.monotonic()
            # A new event: a thread that an earlier `stop` abandoned must not resume.
            self._stopping = threading.Event()
            self._thread = threading.Thread(target=self._collection_loop, name="lucidrl-monitor", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, waiting at most `_timeout_s`, and send the remaining snapshots; may be called twice."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stopping.set()
        # The monitor's thread itself calls this if it held the last reference to the parent.
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._timeout_s)
        self.flush()

    def flush(self) -> None:
        """Send the snapshots to the parent logger, in order; if it raises, the others stay for the next flush.

        Does nothing while another thread flushes.
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
                    if self.metrics_buffer[0] is snapshot:  # else a full buffer has just dropped it
                        self.metrics_buffer.popleft()
        except ReferenceError:  # the logger behind the proxy was deleted
            self._stopping.set()
        except Exception as error:
            self._warn_once("flush", "machine metrics are kept for later, the logger failed: %r", error)
        finally:
            self._flushing.release()

    def _collection_loop(self) -> None:
        """Collect, flush when due, wait; until stopped."""
        stopping = self._stopping
        next_flush_s = time.monotonic() + self._flush_interval_s
        while not stopping.is_set():
            start_s = time.monotonic()
            self._take_snapshot()
            if time.monotonic() >= next_flush_s:
                self.flush()
                next_flush_s += self._flush_interval_s
            self.cpu_s = time.thread_time()
            stopping.wait(max(0.0, start_s + self._collection_interval_s - time.monotonic()))

    def _take_snapshot(self) -> None:
        """Collect, announce new GPU models, and add the metrics to the buffer."""
        assert self._first_start_s is not None
        try:
            found = self._collect(metrics=True, sku=True)
        except Exception as error:  # any error of a driver or a cluster; the next collection may work
            self._warn_once("collect", "machine metrics cannot be read for now: %r", error)
            return
        gpu_types = {name: value for name, value in found.items() if isinstance(value, str)}
        metrics = {name: value for name, value in found.items() if name not in gpu_types}
        if new_types := [gpu_type for name, gpu_type in gpu_types.items() if name not in self._seen_gpus]:
            self._seen_gpus |= gpu_types.keys()
            counts = ", ".join(f"{count} x {gpu_type}" for gpu_type, count in Counter(new_types).items())
            log.info("GPUs seen: %s", counts)
        if not metrics:
            return
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
        """The GPU models of all nodes."""
        return self._collect(sku=True)


_FIRST_CPU_WINDOW_S = 0.1

# Readings of a GPU: (pynvml, its handle) → value.
_GPU_METRICS: dict[str, Callable[[Any, Any], Any]] = {
    "util": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "mem_gb": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / BYTES_PER_GB,
}
_GPU_SKU: dict[str, Callable[[Any, Any], Any]] = {"type": lambda nvml, gpu: nvml.nvmlDeviceGetName(gpu)}


class LocalMonitorLogger(Monitor):
    """Monitors this machine as node 0: CPU and memory, and all NVIDIA GPUs if `pynvml` and a driver are installed.

    GPUs are numbered as in NVML, which also lists those that this process may not use.
    """

    _cpu_thread: int | None = None

    def _collect(self, metrics: bool = False, sku: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = {}
        readings = (_GPU_METRICS if metrics else {}) | (_GPU_SKU if sku else {})
        if metrics:
            memory = psutil.virtual_memory()
            found["node.0.cpu.util"] = self._cpu_percent()
            found["node.0.mem_gb"] = memory.used / BYTES_PER_GB
            found["node.0.mem_total_gb"] = memory.total / BYTES_PER_GB
        if self._nvml is not None:
            for index in range(self._nvml.nvmlDeviceGetCount()):
                found |= _read_gpu(self._nvml, index, readings)
        return found

    def _cpu_percent(self) -> float:
        """Use of all cores since the last call, in percent.

        psutil keeps the previous sample per calling thread, so the first call of a thread measures for 0.1 s instead.
        """
        is_first = self._cpu_thread != threading.get_ident()
        self._cpu_thread = threading.get_ident()
        return psutil.cpu_percent(interval=_FIRST_CPU_WINDOW_S if is_first else None)

    @cached_property
    def _nvml(self) -> Any | None:
        """The module `pynvml`, initialised; None without it or without a driver."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:  # ImportError, or an error class of pynvml
            log.debug("GPUs are not monitored: %s", error)
            return None
        return pynvml


def _read_gpu(nvml: Any, index: int, readings: dict[str, Callable[[Any, Any], Any]]) -> dict[str, Any]:
    """The readings of one GPU, without those that it does not support (such as utilization under MIG)."""
    found: dict[str, Any] = {}
    with suppress(nvml.NVMLError):
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        for name, read in readings.items():
            with suppress(nvml.NVMLError):
                found[f"node.0.gpu.{index}.{name}"] = read(nvml, gpu)
    return found
