"""What an env process runs: a `SerialEnv` of its envs, which steps as the driver asks.

A command is one byte, and so is the answer; everything else is in shared memory. After the answer `FAILED` comes a
message with the error, after the first `DONE` one with the specs of the envs.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from lucidrl.distributed.child_main import describe_error, end_with_driver
from lucidrl.distributed.launchers.messages import Message, send
from lucidrl.envs.process_bell import wait_readable
from lucidrl.envs.process_memory import EnvRows, receive_shared, rows_like
from lucidrl.envs.serial import SerialEnv

RESET, STEP, STEP_AND_RESET, SEED = b"r", b"s", b"a", b"d"
DONE, FAILED = b".", b"!"


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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the driver decides
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
