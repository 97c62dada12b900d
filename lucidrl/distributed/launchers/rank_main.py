"""What a rank's process runs: makes the worker, then calls its methods as the driver asks.

Nothing here imports torch at import time, so that the environment is complete when it comes in.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from lucidrl.distributed.child_main import describe_error, end_with_driver
from lucidrl.distributed.launchers.interfaces import WHOLE, Part
from lucidrl.utils import nsys


@dataclass(frozen=True)
class RankSettings:
    """What the driver decides about a rank's process."""

    rank: int
    role: str
    """What errors call such a process, in the singular."""
    environment: Mapping[str, str]
    num_threads: int
    log_path: Path
    die_with_starting_thread: bool
    """Linux can end a process with the thread that started it, which is only meant if that is the main thread."""
    part: Part = WHOLE
    """Of the rank's group."""
    wrapper: Sequence[str] = ()
    """Words of a command that runs the process, if it is not run as it is."""


@dataclass(frozen=True)
class Returned:
    """A call came to its end."""

    value: Any


def serve(connection: socket.socket, settings: RankSettings) -> None:
    """Answer the driver's messages until it closes the connection.

    The first one makes the worker, and the answer is the number of this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the driver decides
    end_with_driver(settings.die_with_starting_thread)
    redirect_output(settings.log_path)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the driver asks where this rank hangs
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.environ.update(settings.environment)
    nsys.take_request_from_environment()

    import torch

    from lucidrl.distributed.launchers.messages import Message, receive, send

    torch.set_num_threads(settings.num_threads)
    worker: Any = None

    def answer(message: Message) -> Returned:
        nonlocal worker
        if worker is None:
            worker_class, call = message.content()
            worker = worker_class(*call.args, **call.kwargs)
            return Returned(os.getpid())
        method, call = message.content()
        return Returned(getattr(worker, method)(*call.args, **call.kwargs))

    with suppress(EOFError, OSError):  # the driver closed the connection, or is gone
        while True:
            request = receive(connection)
            try:
                reply = Message.of(answer(request))
            except BaseException as error:  # SystemExit too: the driver learns of everything, and ends this process
                traceback.print_exc()
                reply = Message.of(describe_error(error))
            send(connection, reply)
            del request, reply  # a worker at rest holds no batch
    if worker is not None:
        worker.shutdown()


def redirect_output(path: Path) -> None:
    """Send what Python and native code write to the log, line by line."""
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout, sys.stderr = (_line_buffered(descriptor) for descriptor in (1, 2))


def _line_buffered(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
