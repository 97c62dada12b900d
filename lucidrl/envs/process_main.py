"""What an env process runs: a `SerialEnv` of its envs, which steps as the driver asks.

A command is one byte, and so is the answer; everything else is in shared memory. After the answer `FAILED` comes a
message with the error, after the first `DONE` one with the specs of the envs.

The byte stays until it is taken, so that no wake-up is lost, and arrays that were written before it are seen after it,
on every machine. Driver and process spin for a moment before they fall asleep if there is a core for each process,
because to fall asleep and be woken takes longer than many a step.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from lucidrl.distributed.workers.messages import Message, send
from lucidrl.distributed.workers.outcomes import describe_error
from lucidrl.distributed.workers.process import end_with_driver, leave_signals_to_driver, num_cores
from lucidrl.envs.process_memory import EnvRows, receive_shared, rows_like
from lucidrl.envs.serial import SerialEnv

RESET, STEP, STEP_AND_RESET, SEED = b"r", b"s", b"a", b"d"
DONE, FAILED = b".", b"!"

_SPIN_S = 50e-6


@dataclass(frozen=True)
class EnvProcessSettings:
    """What the driver decides about an env process."""

    first_index: int
    """Of the envs that it serves, among all."""
    num_all_envs: int
    creators: bytes
    """One `EnvCreator` for each env, by cloudpickle."""
    environment: Mapping[str, str]
    """Variables of the driver: a fork server has those of the moment when it started."""
    die_with_starting_thread: bool
    spin_s: float


def serve(connection: socket.socket, settings: EnvProcessSettings) -> None:
    """Make the envs, send their specs, then carry out commands until the driver closes the connection."""
    leave_signals_to_driver()
    end_with_driver(settings.die_with_starting_thread)
    # When the driver asks where this process hangs, the text takes the place of the answer that is overdue.
    faulthandler.register(signal.SIGUSR1, file=connection.fileno(), all_threads=False)
    os.environ.clear()
    os.environ.update(settings.environment)
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):  # the driver closed the connection, or is gone
        try:
            envs = _make_envs(settings)
            specs = cloudpickle.dumps(envs.specs_of_envs)  # a spec may be of a class that only the program knows
        except BaseException as error:  # SystemExit too: the driver learns of everything, and ends this process
            _tell(connection, FAILED, describe_error(error))
            return
        with envs:
            _tell(connection, DONE, specs)
            mine = slice(settings.first_index, settings.first_index + envs.num_envs)
            rows = receive_shared(rows_like(envs, settings.num_all_envs), connection).part(mine)
            _carry_out(connection, envs, rows, settings.spin_s)


def _make_envs(settings: EnvProcessSettings) -> SerialEnv:
    creators = cloudpickle.loads(settings.creators)
    return SerialEnv(len(creators), creators, first_index=settings.first_index)


def _carry_out(connection: socket.socket, envs: SerialEnv, rows: EnvRows, spin_s: float) -> None:
    envs.at_work = rows.at_work
    work: dict[bytes, Callable[[], object]] = {
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
            work[command]()
        except BaseException as error:
            _tell(connection, FAILED, describe_error(error))
        else:
            connection.send(DONE)


def _tell(connection: socket.socket, answer: bytes, content: Any) -> None:
    message = Message.of(content)
    connection.send(answer)
    send(connection, message)


def spin_time_s(num_processes: int) -> float:
    """How long to spin for a driver and that many env processes."""
    return _SPIN_S if num_processes < num_cores() else 0.0


def wait_readable(poll: select.poll, timeout_s: float | None, spin_s: float) -> list[int]:
    """Descriptors among those of `poll` that have something to read or whose other end is gone, as soon as any has.

    Args:
        timeout_s: after that the list is empty; None waits for ever.
        spin_s: how much of it to spin.
    """
    ready = poll.poll(0)
    if not ready and timeout_s != 0:
        until = time.perf_counter() + spin_s
        while not ready and time.perf_counter() < until:
            os.sched_yield()  # other programs may want the core
            ready = poll.poll(0)
        if not ready:
            ready = poll.poll(None if timeout_s is None else timeout_s * 1000)
    return [descriptor for descriptor, _ in ready]
