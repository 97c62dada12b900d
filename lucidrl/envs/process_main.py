"""The main function of an env process: a `SerialEnv` that runs commands of the driver, with arrays in shared memory.

A command and its reply are one byte each on a socket; all other data is in shared memory. After the reply `FAILED`, the
process sends a message with the error; after its first `DONE`, a message with the specs of the envs. The socket also
orders memory: arrays written before a byte is sent are visible when it is received. The memory is an unnamed file,
whose descriptor the driver sends to the processes; the system frees it when the last process exits.

If each has a core, driver and process spin briefly before they sleep: waking up takes longer than many steps.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch

from lucidrl.distributed.workers.messages import Message, send
from lucidrl.distributed.workers.outcomes import describe_error
from lucidrl.distributed.workers.process import end_with_driver, leave_signals_to_driver
from lucidrl.envs.arrays import Arrays, Frame
from lucidrl.envs.serial import SerialEnv, StackedEnv

RESET = b"r"
"""Reset the rows of `mask`; write into `root`."""
STEP = b"s"
"""Apply `actions`; write into `next`."""
STEP_AND_RESET = b"a"
"""Apply `actions`; write into `next`, and the root of the next step into `root`."""
SEED = b"d"
"""Seed the envs with `seeds`."""
DONE, FAILED = b".", b"!"

SPIN_S = 50e-6
"""How long driver and process spin before they sleep."""
_ALIGNMENT = 64


def serve(
    connection: socket.socket,
    creators: bytes,
    first_index: int,
    num_all_envs: int,
    environment: Mapping[str, str],
    die_with_starting_thread: bool,
    spin_s: float,
) -> None:
    """Make the envs, send their specs, then run commands until the driver closes the connection.

    Args:
        creators: one `EnvCreator` per env, pickled by cloudpickle.
        first_index: index of the first env of this process.
        num_all_envs: number of envs of all processes.
        environment: the driver's current environment variables; a fork server has those of its start.
        die_with_starting_thread: see `end_with_driver`.
        spin_s: see `wait_readable`.
    """
    leave_signals_to_driver()
    end_with_driver(die_with_starting_thread)
    # After a timeout the driver sends SIGUSR1, and reads the stack instead of the reply.
    faulthandler.register(signal.SIGUSR1, file=connection.fileno(), all_threads=False)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):  # the driver closed the connection or exited
        try:
            factories = cloudpickle.loads(creators)
            envs = SerialEnv(len(factories), factories, first_index=first_index)
            specs = cloudpickle.dumps(envs.specs_of_envs)  # the class of a spec may be in the main module
        except BaseException as error:  # SystemExit too: the driver reports it and kills this process
            _send(connection, FAILED, describe_error(error))
            return
        with envs:
            _send(connection, DONE, specs)
            mine = slice(first_index, first_index + envs.num_envs)
            rows = receive_shared(rows_like(envs, num_all_envs), connection).part(mine)
            _run_commands(connection, envs, rows, spin_s)


def _run_commands(connection: socket.socket, envs: SerialEnv, rows: EnvRows, spin_s: float) -> None:
    envs.active_row = rows.active_row
    commands: dict[bytes, Callable[[], object]] = {
        STEP: lambda: envs.step_into(rows.actions, rows.next),
        STEP_AND_RESET: lambda: envs.step_and_reset_into(rows.actions, rows.next, rows.root),
        RESET: lambda: envs.reset_into(rows.root, rows.mask),
        SEED: lambda: envs.set_seed(int(rows.seeds[0])),
    }
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while True:
        wait_readable(poll, None, spin_s)
        command = connection.recv(1)
        if not command:
            return
        try:
            commands[command]()
        except BaseException as error:
            _send(connection, FAILED, describe_error(error))
        else:
            connection.send(DONE)


def _send(connection: socket.socket, reply: bytes, content: Any) -> None:
    message = Message.of(content)
    connection.send(reply)
    send(connection, message)


def wait_readable(poll: select.poll, timeout_s: float | None, spin_s: float) -> list[int]:
    """Wait for and return the descriptors of `poll` that are readable or closed by the peer; none after the timeout.

    Args:
        spin_s: how long to spin before sleeping.
    """
    ready = poll.poll(0)
    if not ready and timeout_s != 0:
        until = time.perf_counter() + spin_s
        while not ready and time.perf_counter() < until:
            os.sched_yield()  # let other processes use the core
            ready = poll.poll(0)
        if not ready:
            ready = poll.poll(None if timeout_s is None else timeout_s * 1000)
    return [descriptor for descriptor, _ in ready]


@dataclass(frozen=True)
class EnvRows:
    """Arrays that driver and processes exchange in every step; each has one row per env."""

    actions: Arrays
    next: Frame
    """Step results."""
    root: Frame
    """Observations that the next actions are for."""
    mask: np.ndarray
    """Envs to reset."""
    seeds: np.ndarray
    """int64: the first seed of each env."""
    active_row: np.ndarray
    """int64: the first row of each process holds the row that the process stepped or reset last."""

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
    """Allocate the arrays in shared memory and send it over the connections; the peers call `receive_shared`."""
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
    if sys.platform == "linux":  # not /dev/shm, which is small in containers
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
