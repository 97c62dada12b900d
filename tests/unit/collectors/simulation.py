"""Simulated generators and environments, which drive a real `Scheduler` on a simulated clock."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lucidrl.collectors.config import AsyncConfig
from lucidrl.collectors.groups import Changes, Group, Rules
from lucidrl.collectors.scheduler import Scheduler


@dataclass
class Simulation:
    """A run on simulated time: long-tailed lengths, generators that die and return, several turns.

    Every draw of a prompt, training step and drop is noted in the ledger.
    """

    rules: Rules
    seed: int = 0
    num_generators: int = 8
    train_s: float = 1.0
    refit_s: float = 0.1
    tail: float = 1.2
    """Shape of the lengths' Pareto distribution; smaller is longer-tailed."""
    longest_s: float = 60.0
    lifetime_s: float | None = None
    """Mean time until a generator dies; it returns after half of it. None: it never dies."""
    env_drops: float = 0.0
    """Probability that the environment drops a sample."""
    max_turns: int = 1
    trained: list[list[int]] = field(default_factory=list)
    """Numbers of the groups of each step."""
    staleness: Counter[int] = field(default_factory=Counter)
    removed: list[int] = field(default_factory=list)
    most_open: int = 0
    most_groups: int = 0
    num_deaths: int = 0

    def __post_init__(self) -> None:
        self.now = 0.0
        self.random = random.Random(self.seed)
        self.scheduler = Scheduler(self.rules, lambda: self.now)
        self.versions = dict.fromkeys(range(self.num_generators), 0)
        self._events: list[tuple[float, int, str, Any]] = []
        self._num_events = 0
        self._first_version: dict[Any, int] = {}
        self._is_training = False
        for number in self.versions:
            self._start_generator(number)

    def run(self, num_steps: int) -> Simulation:
        """Run until so many more steps are trained; raise if nothing can happen any more."""
        until = len(self.trained) + num_steps
        kind = "began"
        while True:
            self._act(may_take=kind not in ("died", "returned", "generated"))
            if len(self.trained) == until:
                return self
            assert self._events, f"deadlock at {self.now:.1f} s: {self.scheduler.longest()}"
            self.now, _, kind, data = heapq.heappop(self._events)
            getattr(self, f"_on_{kind}")(data)

    def _act(self, may_take: bool) -> None:
        scheduler = self.scheduler
        for _ in range(scheduler.num_wanted()):
            scheduler.add_group(f"prompt {scheduler.next_number}")
        for start in scheduler.starts():
            key = start.ticket, start.turn
            self._first_version[key] = self.versions[start.generator]
            seconds = min(self.longest_s, 0.1 * self.random.paretovariate(self.tail))
            self._after(seconds, "generated", (start.ticket, start.turn, start.generator))
        self.most_open = max(self.most_open, scheduler._num_open)
        self.most_groups = max(self.most_groups, len(scheduler.groups))
        if may_take and not self._is_training and (taken := scheduler.take()) is not None:
            groups, changes = taken
            self._note(changes)
            self._train(groups)

    def _train(self, groups: list[Group]) -> None:
        step = scheduler_step = self.scheduler.step - 1
        self.trained.append([group.number for group in groups])
        for group in groups:
            for sample in group.samples:
                if sample.phase == "finished":
                    assert sample.oldest is not None
                    self.staleness[scheduler_step - 1 - sample.oldest] += 1
        self._is_training = True
        self._after(self.train_s * self.random.uniform(0.5, 1.5), "trained", step)

    def _on_trained(self, step: int) -> None:
        self._after(self.refit_s, "refitted", step)

    def _on_refitted(self, step: int) -> None:
        self.versions = dict.fromkeys(self.versions, step)
        if self.rules.restarts_in_flight:
            self._first_version = dict.fromkeys(self._first_version, step)
        self._is_training = False
        self._note(self.scheduler.set_version(step))

    def _on_generated(self, data: Any) -> None:
        ticket, turn, generator = data
        if generator in self.scheduler._work and self.scheduler.generated(
            ticket, self._first_version.pop((ticket, turn), 0)
        ):
            self._after(self.random.expovariate(5.0), "scored", (ticket, turn))

    def _on_scored(self, data: Any) -> None:
        ticket, turn = data
        if self.random.random() < self.env_drops:
            outcome = "dropped"
        else:
            outcome = "next turn" if turn < self.max_turns and self.random.random() < 0.5 else "finished"
        self._note(self.scheduler.scored(ticket, outcome))

    def _on_died(self, number: int) -> None:
        self.num_deaths += 1
        self.scheduler.generator_lost(number)
        self._after(self.random.expovariate(2 / self.lifetime_s), "returned", number)

    def _on_returned(self, number: int) -> None:
        self._start_generator(number)

    def _start_generator(self, number: int) -> None:
        self.scheduler.generator_started(number)
        if self.lifetime_s is not None:
            self._after(self.random.expovariate(1 / self.lifetime_s), "died", number)

    def _note(self, changes: Changes) -> None:
        self.removed += [group.number for group in changes.removed]

    def _after(self, seconds: float, kind: str, data: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.now + seconds, self._num_events, kind, data))


def rules(**settings: Any) -> Rules:
    """Rules of a small run; the settings are those of `AsyncConfig` and of `Rules`."""
    own = {name: settings.pop(name) for name in list(settings) if name in AsyncConfig.model_fields}
    plain = {"prompts_per_step": 4, "samples_per_prompt": 4, "max_steps": 10**6, "rows_per_generator": 8}
    return Rules(AsyncConfig(**{"max_staleness": 1, **own}), **{**plain, **settings})
