"""What the process of a worker runs: it makes the worker, then calls its methods as the driver asks.

Nothing here imports torch at import time, so that the environment is complete when torch is imported.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TextIO

from lucidrl.distributed.workers.interfaces import Hosting
from lucidrl.distributed.workers.outcomes import Returned, describe_error
from lucidrl.distributed.workers.process import let_fork_server_end
from lucidrl.utils import nsys

_DRIVER_GONE_GRACE_S = 3.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ChildSettings:
    """What the driver decides about the process of a worker."""

    rank: int
    hosting: Hosting
    environment: Mapping[str, str]
    num_threads: int
    log_path: Path | None
    """Where its output goes; None for that of the driver."""
    die_with_starting_thread: bool
    """Linux can end a process with the thread that started it, which is only right if that is the main thread."""
    wrapper: Sequence[str] = ()
    """Words of a command that runs the process, such as a profiler."""


def serve(connection: socket.socket, settings: ChildSettings) -> None:
    """Answer the driver's calls until it closes the connection.

    The first one makes the worker, and the answer is the id of this process.
    """
    leave_signals_to_driver()
    end_with_driver(settings.die_with_starting_thread)
    if settings.log_path is not None:
        redirect_output(settings.log_path)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the driver asks where this worker is
    if settings.hosting.start_method == "forkserver":
        os.environ.clear()  # a fork server has the variables of the moment when it started
    os.environ.update(settings.environment)
    nsys.take_request_from_environment()

    import torch

    from lucidrl.distributed.workers.messages import Message, call_of, receive_messages, send

    torch.set_num_threads(settings.num_threads)
    worker: Any = None

    def answer(messages: Sequence[Message]) -> Returned:
        nonlocal worker
        method, args, kwargs = call_of(messages)
        if worker is None:
            worker = method(*args, **kwargs)
            return Returned(os.getpid())
        call = method if callable(method) else attrgetter(method)(worker)
        return Returned(call(*args, **kwargs))

    with suppress(EOFError, OSError):  # the driver closed the connection, or is gone
        while True:
            request = receive_messages(connection)
            try:
                reply = Message.of(answer(request))
            except BaseException as error:  # SystemExit too: the driver reports everything, and ends this process
                if settings.log_path is not None:
                    traceback.print_exc()
                reply = Message.of(describe_error(error))
            send(connection, reply)
            del request, reply  # an idle worker holds no batch
    if worker is not None:
        worker.shutdown()


def leave_signals_to_driver() -> None:
    """Ignore Ctrl-C and a hang-up, which reach every process of a terminal: the driver decides."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def end_with_driver(die_with_starting_thread: bool) -> None:
    """Leave nothing behind if the driver is killed, whatever this process is busy with.

    Args:
        die_with_starting_thread: see `ChildSettings`.
    """
    if die_with_starting_thread and sys.platform == "linux":
        # Also ends a process that is stopped, or stuck in native code.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        let_fork_server_end()

    def watch() -> None:
        driver = multiprocessing.parent_process()
        assert driver is not None
        driver.join()
        time.sleep(_DRIVER_GONE_GRACE_S)  # an idle worker sees the end of the connection, and ends in order
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="driver-watch", daemon=True).start()


def redirect_output(path: Path) -> None:
    """Send what Python and native code write to the log, line by line."""
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout, sys.stderr = (_line_buffered(descriptor) for descriptor in (1, 2))


def _line_buffered(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
