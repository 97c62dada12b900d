"""Memory that a driver and its env processes share: arrays with one row for each env.

It is a file without a name, which the driver sends to the processes: it is freed when the last of them is gone, however
that ended.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lucidrl.envs.arrays import Arrays, Frame
from lucidrl.envs.stacked import StackedEnv

_ALIGNMENT = 64


@dataclass(frozen=True)
class EnvRows:
    """All that goes between driver and processes with every step; each array has a row for each env."""

    actions: Arrays
    next: Frame
    """What a step came to."""
    root: Frame
    """What the next action is decided on."""
    mask: np.ndarray
    """Which envs a reset is for."""
    seeds: np.ndarray
    """int64: the first seed of each env."""
    at_work: np.ndarray
    """int64: in the first row of a process, which of its rows it was at last."""

    def part(self, rows: slice) -> EnvRows:
        """Some of the rows; writing to them writes here."""
        return self.map(lambda array: array[rows])

    def arrays(self) -> list[np.ndarray]:
        frames = [*self.next.arrays().values(), *self.root.arrays().values()]
        return [*self.actions.values(), *frames, self.mask, self.seeds, self.at_work]

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> EnvRows:
        return EnvRows(
            {key: function(array) for key, array in self.actions.items()},
            self.next.map(function),
            self.root.map(function),
            function(self.mask),
            function(self.seeds),
            function(self.at_work),
        )


def rows_like(env: StackedEnv, num_envs: int) -> EnvRows:
    """Arrays for `num_envs` envs that are like those of `env`, in private memory."""
    mask, numbers = np.zeros(env.batch_size, bool), np.zeros(env.num_envs, np.int64)
    rows = EnvRows(env.new_actions(), env.new_frame(), env.new_frame(), mask, numbers, numbers)
    return rows.map(lambda array: np.zeros((num_envs, *array.shape[1:]), array.dtype))


def share(rows: EnvRows, connections: list[socket.socket]) -> EnvRows:
    """The same arrays in memory that is sent over the connections, for `receive_shared` at their other ends."""
    descriptor = _nameless_file(sum(map(_size_bytes, rows.arrays())))
    try:
        for connection in connections:
            socket.send_fds(connection, [b"m"], [descriptor])
        return _mapped(rows, descriptor)
    finally:
        os.close(descriptor)


def receive_shared(rows: EnvRows, connection: socket.socket) -> EnvRows:
    """The same arrays in the memory that the driver sent.

    Raises:
        EOFError: if the driver closed the connection instead.
    """
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise EOFError("the driver closed the connection")
    try:
        return _mapped(rows, descriptors[0])
    finally:
        os.close(descriptors[0])


def _nameless_file(size_bytes: int) -> int:
    if sys.platform == "linux":  # not in /dev/shm, of which containers allow little
        descriptor = os.memfd_create("lucidrl-envs")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def _mapped(rows: EnvRows, descriptor: int) -> EnvRows:
    memory = mmap.mmap(descriptor, 0)  # all of the file
    used = 0

    def place(array: np.ndarray) -> np.ndarray:
        nonlocal used
        placed: np.ndarray = np.ndarray(array.shape, array.dtype, memory, used)
        used += _size_bytes(array)
        return placed

    return rows.map(place)


def _size_bytes(array: np.ndarray) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
