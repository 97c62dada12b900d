"""What processes that a driver started have in common on their own side: they end with it, and tell it of errors.

Nothing here imports torch, so that a process can complete its environment first.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any

from lucidrl.errors import LucidError

_DRIVER_GONE_GRACE_S = 3.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Raised:
    """Something raised in the process."""

    summary: str
    """Type and message."""
    trace: str
    lucid_error: LucidError | None
    """The exception itself, if it is one of ours and can be pickled."""


class RemoteTraceback(Exception):  # noqa: N818 - the cause of an error, never raised by itself
    """Where another process raised, as text."""

    def __str__(self) -> str:
        return "\n" + self.args[0]


def describe_error(error: BaseException) -> Raised:
    """What the driver needs to tell of an exception, which may itself refuse to be pickled."""
    summary = "".join(traceback.format_exception_only(error)).strip()
    trace = "".join(traceback.format_exception(error))
    return Raised(summary, trace, error if isinstance(error, LucidError) and _can_be_pickled(error) else None)


def end_with_driver(die_with_starting_thread: bool) -> None:
    """Leave nothing behind if the driver dies without a word, whatever this process is busy with.

    Args:
        die_with_starting_thread: Linux can end a process with the thread that started it, which is only meant if that
            is the main thread.
    """
    if die_with_starting_thread and sys.platform == "linux":
        # Also ends a process that is stopped, or stuck in native code.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _let_fork_server_end()

    def watch() -> None:
        driver = multiprocessing.parent_process()
        assert driver is not None
        driver.join()
        time.sleep(_DRIVER_GONE_GRACE_S)  # an idle worker sees the end of the connection, and ends in order
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="driver-watch", daemon=True).start()


def _let_fork_server_end() -> None:
    """A fork server ends with the driver, and its processes with it, once these do not keep it alive themselves."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is None and server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def _can_be_pickled(error: LucidError) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # for instance a constructor that takes more than the message
        return False
    return True
