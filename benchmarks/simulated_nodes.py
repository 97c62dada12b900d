"""The simulated Ray nodes of `ray_faults.py`, and what runs leave behind on them."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

CLEANUP_TIMEOUT_S = 15.0
"""What still exists this long after a run counts as left."""


class Machine:
    """The simulated nodes, and what runs on them."""

    def __init__(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
        self._other = self._cluster.add_node(num_cpus=4)
        self.address = self._cluster.address
        ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)

    @property
    def head_pid(self) -> int:
        return self._cluster.head_node.all_processes["raylet"][0].process.pid

    def replace_node(self) -> None:
        """Replace the second node after a fault."""
        with suppress(Exception):  # the node may be dead
            self._cluster.remove_node(self._other, allow_graceful=False)
        self._other = self._cluster.add_node(num_cpus=4)

    def left(self, pids: list[int], memory: set[str]) -> list[str]:
        """Wait for the cleanup of a run, and return what remains.

        Args:
            pids: processes of the run; child processes of this program are checked as well.
            memory: names in shared memory before the run.
        """
        end = time.monotonic() + CLEANUP_TIMEOUT_S
        while (remaining := self._remaining(pids, memory)) and time.monotonic() < end:
            time.sleep(0.1)
        return remaining

    def _remaining(self, pids: list[int], memory: set[str]) -> list[str]:
        actors = [
            f"actor {actor['ActorClassName']}"
            for actor in ray._private.state.actors().values()
            if actor["State"] == "ALIVE"
        ]
        groups = [
            group["name"] or "placement group"
            for group in placement_group_table().values()
            if group["state"] != "REMOVED"
        ]
        running = [f"process {process}" for process in map(_command_of, _child_pids() | set(pids)) if process]
        return [*actors, *groups, *running, *left_memory(memory)]

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


def _child_pids() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def _command_of(pid: int) -> str | None:
    """The command line of a process of a run; None if it has exited or belongs to Ray."""
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline())
        if process.status() == psutil.STATUS_ZOMBIE or "resource_tracker" in command:
            return None
        is_of_run = any(part in command for part in ("spawn_main", "faults.injection", "NodeAgent"))
        return command[:80] if is_of_run else None
    except psutil.NoSuchProcess:
        return None


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def left_memory(before: set[str]) -> list[str]:
    """New shared memory that no process maps; what a process maps belongs to another program."""
    new = [f"/dev/shm/{name}" for name in shared_memory() - before]
    used = ""
    for maps in Path("/proc").glob("[0-9]*/maps") if new else ():
        with suppress(OSError):  # the process has exited
            used += maps.read_text()
    return [path for path in new if path not in used]
