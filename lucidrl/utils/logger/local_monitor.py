"""Monitors this machine, without Ray."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any

import psutil

from lucidrl.utils.logger.monitor import BYTES_PER_GB, Monitor

log = logging.getLogger(__name__)

_FIRST_CPU_WINDOW_S = 0.1

# Readings of a GPU: (pynvml, its handle) → value.
_GPU_METRICS: dict[str, Callable[[Any, Any], Any]] = {
    "util": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "mem_gb": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / BYTES_PER_GB,
}
_GPU_SKU: dict[str, Callable[[Any, Any], Any]] = {"type": lambda nvml, gpu: nvml.nvmlDeviceGetName(gpu)}


class LocalMonitorLogger(Monitor):
    """Monitors this machine as node 0: CPU and memory, and all NVIDIA GPUs if `pynvml` and a driver are installed.

    GPUs have the numbers of NVML, whichever of them this process may use.
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
        """Use of all cores since the last call; psutil keeps that per thread, so the first call measures a moment."""
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
