"""Settings that every run has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PrivateAttr

from lucidrl.algorithms.config import ValidationSchedule
from lucidrl.checkpoint.config import CheckpointConfig
from lucidrl.recipes.aliases import OTHER_NAMES
from lucidrl.recipes.profile import ProfileConfig
from lucidrl.recipes.tracking import TrackingConfig
from lucidrl.report.config import ReportConfig
from lucidrl.utils.config import Config, dump_yaml
from lucidrl.utils.layers import Origins
from lucidrl.utils.nsys import DRIVER, POLICY, worker_name

NumThreads = Annotated[int, Field(ge=1, le=1024)]
"""The upper bound catches typos: no machine has more cores."""


class RunConfig(Config):
    """Where a run writes its files."""

    root: Path = Path("runs")
    """Parent folder of all runs."""
    name: str | None = None
    """Folder of this run below `root`; default: the next free `exp_NNN` below `root/<algorithm>`."""


Arithmetic = list[tuple[str, Any, str]]
"""Rows of (quantity, value, settings that determine the value)."""


def command_of(algorithm: str) -> str:
    """Return the name of an algorithm's command."""
    return algorithm.replace("_", "-")


class BaseRunConfig(Config, ABC):
    """Settings of every run, and the facts about its algorithm that the command line uses."""

    algorithm: ClassVar[str]
    """Name of the algorithm's section of settings; see `command_of`."""
    run_class: ClassVar[str]
    """Dotted path of its `TrainingRun`; imported at use, because the imports take seconds."""
    trainer: ClassVar[str]
    """Name of its trainer class."""
    validated_on: ClassVar[str] = "held-out"
    """Label of validation results."""
    other_names = OTHER_NAMES

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the prompt order, of all sampling, and of the weights of an untrained model."""
    num_threads: NumThreads | None = None
    """CPU threads of torch in this process; default: torch decides. The number changes results in the last bits."""
    run: RunConfig = RunConfig()
    """Where the run writes its files."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written and which are kept."""
    tracking: TrackingConfig = TrackingConfig()
    """Metrics, samples and trackers."""
    validation: ValidationSchedule = ValidationSchedule()
    """When the policy is validated."""
    profile: ProfileConfig = ProfileConfig()
    """Which steps are profiled."""
    report: ReportConfig = ReportConfig()
    """The page that shows the run."""
    _references: dict[str, Any] | None = PrivateAttr(default=None)
    """Settings that refer to environment variables, unresolved."""

    _origins: Origins = PrivateAttr(default_factory=Origins)

    def with_origins(self, origins: Origins, references: dict[str, Any] | None) -> Self:
        """Return a copy with the sources of its settings; its `to_yaml` writes `references` to environment variables
        instead of their values."""
        copy = self.model_copy()
        copy._origins, copy._references = origins, references
        return copy

    @property
    def origins(self) -> Origins:
        """Where the settings come from; empty if they were not merged from layers."""
        return self._origins

    def to_yaml(self) -> str:
        """Return all settings as YAML; loading it gives an equal config."""
        return dump_yaml(self, self._references)

    @property
    def worker_names(self) -> list[str]:
        """Names of the run's processes, as profiles and `profile.workers` use them."""
        return [worker_name(POLICY, 0), DRIVER]

    @property
    def max_steps(self) -> int:
        """Training steps of the run."""
        steps: int = getattr(self, self.algorithm).max_steps
        return steps

    @property
    @abstractmethod
    def title(self) -> str:
        """Model and data of the run, for display."""

    @abstractmethod
    def arithmetic(self) -> Arithmetic:
        """Return the batch sizes and the settings that determine them."""
