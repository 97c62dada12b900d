"""Configuration of a text environment and of how it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from lucidrl.utils.config import Config

OnError = Literal["fail", "drop"]


class EnvConfig(Config):
    """Which environment judges the answers, and on which prompts."""

    name: str = "arithmetic"
    """A built-in environment, or `module:Class` of your own."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""
    prompts_file: Path | None = None
    """JSONL file of prompts; needed when the environment brings none, and used instead of its own otherwise."""
    validation_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of the prompts held out from training, chosen by a stable hash."""
    deadline_s: float = Field(default=60.0, gt=0, le=86_400)
    """Longest time one call of the environment may take."""
    max_concurrency: PositiveInt = 8
    """Most calls of the environment at a time; a batch is spread evenly over them."""
    on_error: OnError = "fail"
    """What a sample that cannot be judged does: `fail` stops the run, `drop` leaves it out and counts it."""
    num_actors: NonNegativeInt = 0
    """Ray actors, each with a copy of the environment, over which its calls are spread; 0, it runs in this program.
    Needs `cluster.launcher=ray`."""
    max_restarts: NonNegativeInt = 3
    """How often in a row, without an answer in between, an actor that died is replaced; when one more dies in its
    place, the run stops, whatever `on_error` says."""

    @model_validator(mode="after")
    def _every_actor_has_calls(self) -> Self:
        if self.num_actors > self.max_concurrency:
            raise ValueError(
                f"num_actors={self.num_actors} is more than max_concurrency={self.max_concurrency}, the most calls at "
                "a time, so that some would have nothing to do; raise max_concurrency or lower num_actors"
            )
        return self
