"""Real ranks for tests: processes in one gloo group that run functions of a test and give back what these return.

Starting processes takes seconds, so a group is kept for all tests of a session that want as many ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

TIMEOUT_S = 120


class Ranks:
    """`ranks(function, *args)` runs `function(*args)` on every rank and returns the results by rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="lucidrl-ranks-")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, size, f"{self._folder.name}/store"), daemon=True
            )
            process.start()
            self._connections.append(ours)
            self._processes.append(process)

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        task = cloudpickle.dumps((function, args))
        for connection in self._connections:
            connection.send_bytes(task)
        answers = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(TIMEOUT_S):
                raise TimeoutError(f"rank {rank} of {self.size} did not answer within {TIMEOUT_S} s")
            answers.append(cloudpickle.loads(connection.recv_bytes()))
        errors = [f"rank {rank}:\n{text}" for rank, (is_error, text) in enumerate(answers) if is_error]
        if errors:
            raise AssertionError("\n".join(errors))
        return [result for _, result in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(connection: Connection, rank: int, size: int, store: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )
    while True:
        try:
            function, args = cloudpickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = (False, function(*args))
        except BaseException:
            answer = (True, traceback.format_exc())
        connection.send_bytes(cloudpickle.dumps(answer))
