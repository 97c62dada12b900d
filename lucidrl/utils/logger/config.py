"""Configuration of the logger: TypedDicts, validated once when a logger is built."""

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

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TensorboardConfig(TypedDict):
    """Configuration of a `TensorboardLogger`."""

    log_dir: NotRequired[str]
    """Folder of the event files of a logger used on its own; `Logger` always uses `<log_dir>/tensorboard`."""


class WandbConfig(TypedDict):
    """Configuration of a `WandbLogger`."""

    project: NotRequired[str]
    """Project of the run, "lucidrl" by default."""
    name: NotRequired[str]
    """Name of the run; by default that of the folder above the logger's own."""
    entity: NotRequired[str]
    """User or team that the run belongs to; by default the account's own."""
    mode: NotRequired[Literal["online", "offline"]]
    """Whether the run is sent while it goes on, or kept on disk for `wandb sync`; by default as wandb itself is set."""
    id: NotRequired[str]
    """Id of the run; a run of that id is continued. By default a new one."""
    log_code: NotRequired[bool]
    """Whether the text files that git tracks in the working directory are kept with the run."""
    log_diffs: NotRequired[bool]
    """Whether the uncommitted changes of those files are kept with the run."""


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


class TrackioConfig(TypedDict):
    """Configuration of a `TrackioLogger`."""

    project: NotRequired[str]
    """Project of the run, "lucidrl" by default."""
    name: NotRequired[str]
    """Name of the run; by default that of the folder above the logger's own."""
    id: NotRequired[str]
    """Id of the run; a run of that id is continued. By default a new one."""


class GPUMonitoringConfig(TypedDict):
    """How often the machines are looked at."""

    collection_interval: Seconds
    """Seconds between two looks."""
    flush_interval: Seconds
    """Seconds between handing what was seen to the logger."""


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
    """`cfg` as the TypedDict `schema`, unknown keys refused; every complaint about it is in one ConfigError."""
    try:
        return TypeAdapter(_strict(schema)).validate_python(cfg)
    except ValidationError as error:
        raise ConfigError("\n".join(_complaint(schema, problem) for problem in error.errors())) from None


def _strict(schema: Any) -> Any:
    """The same TypedDict with unknown keys forbidden, of the kind that pydantic accepts before Python 3.12."""
    fields = {}
    for key, hint in get_type_hints(schema, include_extras=True).items():
        hint = get_args(hint)[0] if get_origin(hint) is NotRequired else hint
        strict_hint = _strict(hint) if is_typeddict(hint) else hint
        fields[key] = strict_hint if key in schema.__required_keys__ else NotRequired[strict_hint]
    make: Any = typing_extensions.TypedDict  # type checkers accept only literal fields here
    return with_config(ConfigDict(extra="forbid"))(make(schema.__name__, fields))


def _complaint(schema: type, problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"]) or "the configuration"
    place = f"{schema.__name__}: {key}"
    if problem["type"] == "missing":
        return f"{place} is required but not set; add it"
    if problem["type"] == "extra_forbidden":
        return f"{place} is not a known key; remove it or correct its spelling"
    return f"{place}={problem['input']!r} is not valid: {problem['msg']}"
