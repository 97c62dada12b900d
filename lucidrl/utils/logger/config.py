"""Configuration of the logger: TypedDicts, validated once when a logger is built."""

from typing import Any, NotRequired, TypedDict, TypeVar, get_type_hints, is_typeddict

import typing_extensions
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from lucidrl.errors import ConfigError


class TensorboardConfig(TypedDict):
    """Configuration of a `TensorboardLogger`."""

    log_dir: str
    """Folder of the event files of a logger used on its own; `Logger` always uses `<log_dir>/tensorboard`."""


class LoggerConfig(TypedDict):
    """Configuration of `Logger`."""

    log_dir: str
    """Folder of the run; `metrics.jsonl` is always written there."""
    tensorboard_enabled: bool
    """Whether TensorBoard event files are written too."""
    tensorboard: NotRequired[TensorboardConfig]
    """Settings of TensorBoard."""


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
    for key, hint in get_type_hints(schema).items():
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
