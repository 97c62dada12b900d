"""EnvProcess: the driver's handle of an env process."""

from __future__ import annotations

import os
import select
import signal
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
from lucidrl.envs.process_main import DONE, FAILED, RESET, SEED, STEP, STEP_AND_RESET, EnvRows, serve, wait_readable
from lucidrl.envs.serial import EnvSpecs
from lucidrl.errors import LucidError

PRELOAD = ("lucidrl.envs.process_main", "gymnasium")
"""Modules that are slow to import and that most env processes need."""

_PHASES = {RESET: "reset", STEP: "step", STEP_AND_RESET: "step", SEED: "seeding"}
_LIVENESS_POLL_S = 0.2
_MESSAGE_TIMEOUT_S = 5.0
_STACK_TIMEOUT_S = 0.2


class EnvProcess(ChildProcess):
    """A process with the envs that `creators` make; they use the rows of the shared arrays from `first_index` on.

    The process runs one command at a time: first its start-up, then each command that `start` sends. `wait_any` returns
    processes that are ready, and `finish` completes their command.

    Args:
        num_all_envs: number of rows of the shared arrays.
        start_timeout_s: timeout of the start-up.
        step_timeout_s: timeout of every other command.
        spin_s: how long driver and process spin before they sleep.

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
        """Specs of the envs of this process; set by the first `finish`."""
        self.spin_s = spin_s
        self._step_timeout_s = step_timeout_s
        self.shared: EnvRows | None = None
        """The rows of this process in shared memory; set after the start-up."""
        self._is_seeded = False
        # Linux kills a process with the thread that started it; other threads of the driver may end before the driver.
        from_main_thread = start_method == "forkserver" or threading.current_thread() is threading.main_thread()
        factories = pickled("the env factory", list(creators))
        self._begin("start", start_timeout_s)
        super().__init__(
            serve,
            (factories, first_index, num_all_envs, dict(os.environ), from_main_thread, spin_s),
            name=f"env process {first_index}",
            start_method=start_method,
            imports_main=False,
            preload=PRELOAD,
        )
        self.connection.setblocking(False)

    def start(self, command: bytes) -> None:
        """Send a command of `process_main` without waiting for the reply."""
        assert self.shared is not None
        self.shared.active_row[0] = 0
        self._is_seeded = self._is_seeded or command == SEED
        self._begin(_PHASES[command], self._step_timeout_s)
        with suppress(OSError):  # `wait_any` and `finish` report a process that exited
            self.connection.send(command)

    def finish(self) -> None:
        """Complete the command of a process that `wait_any` returned.

        Raises:
            EnvironmentFailure: if an env raised, or the process exited or timed out.
            LucidError: if an env factory raised it.
        """
        try:
            reply = self.connection.recv(1)
        except BlockingIOError:
            reply = None  # timed out, or exited while a child of it keeps the connection open
        except OSError:
            reply = b""
        if reply == DONE:
            if self._phase == "start":
                self.specs = cloudpickle.loads(self._receive())
        elif reply == FAILED:
            raise self._raised(self._receive())
        elif reply == b"" or self.has_ended:
            raise self._exited()
        else:
            raise self._timed_out()

    def _begin(self, phase: str, timeout_s: float) -> None:
        self._phase, self._timeout_s = phase, timeout_s
        self.expires_at = time.monotonic() + timeout_s
        """When the current command times out."""

    def _receive(self) -> Any:
        """Receive the message that directly follows a reply."""
        self.connection.settimeout(_MESSAGE_TIMEOUT_S)
        try:
            return receive(self.connection).content()
        except TimeoutError:
            raise self._timed_out() from None
        except (EOFError, OSError):
            raise self._exited() from None
        finally:
            self.connection.setblocking(False)

    def _raised(self, outcome: Raised) -> LucidError:
        failure = outcome.lucid_error or self._failure(outcome.summary)
        failure.__cause__ = RemoteTraceback(outcome.trace)
        return failure

    def _exited(self) -> LucidError:
        first, last = self.rows.start, self.rows.stop - 1
        who = f"the process of envs {first} to {last}" if last > first else "the process of the env"
        return self._failure(f"{who} {self.how_it_ended().rstrip(',')}")

    def _timed_out(self) -> LucidError:
        setting = "start_timeout_s" if self._phase == "start" else "step_timeout_s"
        failure = self._failure(
            f"it took longer than {setting}={self._timeout_s:g}; raise the timeout if the env needs longer"
        )
        if stack := self._stack():
            failure.__cause__ = RemoteTraceback(f"Stack of the process, innermost call first:\n{stack}")
        return failure

    def _failure(self, reason: str) -> LucidError:
        """Make the error of the env that was active; during the start-up, of the first env."""
        first = self.rows.start
        if self.shared is None:
            return env_failure(first, None, self._phase, None, reason)
        row = int(self.shared.active_row[0])
        seed = int(self.shared.seeds[row]) if self._is_seeded else None
        actions = {key: array[row, ...] for key, array in self.shared.actions.items()}
        return env_failure(first + row, seed, self._phase, actions if self._phase == "step" else None, reason)

    def _stack(self) -> str:
        """Request the stack of a process that still runs; the process sends the text instead of its reply."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        self.connection.settimeout(_STACK_TIMEOUT_S)
        text = b""
        with suppress(OSError):
            while part := self.connection.recv(1 << 16):
                text += part
        return text.decode(errors="replace")


def wait_any(processes: Sequence[EnvProcess]) -> list[EnvProcess]:
    """Wait for and return processes that are ready to `finish`: done, exited or timed out."""
    poll = select.poll()
    by_descriptor = {process.connection.fileno(): process for process in processes}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    now = time.monotonic()
    # Wait briefly, then check: an exited process may have a child that keeps the connection open.
    while True:
        remaining_s = min(process.expires_at for process in processes) - now
        if ready := wait_readable(poll, max(0.0, min(remaining_s, _LIVENESS_POLL_S)), processes[0].spin_s):
            return [by_descriptor[descriptor] for descriptor in ready]
        now = time.monotonic()
        if failed := [process for process in processes if process.has_ended or process.expires_at <= now]:
            return failed
