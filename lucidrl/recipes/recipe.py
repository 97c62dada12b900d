"""What the command line has to know of an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from rich.table import Table

from lucidrl.recipes.configs import BaseRunConfig

if TYPE_CHECKING:
    from lucidrl.algorithms.loop import Watcher

C = TypeVar("C", bound=BaseRunConfig)


class Findings(Protocol):
    """What a check found, for a person to read."""

    def table(self) -> Table: ...


@dataclass(frozen=True)
class Recipe(Generic[C]):
    """An algorithm as `launch` and `check_run` use it."""

    name: str
    """Of the command, and of the config's part with `max_steps`."""
    schema: type[C]
    default_preset: Callable[[Sequence[str]], str | None]
    """The preset of a run that names neither preset nor file, from its overrides."""
    preflight: Callable[[C], Findings]
    """Raises for the first thing that would stop the run."""
    run: Callable[[C, Path, Watcher, bool], int]
    """Starts, or resumes, the run in its folder; returns the last completed step."""
    validated_on: str
    """What validation results are of, such as "held-out"."""
    next_commands: Callable[[C, Path], list[list[str]]]
    """Commands worth a try when the run is over."""
