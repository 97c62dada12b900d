"""Logging of a run: metrics, hyperparameters, samples and figures.

Import every documented name from here. torch, tensorboard and matplotlib are imported at first use.
"""

from typing import Any

from lucidrl.utils.logger import console as _console
from lucidrl.utils.logger.config import (
    GPUMonitoringConfig,
    LoggerConfig,
    MlflowConfig,
    TensorboardConfig,
    TrackioConfig,
    WandbConfig,
)
from lucidrl.utils.logger.console import configure_rich_logging, print_message_log_samples
from lucidrl.utils.logger.fanout import Logger
from lucidrl.utils.logger.folders import get_next_experiment_dir
from lucidrl.utils.logger.interface import LoggerInterface
from lucidrl.utils.logger.jsonl import JsonlLogger
from lucidrl.utils.logger.local_monitor import LocalMonitorLogger
from lucidrl.utils.logger.mlflow import MlflowLogger
from lucidrl.utils.logger.monitor import GpuMetricSnapshot
from lucidrl.utils.logger.ray_monitor import RayGpuMonitorLogger
from lucidrl.utils.logger.tensorboard import TensorboardLogger
from lucidrl.utils.logger.trackio import TrackioLogger
from lucidrl.utils.logger.values import flatten_dict
from lucidrl.utils.logger.wandb import WandbLogger

__all__ = [
    "GPUMonitoringConfig",
    "GpuMetricSnapshot",
    "JsonlLogger",
    "LocalMonitorLogger",
    "Logger",
    "LoggerConfig",
    "LoggerInterface",
    "MlflowConfig",
    "MlflowLogger",
    "RayGpuMonitorLogger",
    "TensorboardConfig",
    "TensorboardLogger",
    "TrackioConfig",
    "TrackioLogger",
    "WandbConfig",
    "WandbLogger",
    "configure_rich_logging",
    "flatten_dict",
    "get_next_experiment_dir",
    "print_message_log_samples",
]


def __getattr__(name: str) -> Any:
    # The flag changes, so a copy would become stale.
    if name == "_rich_logging_configured":
        return _console._rich_logging_configured
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
