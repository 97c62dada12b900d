"""The arrows of a timeline: from the prompts of each step to its rollouts, its update and its refit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from lucidrl.report.trace_reading import Event

ROOTS = ("rollout", "collect")
"""Spans with which a step begins, in the process that runs the loop."""
_LATER = ("generate", "environment", "train", "refit")
STAGES = (*ROOTS, *_LATER)
"""Names of the spans that arrows connect, in the order of a step."""


class FlowSpan(NamedTuple):
    """A span of a stage; times in microseconds."""

    name: str
    start_us: float
    end_us: float
    pid: int
    tid: int


def flow_events(spans: Sequence[FlowSpan]) -> Iterator[Event]:
    """The arrows of all steps, two events each."""
    number = 0
    for sources, targets in _transitions(spans):
        for source, target in _arrows(sources, targets):
            number += 1
            name = f"{source.name} to {target.name}"
            common = {"cat": "step", "name": name, "id": number}
            yield {"ph": "s", **common, "pid": source.pid, "tid": source.tid, "ts": source.start_us}
            yield {"ph": "f", "bp": "e", **common, "pid": target.pid, "tid": target.tid, "ts": target.start_us}


def _transitions(spans: Sequence[FlowSpan]) -> Iterator[tuple[list[FlowSpan], list[FlowSpan]]]:
    """Pairs of consecutive stages of each step, with the spans of each stage."""
    spans = sorted(spans, key=lambda span: span.start_us)
    driver = _driver_of(spans)
    roots = [span for span in spans if span.name in ROOTS and span.pid == driver]
    ends_us = [*(root.start_us for root in roots), float("inf")][1:]
    for root, end_us in zip(roots, ends_us, strict=True):
        in_step = [span for span in spans if root.start_us <= span.start_us < end_us]
        stages = [[root]]
        for name in _LATER:
            of_stage = [span for span in in_step if span.name == name]
            # The driver's span around the calls of its workers is not a place of work.
            of_workers = [span for span in of_stage if span.pid != driver]
            if of_workers or of_stage:
                stages.append(of_workers or of_stage)
        yield from pairwise(stages)


def _driver_of(spans: Sequence[FlowSpan]) -> int | None:
    """The process that runs the loop: the one with roots; None if there are several, such as collector workers."""
    with_roots = {span.pid for span in spans if span.name in ROOTS}
    with_later = {span.pid for span in spans if span.name == "train"}
    candidates = with_roots & with_later if len(with_roots) > 1 else with_roots
    return candidates.pop() if len(candidates) == 1 else None


def _arrows(sources: Sequence[FlowSpan], targets: Sequence[FlowSpan]) -> list[tuple[FlowSpan, FlowSpan]]:
    """Connect the last span of each source process and the first span of each target process, with few arrows."""
    first_of: dict[int, FlowSpan] = {}
    for target in targets:
        first_of.setdefault(target.pid, target)
    last_of = {source.pid: source for source in sources}
    last = max(last_of.values(), key=lambda source: source.end_us)
    first = min(first_of.values(), key=lambda target: target.start_us)
    pairs = {(last_of.get(pid, last), target) for pid, target in first_of.items()}
    pairs |= {(source, first) for source in last_of.values() if all(source != used for used, _ in pairs)}
    return sorted(pair for pair in pairs if pair[0].start_us <= pair[1].start_us)
