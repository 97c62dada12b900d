"""Ranks that meet at barriers while they record, and how far apart the timeline shows them leave."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.group import WorkerGroup
from lucidrl.report.timeline import write_timeline
from tests.unit.distributed.recorded_workers import Meeting
from tests.unit.report.validation import valid_timeline

NUM_BARRIERS = 50


def meet(run: Path, cluster: ClusterConfig, ahead_s: float) -> float:
    """Record two ranks at barriers; the clock of rank 1 is `ahead_s` ahead.

    Returns:
        Milliseconds between the moments at which both ranks really left a barrier, the median: a few tenths, but more
        on a machine that is too busy to run both ranks.
    """
    with WorkerGroup(Meeting, (ahead_s,), cluster=cluster, log_dir=run / "logs") as group:
        group.run_all("meet", 3)
        group.start_gpu_profiling()
        first, second = group.run_all("meet", NUM_BARRIERS)
        group.stop_gpu_profiling()
    return median(abs(a - b) for a, b in zip(first, second, strict=True)) / 1e6


def median_gap_ms(run: Path) -> float:
    """Milliseconds between the ends of the same barrier on both ranks in the timeline: the median."""
    content = valid_timeline(write_timeline(run).path)
    assert content["lucidrl"]["missing"] == []
    events = content["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    ends: dict[str, list[float]] = {"worker-0": [], "worker-1": []}
    for event in events:
        if event["name"] == "barrier" and event["ph"] == "X":
            ends[names[event["pid"]]].append(event["ts"] + event["dur"])
    first, second = map(sorted, ends.values())
    assert len(first) == len(second) == NUM_BARRIERS
    return median(abs(a - b) for a, b in zip(first, second, strict=True)) / 1000
