"""A strict reader of Chrome traces: what Perfetto's trace processor counts as an error or drops, fails here."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

PHASES = {"X", "M", "C", "s", "f", "i"}
NESTING_TOLERANCE_US = 0.002
"""Times are rounded to nanoseconds."""


def valid_timeline(path: Path) -> dict[str, Any]:
    """The content of a timeline, after all checks."""
    content = json.loads(gzip.decompress(path.read_bytes()), parse_constant=_no_constant, object_pairs_hook=_unique)
    events = content["traceEvents"]
    for event in events:
        _check_event(event)
    slices = [event for event in events if event["ph"] == "X"]
    _check_nesting(slices)
    _check_names(events)
    _check_flows(events, slices)
    assert {"start_unix_ns", "inputs", "missing"} <= content["lucidrl"].keys()
    return content


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    assert len(found) == len(pairs), f"keys appear twice: {pairs}"
    return found


def _check_event(event: dict[str, Any]) -> None:
    assert event["ph"] in PHASES, event
    assert isinstance(event["name"], str), event
    assert type(event["pid"]) is int, event
    assert event["ph"] == "C" or type(event["tid"]) is int, event
    if event["ph"] == "M":
        return
    assert isinstance(event["ts"], int | float), event
    assert math.isfinite(event["ts"]), event
    assert event["ts"] >= 0, event
    if event["ph"] == "X":
        assert event["dur"] >= 0, event
    if event["ph"] == "C":
        assert all(isinstance(value, int | float) for value in event["args"].values()), event


def _check_nesting(slices: list[dict[str, Any]]) -> None:
    """Slices of one track contain each other or are apart; Perfetto drops slices that overlap otherwise."""
    tracks = defaultdict(list)
    for event in slices:
        tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        open_ends: list[tuple[float, str]] = []
        for event in sorted(track, key=lambda event: (event["ts"], -event["dur"])):
            start, end = event["ts"], event["ts"] + event["dur"]
            while open_ends and open_ends[-1][0] <= start + NESTING_TOLERANCE_US:
                open_ends.pop()
            if open_ends:
                assert end <= open_ends[-1][0] + NESTING_TOLERANCE_US, (event, open_ends[-1])
            open_ends.append((end, event["name"]))


def _check_names(events: list[dict[str, Any]]) -> None:
    """Every process and thread with events has exactly one name."""
    named = Counter((event["pid"], event["tid"]) for event in events if event["name"] == "thread_name")
    processes = Counter(event["pid"] for event in events if event["name"] == "process_name")
    assert set(named.values()) | set(processes.values()) <= {1}
    assert {event["pid"] for event in events} <= processes.keys()
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} <= named.keys()


def _check_flows(events: list[dict[str, Any]], slices: list[dict[str, Any]]) -> None:
    """Every arrow has one start and one end, each at a slice of its track, and points forward in time."""
    ends: dict[Any, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in events:
        if event["ph"] in ("s", "f"):
            assert event["ph"] not in ends[event["cat"], event["id"]], event
            ends[event["cat"], event["id"]][event["ph"]] = event
    at_slice = defaultdict(list)
    for event in slices:
        at_slice[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for (category, _), pair in ends.items():
        if category != "step":
            continue
        assert pair.keys() == {"s", "f"}
        assert pair["s"]["ts"] <= pair["f"]["ts"]
        for event in pair.values():
            assert any(start <= event["ts"] <= end for start, end in at_slice[event["pid"], event["tid"]]), event
