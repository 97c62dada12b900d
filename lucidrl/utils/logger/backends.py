"""The trackers and monitors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lucidrl.utils.imports import require_package
from lucidrl.utils.logger.config import GPUMonitoringConfig, LoggerConfig
from lucidrl.utils.logger.interface import LoggerInterface
from lucidrl.utils.logger.mlflow import MlflowLogger
from lucidrl.utils.logger.monitor import LocalMonitorLogger, Monitor
from lucidrl.utils.logger.ray_monitor import RayGpuMonitorLogger
from lucidrl.utils.logger.tensorboard import TensorboardLogger
from lucidrl.utils.logger.trackio import TrackioLogger
from lucidrl.utils.logger.wandb import WandbLogger

TRACKERS: dict[str, Any] = {
    "tensorboard": TensorboardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
    "trackio": TrackioLogger,
}
"""Trackers by package name; their keys in `LoggerConfig` and their folders have the same names."""

_MONITORING = GPUMonitoringConfig(collection_interval=10, flush_interval=10)


def check_trackers(cfg: LoggerConfig) -> None:
    """Raise ConfigError if the package of an enabled tracker is not installed."""
    for name in _enabled(cfg):
        require_package(name, f"tracking by {name}")


def tracker_makers(cfg: LoggerConfig, log_dir: Path, run_id: str) -> list[tuple[str, Callable[[], LoggerInterface]]]:
    """Class name and factory of each enabled tracker."""
    makers: list[tuple[str, Callable[[], LoggerInterface]]] = []
    for name in _enabled(cfg):
        tracker = TRACKERS[name]
        settings: Any = cfg.get(name, {})
        if tracker is not TensorboardLogger:  # its files need no id to be continued
            settings = {"id": run_id, **settings}
        makers.append((tracker.__name__, partial(tracker, settings, log_dir=str(log_dir / name))))
    return makers


def _enabled(cfg: LoggerConfig) -> list[str]:
    return [name for name in TRACKERS if cfg.get(f"{name}_enabled")]


def make_monitor(cfg: LoggerConfig, parent: Any) -> Monitor | None:
    """The monitor of all nodes if Ray runs, else of this machine; None if `cfg` does not enable monitoring."""
    if not cfg.get("monitor_gpus"):
        return None
    ray = sys.modules.get("ray")
    intervals = cfg.get("gpu_monitoring", _MONITORING)
    settings: dict[str, Any] = {**intervals, "parent_logger": parent}
    if ray is not None and ray.is_initialized():
        return RayGpuMonitorLogger(**settings, metric_prefix="ray", step_metric="ray/ray_step")
    return LocalMonitorLogger(**settings, metric_prefix="machine", step_metric="machine/elapsed_s")
