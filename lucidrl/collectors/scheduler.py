"""The rules of asynchronous collection: what to start, what to train on, what is stale.

Pure: no threads, no processes, no tensors, and the caller passes the clock. `GroupsInFlight` drives it.

Groups are numbered in the order in which their prompts are drawn. A step S trains weights of version S - 1 and makes
version S. It may train on tokens of version S - 1 - max_staleness or newer.

- A group starts only if the steps up to `version + 1 + max_staleness` have space for it beside all earlier groups. So
  every group can be trained before its first token is too old.
- A step takes the complete groups that expire first, in the order of their numbers. It does not wait for a group that a
  later step may still train on. With `stale_samples=wait` it waits for a group if the steps left before the group
  expires have no space for it.
- A sample with a token that is too old for the next step is never trained on: it is dropped or generated again.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from lucidrl.collectors.groups import DONE, Changes, Group, Outcome, Phase, Rules, SampleState, Start, Ticket
from lucidrl.errors import RefitError


class Scheduler:
    """Schedules the samples of a run; see the rules at the top of this module.

    Args:
        clock: returns seconds; only `longest` reads them.
    """

    def __init__(self, rules: Rules, clock: Callable[[], float]) -> None:
        self.rules = rules
        self.version = 0
        """Version of the newest weights."""
        self.step = 1
        """The next step that takes groups."""
        self.groups: dict[int, Group] = {}
        """Groups that are started or complete, and not yet taken, by number."""
        self.counts: Counter[str] = Counter(dropped=0, regenerated=0)
        """Samples dropped, and samples generated again because they were stale, so far."""
        self.dropped_prompts: list[tuple[int, str]] = []
        """(Number, prompt id) of groups that no step trains on, because every sample was dropped."""
        self.next_number = 0
        self._clock = clock
        self._work: dict[int, dict[tuple[int, int], SampleState]] = {}
        """Generator → samples that it works on, by (group, index)."""
        self._in_phase: Counter[Phase] = Counter()
        self._num_open = 0
        self._fresh: list[tuple[int, int]] = []
        """Heap of waiting samples that are not open: (group, index)."""
        self._continuing: list[tuple[int, int]] = []
        """Heap of waiting samples between two turns."""

    # Groups.

    def num_wanted(self) -> int:
        """How many more groups may start now."""
        last_step = min(self.version + 1 + self.rules.config.max_staleness, self.rules.max_steps)
        return max(0, self.rules.prompts_per_step * (last_step - self.step + 1) - len(self.groups))

    def add_group(self, prompt_id: str) -> int:
        """Add the group of the next prompt; return its number."""
        number, self.next_number = self.next_number, self.next_number + 1
        now, size = self._clock(), self.rules.samples_per_prompt
        samples = [SampleState(number, index, since=now) for index in range(size)]
        self._insert(Group(number, prompt_id, samples))
        return number

    def take(self) -> tuple[list[Group], Changes] | None:
        """Return the groups of the next step, in order, and what to abort; None while the step has to wait."""
        number = self.rules.prompts_per_step
        ready = sorted((self._expires(group), group.number) for group in self.groups.values() if self._is_ready(group))
        if len(ready) < number:
            return None
        chosen = {key for _, key in ready[:number]}
        if self.rules.config.stale_samples == "wait" and self._has_to_wait(chosen):
            return None
        taken, changes = [self.groups[key] for key in sorted(chosen)], Changes()
        for group in taken:
            for sample in group.samples:
                if sample.phase not in DONE:
                    self._drop(sample, changes)
            oldest = group.oldest
            assert oldest is not None
            assert oldest >= self.step - 1 - self.rules.config.max_staleness, "a stale group was kept"
            self._remove(group)
        self.step += 1
        return taken, changes

    def _is_ready(self, group: Group) -> bool:
        finished = group.num_in("finished")
        if group.num_in(*DONE) == len(group.samples):
            return finished > 0
        return finished >= math.ceil(self.rules.config.group_fraction * len(group.samples))

    def _expires(self, group: Group) -> int:
        """The last step that may train on the group."""
        oldest = group.oldest
        return (self.version if oldest is None else oldest) + 1 + self.rules.config.max_staleness

    def _has_to_wait(self, chosen: Collection[int]) -> bool:
        """Whether another group would expire untrained if the next step takes these, and one of these expires later.
        Without the second condition, a run resumed with a smaller bound may wait for good."""
        rest = sorted(self._expires(group) for key, group in self.groups.items() if key not in chosen)
        size = self.rules.prompts_per_step
        fits = all(count <= size * (expires - self.step) for count, expires in enumerate(rest, start=1))
        return not fits and rest[0] < max(self._expires(self.groups[key]) for key in chosen)

    # Samples.

    def starts(self) -> list[Start]:
        """Assign waiting samples to generators; return the completions to request now."""
        found = []
        while (free := self._least_loaded()) is not None:
            heap = self._continuing
            if not self._has_waiting(heap):
                heap = self._fresh
                if not self._has_waiting(heap) or not self._may_open():
                    break
            number, index = heapq.heappop(heap)
            found.append(self._start(self.groups[number].samples[index], free))
        return found

    def generated(self, ticket: Ticket, oldest: int) -> bool:
        """Note a completion, whose oldest token has this policy version; return False if its ticket is old. Raise
        RefitError if the token is older than the weights that the generator had."""
        sample = self._sample(ticket, "generating")
        if sample is None:
            return False
        if sample.oldest is not None and oldest < sample.oldest:
            raise RefitError(
                f"generator {sample.generator} has version {sample.oldest} of the weights, but completed a sample with "
                f"version {oldest}; this is a fault of the engine"
            )
        self._move(sample, "scoring")
        known = sample.oldest if sample.turn > 1 else None  # of the first turn it was a lower bound
        sample.oldest = oldest if known is None else min(known, oldest)
        return True

    def is_scoring(self, ticket: Ticket) -> bool:
        """Whether a step result for this ticket is awaited; if not, the sample is dropped or begins again."""
        return self._sample(ticket, "scoring") is not None

    def scored(self, ticket: Ticket, outcome: Outcome) -> Changes:
        """Note the step result of the environment; one with an old ticket is ignored."""
        sample, changes = self._sample(ticket, "scoring"), Changes()
        if sample is None:
            return changes
        if outcome == "next turn":
            self._wait(sample, sample.turn + 1)
            return changes
        self._move(sample, outcome)
        self._remove_if_lost(self.groups[ticket.group], changes)
        return changes

    def set_version(self, version: int) -> Changes:
        """Note a refit; drop or restart what the next step may not train on."""
        self.version, changes = version, Changes()
        for group in list(self.groups.values()):
            for sample in group.samples:
                if self.rules.restarts_in_flight and sample.phase == "generating" and sample.turn == 1:
                    sample.oldest = version
                if sample.oldest is None or sample.phase == "dropped":
                    continue
                if sample.oldest < version - self.rules.config.max_staleness:
                    if self.rules.config.stale_samples == "drop":
                        self._drop(sample, changes)
                    else:
                        self._restart(sample, changes)
            self._remove_if_lost(group, changes)
        return changes

    # Generators.

    def generator_started(self, number: int) -> None:
        self._work.setdefault(number, {})

    def generator_lost(self, number: int) -> None:
        """Let its samples wait again at their turn; other generators take them."""
        for sample in self._work.pop(number, {}).values():
            sample.attempt += 1
            self._wait(sample)
            sample.generator = None
            if sample.turn == 1:
                sample.oldest = None

    # What to show and to save.

    def num_in(self, phase: Phase) -> int:
        """Samples in a phase."""
        return self._in_phase[phase]

    @property
    def num_complete(self) -> int:
        """Groups that a step could take."""
        return sum(self._is_ready(group) for group in self.groups.values())

    def longest(self) -> str:
        """Describe the sample of the oldest unfinished group that has been in its phase for longest."""
        for group in self.groups.values():
            open_samples = [(one.since, index) for index, one in enumerate(group.samples) if one.phase not in DONE]
            if open_samples:
                since, index = min(open_samples)
                sample = group.samples[index]
                where = f" on generator {sample.generator}" if sample.phase == "generating" else ""
                return (
                    f"sample {index} of group {group.number} (prompt {group.prompt_id!r}) has been "
                    f"{sample.phase}{where} for {self._clock() - since:.0f} s"
                )
        return "no sample is in progress"

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values. A sample that is not done begins again after a resume."""
        return {
            "version": self.version,
            "step": self.step,
            "next_number": self.next_number,
            "counts": dict(self.counts),
            "dropped_prompts": [list(entry) for entry in self.dropped_prompts],
            "groups": [
                {
                    "number": group.number,
                    "prompt_id": group.prompt_id,
                    "samples": [
                        {"phase": one.phase, "oldest": one.oldest} if one.phase in DONE else None
                        for one in group.samples
                    ],
                }
                for group in self.groups.values()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, with any number of generators."""
        self.version, self.step, self.next_number = state["version"], state["step"], state["next_number"]
        self.counts = Counter(state["counts"])
        self.dropped_prompts = [(number, prompt_id) for number, prompt_id in state["dropped_prompts"]]
        self.groups, self._fresh, self._continuing, self._in_phase, self._num_open = {}, [], [], Counter(), 0
        self._work = {number: {} for number in self._work}
        now = self._clock()
        for saved in state["groups"]:
            samples = [
                SampleState(saved["number"], index, since=now, **(one or {}))
                for index, one in enumerate(saved["samples"])
            ]
            self._insert(Group(saved["number"], saved["prompt_id"], samples))

    # Transitions.

    def _insert(self, group: Group) -> None:
        self.groups[group.number] = group
        for index, sample in enumerate(group.samples):
            self._in_phase[sample.phase] += 1
            if sample.phase == "waiting":
                heapq.heappush(self._fresh, (group.number, index))

    def _remove(self, group: Group) -> None:
        del self.groups[group.number]
        for sample in group.samples:
            self._in_phase[sample.phase] -= 1

    def _move(self, sample: SampleState, phase: Phase, turn: int | None = None) -> None:
        if sample.phase == "generating" and sample.generator in self._work:
            del self._work[sample.generator][sample.number, sample.index]
        self._in_phase[sample.phase] -= 1
        self._num_open -= sample.is_open
        sample.phase, sample.turn, sample.since = phase, turn or sample.turn, self._clock()
        self._num_open += sample.is_open
        self._in_phase[phase] += 1

    def _wait(self, sample: SampleState, turn: int | None = None) -> None:
        self._move(sample, "waiting", turn)
        heapq.heappush(self._continuing if sample.turn > 1 else self._fresh, (sample.number, sample.index))

    def _start(self, sample: SampleState, free: int) -> Start:
        generator = self._preferred(sample, free)
        self._move(sample, "generating")
        sample.generator = generator
        self._work[generator][sample.number, sample.index] = sample
        if sample.oldest is None:
            sample.oldest = self.version  # the generator may be ahead, never behind
        return Start(sample.ticket, sample.turn, generator)

    def _drop(self, sample: SampleState, changes: Changes) -> None:
        self._note_abort(sample, changes)
        self._move(sample, "dropped")
        sample.attempt += 1
        self.counts["dropped"] += 1

    def _restart(self, sample: SampleState, changes: Changes) -> None:
        self._note_abort(sample, changes)
        sample.oldest = None
        sample.attempt += 1
        self._wait(sample, turn=1)
        changes.restarted.append((sample.number, sample.index))
        self.counts["regenerated"] += 1

    def _note_abort(self, sample: SampleState, changes: Changes) -> None:
        if sample.phase == "generating":
            assert sample.generator is not None
            changes.aborted.append((sample.ticket, sample.generator))

    def _remove_if_lost(self, group: Group, changes: Changes) -> None:
        if group.num_in("dropped") == len(group.samples):
            self._remove(group)
            self.dropped_prompts.append((group.number, group.prompt_id))
            changes.removed.append(group)

    # Look-ups.

    def _sample(self, ticket: Ticket, phase: Phase) -> SampleState | None:
        """The sample of a ticket; None if the ticket is old."""
        group = self.groups.get(ticket.group)
        if group is None:
            return None
        sample = group.samples[ticket.sample]
        return sample if sample.attempt == ticket.attempt and sample.phase == phase else None

    def _has_waiting(self, heap: list[tuple[int, int]]) -> bool:
        """Drop entries of samples that no longer wait; return whether one is left."""
        while heap:
            number, index = heap[0]
            group = self.groups.get(number)
            is_continuing = heap is self._continuing
            if group is not None:
                sample = group.samples[index]
                if sample.phase == "waiting" and (sample.turn > 1) == is_continuing:
                    return True
            heapq.heappop(heap)
        return False

    def _may_open(self) -> bool:
        return self.rules.max_open is None or self._num_open < self.rules.max_open

    def _least_loaded(self) -> int | None:
        """The generator with the fewest samples; None if all have as many as they may have."""
        load, number = min(((len(work), number) for number, work in self._work.items()), default=(0, None))
        return number if load < self.rules.rows_per_generator else None

    def _preferred(self, sample: SampleState, free: int) -> int:
        """The generator that has the sample's earlier turns or the group's prompt, unless it has much more to do."""
        group = self.groups[sample.number].samples
        earlier = [sample.generator] if sample.turn > 1 else [one.generator for one in group]
        most = min(self.rules.rows_per_generator, len(self._work[free]) + len(group))
        known = [number for number in earlier if number in self._work and len(self._work[number]) < most]
        return free if not known or known[-1] is None else known[-1]
