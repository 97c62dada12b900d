"""What the scheduler of asynchronous collection knows of groups and samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lucidrl.collectors.config import AsyncConfig

Phase = Literal["waiting", "generating", "scoring", "finished", "dropped"]
DONE: tuple[Phase, ...] = ("finished", "dropped")
Outcome = Literal["next turn", "finished", "dropped"]
"""What becomes of a sample after the environment scored a completion."""


@dataclass(frozen=True)
class Rules:
    """The settings that the scheduler reads."""

    config: AsyncConfig
    prompts_per_step: int
    samples_per_prompt: int
    max_steps: int
    """Last step of the run; groups that no step would train on are not started."""
    rows_per_generator: int
    """Most samples that a generator works on at a time."""
    max_open: int | None = None
    """Most samples that are started and not done; None = no limit besides the staleness."""
    restarts_in_flight: bool = False
    """Whether a refit starts the running completions again, so that their tokens are new."""


class Ticket(NamedTuple):
    """One attempt at one sample; a result with an old ticket is ignored."""

    group: int
    sample: int
    attempt: int


class Start(NamedTuple):
    """A completion to request."""

    ticket: Ticket
    turn: int
    generator: int


@dataclass
class SampleState:
    """Where a sample is."""

    number: int
    """Number of its group."""
    index: int
    """Index in its group."""
    phase: Phase = "waiting"
    turn: int = 1
    attempt: int = 0
    oldest: int | None = None
    """Policy version of its oldest token; while its first completion is generated, a lower bound; None before."""
    generator: int | None = None
    """The generator of its last request."""
    since: float = 0.0
    """Time of the last change."""

    @property
    def ticket(self) -> Ticket:
        """The ticket of the current attempt."""
        return Ticket(self.number, self.index, self.attempt)

    @property
    def is_open(self) -> bool:
        """Whether it is started and not done."""
        return self.phase in ("generating", "scoring") or (self.phase == "waiting" and self.turn > 1)


@dataclass
class Group:
    """The samples of one prompt."""

    number: int
    prompt_id: str
    samples: list[SampleState]

    def num_in(self, *phases: Phase) -> int:
        return sum(sample.phase in phases for sample in self.samples)

    @property
    def oldest(self) -> int | None:
        """Policy version of the oldest token that would be trained on; None without tokens."""
        found = [one.oldest for one in self.samples if one.oldest is not None and one.phase != "dropped"]
        return min(found, default=None)


@dataclass
class Changes:
    """What the caller has to do with samples."""

    aborted: list[tuple[Ticket, int]] = field(default_factory=list)
    """Completions to abort, with their generators."""
    restarted: list[tuple[int, int]] = field(default_factory=list)
    """(Group, index) of samples that begin again with their prompts."""
    removed: list[Group] = field(default_factory=list)
    """Groups of which every sample was dropped; no step trains on them."""
