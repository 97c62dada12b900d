"""Configuration of the logger: TypedDicts, validated when a logger is created."""

from collections.abc import Iterator
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypedDict,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import typing_extensions
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from lucidrl.errors import ConfigError
from lucidrl.utils.config import complaint

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TensorboardConfig(TypedDict):
    """Configuration of a `TensorboardLogger`."""

    log_dir: NotRequired[str]
    """Folder of the event files if you create the tracker yourself; `Logger` uses `<log_dir>/tensorboard`."""


class WandbConfig(TypedDict):
    """Configuration of a `WandbLogger`: all arguments of `wandb.init`, and `log_code` and `log_diffs`.

    See `wandb.init` for its arguments; only what differs from it is explained below.
    """

    project: NotRequired[str]
    """Default "lucidrl"."""
    name: NotRequired[str]
    """Default: name of the run folder."""
    entity: NotRequired[str]
    mode: NotRequired[Literal["online", "offline", "disabled", "shared"]]
    id: NotRequired[str]
    """A run with this id is continued. Default: a new id."""
    group: NotRequired[str]
    job_type: NotRequired[str]
    tags: NotRequired[list[str]]
    notes: NotRequired[str]
    config: NotRequired[dict[str, Any] | str]
    """Further entries of the run's config, or a YAML file with them; hyperparameters win for equal top-level keys."""
    config_exclude_keys: NotRequired[list[str]]
    config_include_keys: NotRequired[list[str]]
    allow_val_change: NotRequired[bool]
    dir: NotRequired[str]
    """Default: folder of the logger."""
    force: NotRequired[bool]
    reinit: NotRequired[bool | Literal["default", "return_previous", "finish_previous", "create_new"]]
    """Default "create_new": a run that is open already stays open."""
    resume: NotRequired[bool | Literal["allow", "never", "must", "auto"]]
    """Default "allow", unless `resume_from` or `fork_from` is set."""
    resume_from: NotRequired[str]
    fork_from: NotRequired[str]
    save_code: NotRequired[bool]
    tensorboard: NotRequired[bool]
    sync_tensorboard: NotRequired[bool]
    monitor_gym: NotRequired[bool]
    settings: NotRequired[Any]
    """`wandb.Settings`, or a mapping of its fields; overrides the settings that this logger passes to W&B."""
    log_code: NotRequired[bool]
    """Whether to save the text files that git tracks in the working directory."""
    log_diffs: NotRequired[bool]
    """Whether to save the uncommitted changes of those files."""


class MlflowConfig(TypedDict):
    """Configuration of an `MlflowLogger`."""

    tracking_uri: NotRequired[str]
    """Server or store; by default MLFLOW_TRACKING_URI, else a store in the logger's folder."""
    experiment_name: NotRequired[str]
    """Experiment of the run, "lucidrl" by default."""
    run_name: NotRequired[str]
    """Name of the run; by default that of the run folder."""
    id: NotRequired[str]
    """Id of the run, kept as a tag; a run with this tag is continued. Default: a new id."""


class TrackioConfig(TypedDict):
    """Configuration of a `TrackioLogger`."""

    project: NotRequired[str]
    """Project of the run, "lucidrl" by default."""
    name: NotRequired[str]
    """Name of the run; by default that of the run folder."""
    id: NotRequired[str]
    """Id of the run; a run with this id is continued. Default: a new id."""


class GPUMonitoringConfig(TypedDict):
    """How often machines are monitored."""

    collection_interval: Seconds
    """Seconds between two snapshots."""
    flush_interval: Seconds
    """Seconds between sending snapshots to the logger."""


class LoggerConfig(TypedDict):
    """Configuration of `Logger`."""

    log_dir: Annotated[str, Field(min_length=1)]
    """Folder of the run; `metrics.jsonl` is always written there."""
    wandb_enabled: NotRequired[bool]
    """Whether to copy the run to Weights & Biases."""
    tensorboard_enabled: NotRequired[bool]
    """Whether to write TensorBoard event files."""
    mlflow_enabled: NotRequired[bool]
    """Whether to copy the run to MLflow."""
    trackio_enabled: NotRequired[bool]
    """Whether to copy the run to Trackio."""
    wandb: NotRequired[WandbConfig]
    """Settings of Weights & Biases."""
    tensorboard: NotRequired[TensorboardConfig]
    """Settings of TensorBoard."""
    mlflow: NotRequired[MlflowConfig]
    """Settings of MLflow."""
    trackio: NotRequired[TrackioConfig]
    """Settings of Trackio."""
    monitor_gpus: NotRequired[bool]
    """Whether to record GPU, CPU and memory use: of all nodes under Ray, else of this machine."""
    gpu_monitoring: NotRequired[GPUMonitoringConfig]
    """How often to monitor; by default every 10 seconds."""
    run_id: NotRequired[str]
    """Id of the run in every tracker; trackers continue a run with this id. Default: a new id."""
    finish_timeout_s: NotRequired[Seconds]
    """Timeout of each back end at the end of a run, in seconds; 10 by default."""


T = TypeVar("T")


def validated(schema: type[T], cfg: Any, prefix: str | None = None) -> T:
    """`cfg` as the TypedDict `schema`; unknown keys are refused, and one ConfigError names all problems.

    Args:
        prefix: goes before the keys in errors; by default the name of the schema.
    """
    prefix = f"{schema.__name__}." if prefix is None else prefix
    try:
        return TypeAdapter(_strict(schema)).validate_python(cfg)
    except ValidationError as error:
        lines = [complaint(problem, _all_paths(schema), prefix) for problem in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def _strict(schema: Any) -> Any:
    """The same TypedDict, which refuses unknown keys; from typing_extensions, as pydantic needs before Python 3.12."""
    fields = {}
    for key, hint in get_type_hints(schema, include_extras=True).items():
        hint = get_args(hint)[0] if get_origin(hint) is NotRequired else hint
        strict_hint = _strict(hint) if is_typeddict(hint) else hint
        fields[key] = strict_hint if key in schema.__required_keys__ else NotRequired[strict_hint]
    make: Any = typing_extensions.TypedDict  # type checkers accept only literal fields here
    return with_config(ConfigDict(extra="forbid"))(make(schema.__name__, fields))


def _all_paths(schema: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, hint in get_type_hints(schema).items():
        yield (*above, key)
        if is_typeddict(hint):
            yield from _all_paths(hint, (*above, key))
