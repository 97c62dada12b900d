"""Configuration of a text environment and of how it is called."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from lucidrl.utils.config import Config

OnError = Literal["fail", "drop"]
Isolation = Literal["auto", "process", "none"]


class EnvConfig(Config):
    """Which environment scores completions, and on which prompts."""

    renamed: ClassVar[Mapping[str, str]] = {"deadline_s": "timeout_s"}

    name: str = "arithmetic"
    """A built-in environment, or `module:Class` of your own."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""
    prompts_file: Path | None = None
    """JSONL file of prompts; needed when the environment brings none, and used instead of its own otherwise."""
    validation_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of the prompts held out from training, chosen by a stable hash."""
    timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    """Timeout of one call of the environment. A call that blocks its worker past it is ended with the worker."""
    max_concurrency: PositiveInt = 8
    """Most calls of the environment at a time; a batch is spread evenly over them."""
    on_error: OnError = "fail"
    """What happens to a sample that cannot be scored: `fail` stops the run, `drop` leaves the sample out and counts
    it."""
    isolation: Isolation = "auto"
    """Where the environment runs. `process`: in worker processes, which the driver can kill and restart. `none`: in the
    driver, where code that blocks cannot be interrupted and code that exits ends the run. `auto`: `none` for a built-in
    environment with one worker, otherwise `process`."""
    num_workers: PositiveInt = 1
    """Worker processes, each with a copy of the environment, over which its calls are spread. One runs on the driver's
    machine; several run on the nodes of the Ray cluster if `cluster.launcher=ray`."""
    max_restarts: NonNegativeInt = 3
    """Restarts in a row of a worker that exited or timed out, without a scored batch in between; at the next loss the
    run stops, whatever `on_error` says."""

    @property
    def is_isolated(self) -> bool:
        """Whether the environment runs in worker processes."""
        if self.isolation == "auto":
            return ":" in self.name or self.num_workers > 1
        return self.isolation == "process"

    @model_validator(mode="before")
    @classmethod
    def _reads_old_name(cls, content: Any) -> Any:
        """`num_actors` is what versions before `num_workers` wrote to config.yaml; 0 stood for the driver."""
        if not isinstance(content, Mapping) or "num_actors" not in content:
            return content
        rest = {key: value for key, value in content.items() if key != "num_actors"}
        return rest if content["num_actors"] == 0 else {"num_workers": content["num_actors"], **rest}

    @model_validator(mode="after")
    def _workers_fit(self) -> Self:
        if self.num_workers > self.max_concurrency:
            raise ValueError(
                f"num_workers={self.num_workers} is more than max_concurrency={self.max_concurrency}, the most calls "
                "at a time, so some workers would be idle; raise max_concurrency or lower num_workers"
            )
        if self.num_workers > 1 and not self.is_isolated:
            raise ValueError(
                f"num_workers={self.num_workers} asks for worker processes, but isolation=none runs the environment in "
                "the driver; set isolation=process, or num_workers=1"
            )
        return self
