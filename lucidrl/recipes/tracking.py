"""Settings of trackers, monitoring and samples; `metrics.jsonl` is always written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, NonNegativeInt, PositiveFloat, model_validator

from lucidrl.utils.config import Config
from lucidrl.utils.logger.config import LoggerConfig, WandbConfig, validated


class WandbTracking(Config):
    """Weights & Biases; accepts every key of `WandbConfig`, such as `group` or `tags`."""

    model_config = ConfigDict(extra="allow")

    enabled: bool = False
    """Log to Weights & Biases. Every argument of `wandb.init` is a setting too, such as `tracking.wandb.group`, `tags`,
    `notes` or `entity`."""
    project: str = "lucidrl"
    """Project of the run."""
    name: str | None = None
    """Name of the run; default: the name of its folder."""
    mode: Literal["online", "offline", "disabled", "shared"] | None = None
    """Upload during the run (online), or keep files for `wandb sync` (offline); default: WANDB_MODE, else online."""
    log_code: bool = False
    """Upload the text files that git tracks in the working directory."""
    log_diffs: bool = False
    """Upload the uncommitted changes of these files."""

    @model_validator(mode="after")
    def _has_arguments_of_wandb(self) -> WandbTracking:
        if self.model_extra:
            validated(WandbConfig, _set_values(self.model_extra), prefix="")
        return self


class MlflowTracking(Config):
    """MLflow."""

    enabled: bool = False
    """Log to MLflow."""
    tracking_uri: str | None = None
    """Server or store; default: MLFLOW_TRACKING_URI, else a store in the run folder."""
    experiment_name: str = "lucidrl"
    """Experiment of the run."""
    run_name: str | None = None
    """Name of the run; default: the name of its folder."""


class TrackioTracking(Config):
    """Trackio."""

    enabled: bool = False
    """Log to a Trackio store in the run folder."""
    project: str = "lucidrl"
    """Project of the run."""
    name: str | None = None
    """Name of the run; default: the name of its folder."""


class TrackingConfig(Config):
    """Trackers and monitoring of a run."""

    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb: WandbTracking = WandbTracking()
    """Weights & Biases."""
    mlflow: MlflowTracking = MlflowTracking()
    """MLflow."""
    trackio: TrackioTracking = TrackioTracking()
    """Trackio."""
    monitor: bool = True
    """Record CPU, memory and GPU usage: of all nodes of a Ray cluster, else of this machine."""
    monitor_interval_s: PositiveFloat = 10.0
    """Seconds between two measurements of the usage."""
    finish_timeout_s: PositiveFloat = 10.0
    """Timeout of each tracker at the end of a run."""

    def logger_config(self, folder: Path, run_id: str | None = None) -> LoggerConfig:
        """Return the config of the `Logger` of a run in `folder`; `run_id` continues an earlier run."""
        config: LoggerConfig = {
            "log_dir": str(folder),
            "tensorboard_enabled": self.tensorboard,
            "monitor_gpus": self.monitor,
            "gpu_monitoring": {
                "collection_interval": self.monitor_interval_s,
                "flush_interval": self.monitor_interval_s,
            },
            "finish_timeout_s": self.finish_timeout_s,
        }
        if run_id is not None:
            config["run_id"] = run_id
        trackers: dict[str, Any] = {}
        for name in ("wandb", "mlflow", "trackio"):
            settings = _set_values(getattr(self, name).model_dump())
            trackers |= {f"{name}_enabled": settings.pop("enabled"), name: settings}
        config.update(trackers)  # type: ignore[typeddict-item]
        return config


class TextTrackingConfig(TrackingConfig):
    """Trackers, monitoring and samples of a language-model run."""

    dump_samples_every: NonNegativeInt = 20
    """Write all samples of the first and of every n-th step to `samples/`, and as a table to W&B; 0 = of the first
    step only."""
    print_samples_every: NonNegativeInt = 0
    """Print some validation samples at every n-th step, if that step is validated; 0 = never."""
    plot_mismatch_every: NonNegativeInt = 100
    """At every n-th step, plot the sample with the largest mismatch between generation and training probabilities;
    0 = never. With one optimizer step per training step, a plot costs an extra scoring pass."""


def _set_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}
