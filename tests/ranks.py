"""Real ranks for tests: processes in one gloo group that run functions of a test and give back what these return.

Importing torch and transformers takes seconds. So a group is kept for all tests of a session that want as many ranks,
and the ranks of all groups are forks of one process that has imported them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

TIMEOUT_S = 300


class RankPools:
    """A pool of ranks for each size, all forks of one process that has imported torch and transformers."""

    def __init__(self, *sizes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="lucidrl-ranks-")
        pairs = {size: [context.Pipe() for _ in range(size)] for size in sizes}
        theirs = {size: [theirs for _, theirs in ends] for size, ends in pairs.items()}
        self._parent = context.Process(target=_fork_ranks, args=(theirs, self._folder.name), daemon=True)
        self._parent.start()
        for connection in chain(*theirs.values()):
            connection.close()
        self._pools = {size: Ranks([ours for ours, _ in ends]) for size, ends in pairs.items()}

    def __getitem__(self, size: int) -> Ranks:
        return self._pools[size]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        with suppress(ProcessLookupError):
            os.killpg(self._parent.pid, signal.SIGKILL)
        self._parent.join()
        self._folder.cleanup()


class Ranks:
    """`ranks(function, *args)` runs `function(*args)` on every rank and returns the results by rank."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections
        self.size = len(connections)

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        task = cloudpickle.dumps((function, args))
        for connection in self._connections:
            connection.send_bytes(task)
        replies = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(TIMEOUT_S):
                raise TimeoutError(f"rank {rank} of {self.size} did not reply within {TIMEOUT_S} s")
            replies.append(cloudpickle.loads(connection.recv_bytes()))
        errors = [f"rank {rank}:\n{text}" for rank, (is_error, text) in enumerate(replies) if is_error]
        if errors:
            raise AssertionError("\n".join(errors))
        return [result for _, result in replies]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def _fork_ranks(pools: dict[int, list[Connection]], folder: str) -> None:
    """Import once what ranks need, then fork them into a separate process group, which `close` kills."""
    os.setsid()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import lucidrl.models.policy.dtensor_policy_worker
    import lucidrl.models.policy.fsdp1_policy_worker  # noqa: F401

    everyone = [(connection, rank, size) for size, ends in pools.items() for rank, connection in enumerate(ends)]
    pids = []
    for connection, rank, size in everyone:
        pid = os.fork()
        if pid == 0:
            for other, *_ in everyone:
                if other is not connection:
                    other.close()
            _serve(connection, rank, size, f"{folder}/store_of_{size}")
            os._exit(0)
        pids.append(pid)
    for connection, *_ in everyone:
        connection.close()
    for pid in pids:
        os.waitpid(pid, 0)


def _serve(connection: Connection, rank: int, size: int, store: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=240)
    )
    _share_groups()
    while True:
        try:
            function, args = cloudpickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            reply = (False, function(*args))
        except BaseException:
            reply = (True, traceback.format_exc())
        connection.send_bytes(cloudpickle.dumps(reply))


def _share_groups() -> None:
    """Let meshes of all tests share the groups of equal ranks: every gloo group has a thread that often wakes."""
    from torch.distributed import device_mesh

    make = device_mesh.new_group
    made: dict[tuple[int, ...], Any] = {}

    def group_of(ranks: Sequence[int], **options: Any) -> Any:
        key = tuple(ranks)
        if key not in made:
            made[key] = make(ranks=ranks, **options)
        return made[key]

    device_mesh.new_group = group_of
