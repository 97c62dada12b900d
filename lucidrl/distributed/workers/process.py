"""A process that this one started: begun by any start method, joined, killed, and explained when it is gone."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver, resource_tracker, spawn
from pathlib import Path
from typing import Any, get_args

import cloudpickle
import psutil

from lucidrl.distributed.workers.interfaces import StartMethod
from lucidrl.errors import ConfigError

_REAP_DEADLINE_S = 5.0
_POLL_S = 0.05
_main_lock = threading.Lock()
_executable_lock = threading.Lock()


class ChildProcess:
    """Started at once.

    Args:
        target: a function of a module, which the process calls with `args`.
        imports_main: whether the process imports the program's main module first, as objects that were pickled by
            reference to it need. Without that a program needs no `if __name__ == "__main__":`, and the process does
            not wait for all that the program imports.
        preload: modules that processes of the fork server find imported; those that it has when it starts, which is
            once in the life of the program.
        wrapper: words of a command that runs the interpreter, which is then a process below that of the command; only
            for `spawn`.
    """

    def __init__(
        self,
        target: Callable[..., None],
        args: tuple[Any, ...],
        *,
        name: str,
        start_method: StartMethod = "spawn",
        imports_main: bool = True,
        preload: Iterable[str] = (),
        wrapper: Sequence[str] = (),
    ):
        if start_method not in get_args(StartMethod):
            raise ConfigError(f"start_method={start_method!r} is not one of {', '.join(get_args(StartMethod))}")
        # The context of its own leaves the program's start method alone. Not a daemon in the sense of multiprocessing:
        # those may not start processes, as data loaders do.
        context: Any = multiprocessing.get_context(start_method)
        self._process = context.Process(target=target, args=args, name=name, daemon=False)
        if start_method == "forkserver":
            _preload(preload)
        self._script = _Script([*wrapper, sys.executable]) if wrapper else None
        with (
            nullcontext() if imports_main else main_seen_as(None, None),
            _started_by(None if self._script is None else str(self._script.path)),
        ):
            self._process.start()

    @property
    def is_wrapped(self) -> bool:
        """Whether another program runs the process: `pid` and the exit code are that program's."""
        return self._script is not None

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.exitcode is not None

    def join(self, timeout_s: float) -> int | None:
        """Wait for the process to end; its exit code, or None if it is still there."""
        until = time.monotonic() + timeout_s
        # In short waits: multiprocessing waits for the end of a pipe, which a process that it started may hold open.
        while not self.has_ended and (remaining_s := until - time.monotonic()) > 0:
            self._process.join(min(remaining_s, _POLL_S))
        return self._process.exitcode

    def kill(self) -> None:
        """End the process now; may be called twice."""
        if self.is_wrapped:
            with suppress(psutil.Error):
                for process in psutil.Process(self.pid).children(recursive=True):
                    process.kill()
        self._process.kill()

    def reap(self) -> None:
        """Leave no zombie after `kill`."""
        self.join(_REAP_DEADLINE_S)
        self.remove_wrapper()

    def remove_wrapper(self) -> None:
        """Remove the file that started a wrapped process, which has started; may be called twice."""
        if self._script is not None:
            self._script.remove()

    def how_it_ended(self) -> str:
        """For a process that is about to end or has ended: a verb with its cause."""
        code = self.join(_REAP_DEADLINE_S)
        if code is None:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}"
        names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
        name = names.get(-code, f"signal {-code}")
        return f"was ended by {name}" + (", perhaps for lack of memory," if -code == signal.SIGKILL else "")


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def let_fork_server_end() -> None:
    """Let the fork server that started this process end with its driver.

    multiprocessing offers no way to close the descriptor by which a child keeps its fork server alive.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_pid is None and server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def _preload(modules: Iterable[str]) -> None:
    """Add to what the program itself, or another part of it, wants preloaded; the list can only be set as a whole."""
    wanted = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    forkserver.set_forkserver_preload(list(dict.fromkeys([*wanted, *modules])))


class _Script:
    """A file that runs a command with the arguments that it is given, out of reach of Ctrl-C.

    A terminal sends that to all processes of a group; what it means to them is for their driver to say.
    """

    def __init__(self, command: Sequence[str]):
        self._folder = tempfile.TemporaryDirectory(prefix="lucidrl-wrapper-")
        self.path = Path(self._folder.name, "python")
        own_group = [sys.executable, "-ISc", "import os, sys; os.setpgid(0, 0); os.execvp(sys.argv[1], sys.argv[1:])"]
        self.path.write_text(f'#!/bin/sh\nexec {shlex.join([*own_group, *command])} "$@"\n')
        self.path.chmod(0o700)

    def remove(self) -> None:
        self._folder.cleanup()


@contextmanager
def _started_by(executable: str | None) -> Iterator[None]:
    """multiprocessing spawns processes with this interpreter, which it can only be told for all of them.

    Args:
        executable: None for its own.
    """
    with _executable_lock:
        if executable is None:
            yield
            return
        resource_tracker.ensure_running()  # it would be spawned that way too
        before = spawn.get_executable()
        spawn.set_executable(executable)
        try:
            yield
        finally:
            spawn.set_executable(before)


@contextmanager
def main_seen_as(spec: ModuleSpec | None, file: str | None) -> Iterator[None]:
    """multiprocessing, when it starts a process, sees another main module; without spec and file, as in a notebook."""
    with _main_lock:
        main = sys.modules["__main__"]
        stand_in = types.ModuleType("__main__")  # with all that is in it: other threads may be pickling
        vars(stand_in).update({**vars(main), "__spec__": spec, "__file__": file})
        sys.modules["__main__"] = stand_in
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def pickled(what: str, content: Any) -> bytes:
    """Content for another process, by cloudpickle: functions of any kind may be in it.

    Raises:
        ConfigError: if it cannot be pickled.
    """
    try:
        return cloudpickle.dumps(content)
    except Exception as error:  # pickle raises whatever the object's own methods raise
        raise ConfigError(
            f"{what} cannot be sent to a process: {type(error).__name__}: {error}; "
            "let it make there what cannot be pickled"
        ) from error
