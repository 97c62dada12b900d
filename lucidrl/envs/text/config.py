"""Configuration of a text environment, its workers and its calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from lucidrl.utils.config import Config

OnError = Literal["fail", "drop"]
Isolation = Literal["auto", "process", "none"]
ALWAYS_ISOLATED = ("reasoning_gym",)
"""Built-in environments that may block: `isolation=auto` means `process` for them."""


class EnvConfig(Config):
    """Which environment scores completions."""

    name: str = "arithmetic"
    """A built-in environment, or the import path of your class, `module:Class`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""
    timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    """Timeout of one call of the environment. The driver kills a worker that blocks past it."""
    max_concurrency: PositiveInt = 8
    """Maximum number of concurrent calls; a batch is split evenly over them."""
    on_error: OnError = "fail"
    """What to do with a sample that cannot be scored: `fail` stops the run, `drop` leaves it out and counts it."""
    isolation: Isolation = "auto"
    """Where the environment runs. `process`: in worker processes, which the driver can kill and restart. `none`: in the
    driver, where code that blocks cannot be interrupted and code that exits ends the run. `auto`: `none` for a built-in
    environment with one worker (except reasoning_gym, whose scorers may block), otherwise `process`."""
    num_workers: PositiveInt = 1
    """Worker processes, each with a copy of the environment; calls are distributed over them. A single worker runs on
    the driver's machine; several run on the nodes of the Ray cluster if `cluster.launcher=ray`."""
    max_restarts: NonNegativeInt = 3
    """Maximum number of consecutive restarts of a worker that exits or times out, without a scored batch in between.
    After that the run stops, even with `on_error=drop`."""

    @property
    def is_isolated(self) -> bool:
        """Whether the environment runs in worker processes."""
        if self.isolation == "auto":
            return ":" in self.name or self.num_workers > 1 or self.name in ALWAYS_ISOLATED
        return self.isolation == "process"

    @model_validator(mode="before")
    @classmethod
    def _reads_old_name(cls, content: Any) -> Any:
        """Read `num_actors`, the name of `num_workers` in old config.yaml files; 0 meant to run in the driver."""
        if not isinstance(content, Mapping) or "num_actors" not in content:
            return content
        rest = {key: value for key, value in content.items() if key != "num_actors"}
        return rest if content["num_actors"] == 0 else {"num_workers": content["num_actors"], **rest}

    @model_validator(mode="after")
    def _workers_fit(self) -> Self:
        if self.num_workers > self.max_concurrency:
            problem = f"num_workers={self.num_workers} is more than max_concurrency={self.max_concurrency}"
            raise ValueError(f"{problem}, so some workers would be idle; lower num_workers or raise max_concurrency")
        if self.num_workers > 1 and not self.is_isolated:
            problem = f"num_workers={self.num_workers} needs worker processes, but isolation=none uses the driver"
            raise ValueError(f"{problem}; set isolation=process or num_workers=1")
        return self
