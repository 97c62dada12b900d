"""Configuration of what a run records, beside `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, NonNegativeInt, PositiveFloat, model_validator

from lucidrl.utils.config import Config
from lucidrl.utils.logger.config import LoggerConfig, WandbConfig, validated


class WandbTracking(Config):
    """Weights & Biases. Every other key of `WandbConfig`, such as `group` or `tags`, is a setting here too."""

    model_config = ConfigDict(extra="allow")

    enabled: bool = False
    """Send a copy to Weights & Biases. Any other argument of `wandb.init` can be set beside this one, such as
    `tracking.wandb.group`, `tags`, `notes` or `entity`."""
    project: str = "lucidrl"
    """Project of the run."""
    name: str | None = None
    """Name of the run; by default that of its folder."""
    mode: Literal["online", "offline", "disabled", "shared"] | None = None
    """Send while the run goes on, or keep it on disk for `wandb sync`; by default as WANDB_MODE says, else online."""
    log_code: bool = False
    """Keep the text files that git tracks in the working directory."""
    log_diffs: bool = False
    """Keep their uncommitted changes."""

    @model_validator(mode="after")
    def _has_arguments_of_wandb(self) -> WandbTracking:
        if self.model_extra:
            validated(WandbConfig, _set_values(self.model_extra))
        return self


class MlflowTracking(Config):
    """MLflow."""

    enabled: bool = False
    """Send a copy to MLflow."""
    tracking_uri: str | None = None
    """Server or store; by default what MLFLOW_TRACKING_URI says, else a store in the run folder."""
    experiment_name: str = "lucidrl"
    """Experiment of the run."""
    run_name: str | None = None
    """Name of the run; by default that of its folder."""


class TrackioTracking(Config):
    """Trackio."""

    enabled: bool = False
    """Keep a copy in a Trackio store in the run folder."""
    project: str = "lucidrl"
    """Project of the run."""
    name: str | None = None
    """Name of the run; by default that of its folder."""


class TrackingConfig(Config):
    """What is recorded beside `metrics.jsonl`."""

    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb: WandbTracking = WandbTracking()
    """Weights & Biases."""
    mlflow: MlflowTracking = MlflowTracking()
    """MLflow."""
    trackio: TrackioTracking = TrackioTracking()
    """Trackio."""
    monitor: bool = True
    """Record the use of CPUs, memory and GPUs: of all nodes under Ray, else of this machine."""
    monitor_interval_s: PositiveFloat = 10.0
    """Seconds between two looks at them."""
    finish_timeout_s: PositiveFloat = 10.0
    """Longest that the end of a run waits for each of these records."""

    def logger_config(self, folder: Path, run_id: str | None = None) -> LoggerConfig:
        """The settings of the `Logger` of a run in `folder`; `run_id` continues an earlier one."""
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
    """What is recorded of a language model, beside `metrics.jsonl`."""

    dump_samples_every: NonNegativeInt = 20
    """Steps between dumps of all conversations of a step to `samples/`; 0 = none."""
    print_samples_every: NonNegativeInt = 0
    """Steps between some conversations in the terminal, those of the validation at such a step; 0 = none."""
    plot_mismatch_every: NonNegativeInt = 100
    """Steps between plots of the sample whose token probabilities differ most between generation and training; 0 =
    none. With one optimizer step a step, such a plot costs a scoring pass."""


def _set_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}
