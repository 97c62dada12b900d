"""Memory that a driver and its env processes share: arrays with a row per env.

It is an unnamed file that the driver sends to the processes; the system frees it when the last of them exits.
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
    """What driver and processes exchange in every step; each array has a row per env."""

    actions: Arrays
    next: Frame
    """Result of a step."""
    root: Frame
    """Input of the next action."""
    mask: np.ndarray
    """Envs to reset."""
    seeds: np.ndarray
    """int64: the first seed of each env."""
    active_row: np.ndarray
    """int64: in the first row of a process, the row that it stepped or reset last."""

    def part(self, rows: slice) -> EnvRows:
        """A view of some rows."""
        return self.map(lambda array: array[rows])

    def arrays(self) -> list[np.ndarray]:
        frames = [*self.next.arrays().values(), *self.root.arrays().values()]
        return [*self.actions.values(), *frames, self.mask, self.seeds, self.active_row]

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> EnvRows:
        return EnvRows(
            {key: function(array) for key, array in self.actions.items()},
            self.next.map(function),
            self.root.map(function),
            function(self.mask),
            function(self.seeds),
            function(self.active_row),
        )


def rows_like(env: StackedEnv, num_envs: int) -> EnvRows:
    """Arrays for `num_envs` envs with the specs of `env`, in private memory."""
    mask, numbers = np.zeros(env.batch_size, bool), np.zeros(env.num_envs, np.int64)
    rows = EnvRows(env.new_actions(), env.new_frame(), env.new_frame(), mask, numbers, numbers)
    return rows.map(lambda array: np.zeros((num_envs, *array.shape[1:]), array.dtype))


def share(rows: EnvRows, connections: list[socket.socket]) -> EnvRows:
    """The same arrays in shared memory, which the other ends of the connections get by `receive_shared`."""
    descriptor = _unnamed_file(sum(map(_size_bytes, rows.arrays())))
    try:
        for connection in connections:
            socket.send_fds(connection, [b"m"], [descriptor])
        return _mapped(rows, descriptor)
    finally:
        os.close(descriptor)


def receive_shared(rows: EnvRows, connection: socket.socket) -> EnvRows:
    """Return `rows` with its arrays in the shared memory that the driver sends over `connection`.

    Raises:
        EOFError: if the driver closes the connection first.
    """
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise EOFError("the driver closed the connection")
    try:
        return _mapped(rows, descriptors[0])
    finally:
        os.close(descriptors[0])


def _unnamed_file(size_bytes: int) -> int:
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
