"""An env process as its driver holds it."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import cloudpickle

from lucidrl.distributed.workers.interfaces import StartMethod
from lucidrl.distributed.workers.messages import receive
from lucidrl.distributed.workers.outcomes import Raised, RemoteTraceback
from lucidrl.distributed.workers.process import ChildProcess, pickled
from lucidrl.envs.creator import EnvCreator
from lucidrl.envs.failures import env_failure
from lucidrl.envs.process_main import DONE, FAILED, RESET, SEED, STEP, STEP_AND_RESET, serve, wait_readable
from lucidrl.envs.process_memory import EnvRows
from lucidrl.envs.stacked import EnvSpecs
from lucidrl.errors import LucidError

PRELOAD = ("lucidrl.envs.process_main", "gymnasium")
"""What takes long to import and most env processes need."""

_PHASES = {RESET: "reset", STEP: "step", STEP_AND_RESET: "step", SEED: "seeding"}
_LIVENESS_POLL_S = 0.2
_MESSAGE_DEADLINE_S = 5.0
_STACK_DEADLINE_S = 0.2


class EnvProcess(ChildProcess):
    """A process with the envs that `creators` make, which are rows from `first_index` on of shared arrays.

    It does one thing at a time: the start at first, then what `start` asks for. Meanwhile the driver may do anything
    else; `wait_any` tells which processes are ready, and `finish` takes the end of what they did.

    Args:
        num_all_envs: how many rows the shared arrays have.
        start_timeout_s: deadline of the start.
        step_timeout_s: deadline of everything else.
        spin_s: how long driver and process spin before they fall asleep.

    Raises:
        ConfigError: if the factories cannot be sent to a process.
    """

    def __init__(
        self,
        creators: Sequence[EnvCreator],
        first_index: int,
        num_all_envs: int,
        *,
        start_method: StartMethod,
        start_timeout_s: float,
        step_timeout_s: float,
        spin_s: float,
    ):
        self.rows = slice(first_index, first_index + len(creators))
        self.specs: list[EnvSpecs] = []
        """Of its envs, once the start is finished."""
        self.connection, theirs = socket.socketpair()
        self.spin_s = spin_s
        self._step_timeout_s = step_timeout_s
        self._shared: EnvRows | None = None
        self._is_seeded = False
        # A fork server has a single thread; the driver may have several, of which only the main one lives as long.
        from_main_thread = start_method == "forkserver" or threading.current_thread() is threading.main_thread()
        factories = pickled("the env factory", list(creators))
        self._begin("start", start_timeout_s)
        with theirs:  # its only other holder is the process, so that the connection ends with it
            super().__init__(
                serve,
                (theirs, factories, first_index, num_all_envs, dict(os.environ), from_main_thread, spin_s),
                name=f"env process {first_index}",
                start_method=start_method,
                imports_main=False,
                preload=PRELOAD,
            )
        self.connection.setblocking(False)

    def share(self, rows: EnvRows) -> None:
        """Tell which of the shared arrays are its own."""
        self._shared = rows.part(self.rows)

    def start(self, command: bytes) -> None:
        """Let the process carry out a command of `process_main`; does not wait."""
        assert self._shared is not None
        self._shared.at_work[0] = 0
        self._is_seeded = self._is_seeded or command == SEED
        self._begin(_PHASES[command], self._step_timeout_s)
        with suppress(OSError):  # a process that is gone is found so by whoever waits for it
            self.connection.send(command)

    def finish(self) -> None:
        """Take the end of what was started; the process is ready for that, says `wait_any`.

        Raises:
            EnvironmentFailure: if an env raised, the process died or its deadline has passed. Errors of ours that a
                factory raised keep their type.
        """
        try:
            answer = self.connection.recv(1)
        except BlockingIOError:
            answer = None  # late, or gone while a process that it started holds its connection open
        except OSError:
            answer = b""
        if answer == DONE:
            if self._phase == "start":
                self.specs = cloudpickle.loads(self._receive())
        elif answer == FAILED:
            raise self._raised(self._receive())
        elif answer == b"" or self.has_ended:
            raise self._died()
        else:
            raise self._late()

    def end(self) -> None:
        """Ask the process to close its envs and leave; does not wait."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def reap(self) -> None:
        """Leave nothing behind after `kill`."""
        super().reap()
        self.connection.close()

    def _begin(self, phase: str, timeout_s: float) -> None:
        self._phase, self._timeout_s = phase, timeout_s
        self.deadline = time.monotonic() + timeout_s
        """Of what was started last."""

    def _receive(self) -> Any:
        """The message after an answer; the process sends it at once, if nothing stops it."""
        self.connection.settimeout(_MESSAGE_DEADLINE_S)
        try:
            return receive(self.connection).content()
        except TimeoutError:
            raise self._late() from None
        except (EOFError, OSError):
            raise self._died() from None
        finally:
            self.connection.setblocking(False)

    def _raised(self, outcome: Raised) -> LucidError:
        failure = outcome.lucid_error or self._failure(outcome.summary)
        failure.__cause__ = RemoteTraceback(outcome.trace)
        return failure

    def _died(self) -> LucidError:
        first, last = self.rows.start, self.rows.stop - 1
        who = f"its process, which serves envs {first} to {last}," if last > first else "its process"
        return self._failure(f"{who} {self.how_it_ended().rstrip(',')}")

    def _late(self) -> LucidError:
        setting = "start_timeout_s" if self._phase == "start" else "step_timeout_s"
        failure = self._failure(f"it did not finish within {self._timeout_s:g} s; if it needs longer, raise {setting}")
        if stack := self._stack():
            failure.__cause__ = RemoteTraceback(f"It was at, innermost first:\n{stack}")
        return failure

    def _failure(self, happened: str) -> LucidError:
        """Of the env that the process was at; the first of them, if it had not begun."""
        first = self.rows.start
        if self._shared is None:
            return env_failure(first, None, self._phase, None, happened)
        row = int(self._shared.at_work[0])
        seed = int(self._shared.seeds[row]) if self._is_seeded else None
        actions = {key: array[row, ...] for key, array in self._shared.actions.items()}
        return env_failure(first + row, seed, self._phase, actions if self._phase == "step" else None, happened)

    def _stack(self) -> str:
        """Where the process is, if it can tell: the text comes where its answer should have come."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        self.connection.settimeout(_STACK_DEADLINE_S)
        text = b""
        with suppress(OSError):
            while part := self.connection.recv(1 << 16):
                text += part
        return text.decode(errors="replace")


def wait_any(processes: Sequence[EnvProcess]) -> list[EnvProcess]:
    """Those that are ready to `finish`, because they are done, gone or late; waits until there is one."""
    poll = select.poll()
    by_descriptor = {process.connection.fileno(): process for process in processes}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    now = time.monotonic()
    # In short waits: a process that a dead one started may keep its connection open.
    while True:
        remaining_s = min(process.deadline for process in processes) - now
        if ready := wait_readable(poll, max(0.0, min(remaining_s, _LIVENESS_POLL_S)), processes[0].spin_s):
            return [by_descriptor[descriptor] for descriptor in ready]
        now = time.monotonic()
        if failed := [process for process in processes if process.has_ended or process.deadline <= now]:
            return failed
