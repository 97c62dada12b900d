"""Configuration of the logger: TypedDicts, validated once when a logger is built."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NotRequired, TypeVar, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict, is_typeddict  # those that pydantic accepts before Python 3.12

from lucidrl.errors import ConfigError
from lucidrl.utils.config import complaint

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_strict = with_config(ConfigDict(extra="forbid"))


@_strict
class TensorboardConfig(TypedDict):
    """Configuration of a `TensorboardLogger`."""

    log_dir: NotRequired[str]
    """Folder of the event files of a logger used on its own; `Logger` always uses `<log_dir>/tensorboard`."""


@_strict
class WandbConfig(TypedDict):
    """Configuration of a `WandbLogger`: every argument of `wandb.init`, passed on as it is, and two of our own."""

    project: NotRequired[str]
    """Project of the run, "lucidrl" by default."""
    name: NotRequired[str]
    """Name of the run; by default that of the folder above the logger's own."""
    entity: NotRequired[str]
    """User or team that the run belongs to; by default the account's own."""
    mode: NotRequired[Literal["online", "offline", "disabled", "shared"]]
    """Whether the run is sent while it goes on, or kept on disk for `wandb sync`; by default as wandb itself is set."""
    id: NotRequired[str]
    """Id of the run; a run of that id is continued. By default a new one."""
    group: NotRequired[str]
    """Group of runs that this one belongs to."""
    job_type: NotRequired[str]
    """Kind of run within its group."""
    tags: NotRequired[list[str]]
    """Labels of the run."""
    notes: NotRequired[str]
    """Description of the run."""
    config: NotRequired[dict[str, Any] | str]
    """Entries of the run's config beside its hyperparameters, or a YAML file with them; of equal top-level keys, the
    hyperparameters win."""
    config_exclude_keys: NotRequired[list[str]]
    """Keys of `config` to leave out."""
    config_include_keys: NotRequired[list[str]]
    """Keys of `config` to keep, and no others."""
    allow_val_change: NotRequired[bool]
    """Whether other code may change entries of the config."""
    dir: NotRequired[str]
    """Folder of W&B's files; by default the logger's own."""
    force: NotRequired[bool]
    """Whether the run needs a login."""
    reinit: NotRequired[bool | Literal["default", "return_previous", "finish_previous", "create_new"]]
    """What becomes of a run that is open already; by default it stays open."""
    resume: NotRequired[bool | Literal["allow", "never", "must", "auto"]]
    """Whether a run of the same id is continued; "allow" by default, unless a run is resumed or forked from."""
    resume_from: NotRequired[str]
    """Moment of a run to rewind it to, as `<run id>?_step=<step>`."""
    fork_from: NotRequired[str]
    """Moment of a run to begin at, as `<run id>?_step=<step>`."""
    save_code: NotRequired[bool]
    """Whether W&B keeps the main script."""
    tensorboard: NotRequired[bool]
    """Older name of `sync_tensorboard`."""
    sync_tensorboard: NotRequired[bool]
    """Whether W&B copies what other code writes for TensorBoard."""
    monitor_gym: NotRequired[bool]
    """Whether W&B keeps the videos of Gym environments."""
    settings: NotRequired[Any]
    """Further settings, as a mapping or `wandb.Settings`; they win over those that this logger chooses."""
    log_code: NotRequired[bool]
    """Whether the text files that git tracks in the working directory are kept with the run."""
    log_diffs: NotRequired[bool]
    """Whether the uncommitted changes of those files are kept with the run."""


@_strict
class MlflowConfig(TypedDict):
    """Configuration of an `MlflowLogger`."""

    tracking_uri: NotRequired[str]
    """Server or store; by default what MLFLOW_TRACKING_URI says, else a store in the logger's own folder."""
    experiment_name: NotRequired[str]
    """Experiment of the run, "lucidrl" by default."""
    run_name: NotRequired[str]
    """Name of the run; by default that of the folder above the logger's own."""
    id: NotRequired[str]
    """Our id of the run, kept as a tag; a run with that tag is continued. By default a new one."""


@_strict
class TrackioConfig(TypedDict):
    """Configuration of a `TrackioLogger`."""

    project: NotRequired[str]
    """Project of the run, "lucidrl" by default."""
    name: NotRequired[str]
    """Name of the run; by default that of the folder above the logger's own."""
    id: NotRequired[str]
    """Id of the run; a run of that id is continued. By default a new one."""


@_strict
class GPUMonitoringConfig(TypedDict):
    """How often the machines are looked at."""

    collection_interval: Seconds
    """Seconds between two looks."""
    flush_interval: Seconds
    """Seconds between handing what was seen to the logger."""


@_strict
class LoggerConfig(TypedDict):
    """Configuration of `Logger`."""

    log_dir: Annotated[str, Field(min_length=1)]
    """Folder of the run; `metrics.jsonl` is always written there."""
    wandb_enabled: NotRequired[bool]
    """Whether Weights & Biases gets a copy."""
    tensorboard_enabled: NotRequired[bool]
    """Whether TensorBoard event files are written too."""
    mlflow_enabled: NotRequired[bool]
    """Whether MLflow gets a copy."""
    trackio_enabled: NotRequired[bool]
    """Whether Trackio gets a copy."""
    wandb: NotRequired[WandbConfig]
    """Settings of Weights & Biases."""
    tensorboard: NotRequired[TensorboardConfig]
    """Settings of TensorBoard."""
    mlflow: NotRequired[MlflowConfig]
    """Settings of MLflow."""
    trackio: NotRequired[TrackioConfig]
    """Settings of Trackio."""
    monitor_gpus: NotRequired[bool]
    """Whether the use of GPUs, CPUs and memory is recorded: of all nodes under Ray, else of this machine."""
    gpu_monitoring: NotRequired[GPUMonitoringConfig]
    """How often; by default every 10 seconds."""
    run_id: NotRequired[str]
    """Id of the run for every tracker, so that a resumed run goes on in the same place; by default a new one."""
    finish_timeout_s: NotRequired[Seconds]
    """Longest that the end of a run waits for each back end; 10 by default."""


T = TypeVar("T")


def validated(schema: type[T], cfg: Any) -> T:
    """`cfg` as the TypedDict `schema`; unknown keys are refused, and one ConfigError names all problems."""
    try:
        return TypeAdapter(schema).validate_python(cfg)
    except ValidationError as error:
        lines = [complaint(problem, _all_paths(schema), f"{schema.__name__}.") for problem in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def _all_paths(schema: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, hint in get_type_hints(schema).items():
        yield (*above, key)
        if is_typeddict(hint):
            yield from _all_paths(hint, (*above, key))
