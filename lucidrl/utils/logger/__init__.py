"""Logging of a run: metrics, hyperparameters, samples and figures.

Import every documented name from here; its module is imported at first use.
"""

from lucidrl.utils.imports import names_imported_at_use

_CONFIGS = "GPUMonitoringConfig LoggerConfig MlflowConfig TensorboardConfig TrackioConfig WandbConfig"
_HOMES = {
    **dict.fromkeys(_CONFIGS.split(), "lucidrl.utils.logger.config"),
    "GpuMetricSnapshot": "lucidrl.utils.logger.monitor",
    "JsonlLogger": "lucidrl.utils.logger.jsonl",
    "LocalMonitorLogger": "lucidrl.utils.logger.monitor",
    "Logger": "lucidrl.utils.logger.fanout",
    "LoggerInterface": "lucidrl.utils.logger.interface",
    "MlflowLogger": "lucidrl.utils.logger.mlflow",
    "RayGpuMonitorLogger": "lucidrl.utils.logger.ray_monitor",
    "TensorboardLogger": "lucidrl.utils.logger.tensorboard",
    "TrackioLogger": "lucidrl.utils.logger.trackio",
    "WandbLogger": "lucidrl.utils.logger.wandb",
    "_rich_logging_configured": "lucidrl.utils.logger.console",
    "configure_rich_logging": "lucidrl.utils.logger.console",
    "flatten_dict": "lucidrl.utils.logger.values",
    "get_next_experiment_dir": "lucidrl.utils.logger.folders",
    "print_message_log_samples": "lucidrl.utils.logger.console",
}

__all__ = [name for name in _HOMES if not name.startswith("_")]
__getattr__ = names_imported_at_use(__name__, _HOMES)
