"""Configuration of what a run records, beside `metrics.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat

from lucidrl.utils.config import Config
from lucidrl.utils.logger.config import LoggerConfig


class WandbTracking(Config):
    """Weights & Biases: every argument of `wandb.init`, and what else is kept with the run."""

    enabled: bool = False
    """Send a copy to Weights & Biases."""
    project: str = "lucidrl"
    """Project of the run."""
    name: str | None = None
    """Name of the run; by default that of its folder."""
    entity: str | None = None
    """User or team; by default the account's own."""
    mode: Literal["online", "offline", "disabled", "shared"] | None = None
    """Send while the run goes on, or keep it on disk for `wandb sync`; by default as WANDB_MODE says, else online."""
    id: str | None = None
    """Id of the run at W&B; by default the one that all trackers share."""
    group: str | None = None
    """Group of runs that this one belongs to."""
    job_type: str | None = None
    """Kind of run within its group."""
    tags: list[str] | None = None
    """Labels of the run."""
    notes: str | None = None
    """Description of the run."""
    config: dict[str, Any] | str | None = None
    """Entries of the run's config at W&B beside these settings, or a YAML file with them."""
    config_exclude_keys: list[str] | None = None
    """Keys of `config` to leave out."""
    config_include_keys: list[str] | None = None
    """Keys of `config` to keep, and no others."""
    allow_val_change: bool | None = None
    """Whether other code may change entries of the config."""
    dir: str | None = None
    """Folder of W&B's files; by default `wandb` in the run folder."""
    force: bool | None = None
    """Whether the run needs a login."""
    reinit: bool | Literal["default", "return_previous", "finish_previous", "create_new"] | None = None
    """What becomes of a W&B run that is open already; by default it stays open."""
    resume: bool | Literal["allow", "never", "must", "auto"] | None = None
    """Whether a W&B run of the same id is continued; by default it is."""
    resume_from: str | None = None
    """Moment of a W&B run to rewind it to, as `<run id>?_step=<step>`."""
    fork_from: str | None = None
    """Moment of a W&B run to begin at, as `<run id>?_step=<step>`."""
    save_code: bool | None = None
    """Whether W&B keeps the main script."""
    tensorboard: bool | None = None
    """Older name of `sync_tensorboard`."""
    sync_tensorboard: bool | None = None
    """Whether W&B copies what other code writes for TensorBoard."""
    monitor_gym: bool | None = None
    """Whether W&B keeps the videos of Gym environments."""
    settings: dict[str, Any] | None = None
    """Further settings, by the names of `wandb.Settings`."""
    log_code: bool = False
    """Keep the text files that git tracks in the working directory."""
    log_diffs: bool = False
    """Keep their uncommitted changes."""


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
            settings = {key: value for key, value in getattr(self, name).model_dump().items() if value is not None}
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
