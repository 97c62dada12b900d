"""Helpers of tests on simulated nodes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable

import psutil
import ray
from ray.util.placement_group import placement_group_table

from lucidrl.distributed.workers.group import WorkerGroup

MARK = "TESTED_BY"
"""Variable that all processes of a simulated cluster inherit: the program that started it."""


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait for an event; the timeout only bounds a failure."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


def rank_processes() -> list[psutil.Process]:
    """Processes that agents of this program's nodes started."""
    found = []
    for process in psutil.process_iter():
        try:
            if "spawn_main" in " ".join(process.cmdline()) and process.environ().get(MARK) == str(os.getpid()):
                found.append(process)
        except psutil.Error:  # ended meanwhile
            continue
    return found


def check_all_was_given_back() -> None:
    """No actor, placement group or rank is left, and all CPUs are free again."""
    wait_for(lambda: ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU"))
    wait_for(lambda: {group["state"] for group in placement_group_table().values()} <= {"REMOVED"})
    wait_for(lambda: not rank_processes())


def agent_of(rank_pid: int) -> int:
    """The process that started a rank."""
    return psutil.Process(rank_pid).ppid()


def raylet_of(rank_pid: int) -> int:
    """The process that stands for the node of a rank."""
    return psutil.Process(agent_of(rank_pid)).ppid()


def nodes_of(group: WorkerGroup) -> list[str]:
    """Where its ranks are, as errors say it."""
    return [label.node for label in group._processes._workers.labels]


def without_ids(text: str) -> str:
    """An error's text without what is different in each cluster."""
    return re.sub(r"[\d.]+ \([0-9a-f]{8}\)", "NODE", text)
