"""A local child process: how the driver starts, joins and kills it, and what it runs.

Nothing here imports torch or numpy at import time: the child sets its environment variables before it imports them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import multiprocessing
import os
import shlex
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver, resource_tracker, spawn
from operator import attrgetter
from pathlib import Path
from typing import Any, TextIO, get_args

import cloudpickle
import psutil

from lucidrl.distributed.workers.interfaces import Hosting, StartMethod
from lucidrl.distributed.workers.outcomes import Returned, describe_error
from lucidrl.errors import ConfigError
from lucidrl.profiling.worker_times import CallTimes
from lucidrl.utils import nsys

_REAP_TIMEOUT_S = 5.0
_POLL_S = 0.05
_DRIVER_GONE_GRACE_S = 3.0
_PR_SET_PDEATHSIG = 1
_main_lock = threading.Lock()
_executable_lock = threading.Lock()


class ChildProcess:
    """A child process and the connection to it; the constructor starts the process.

    Args:
        target: a function of a module; the process calls it with its end of the connection, then `args`.
        imports_main: whether the process imports the program's main module first; objects pickled by reference to it
            need that. Without it, a program needs no `if __name__ == "__main__":` and the process starts faster.
        preload: modules that the fork server imports when it starts, which is once per program.
        wrapper: words of a command that runs the interpreter as its child; only for `spawn`.
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
        # A separate context leaves the program's start method alone. Not a daemon: a daemon may not start processes,
        # which data loaders do.
        context: Any = multiprocessing.get_context(start_method)
        self.connection, theirs = socket.socketpair()
        self._process = context.Process(target=target, args=(theirs, *args), name=name, daemon=False)
        if start_method == "forkserver":
            _preload(preload)
        self._folder = tempfile.TemporaryDirectory(prefix="lucidrl-wrapper-") if wrapper else None
        script = _wrapper_script(self._folder.name, [*wrapper, sys.executable]) if self._folder is not None else None
        # Only the child holds its end of the connection, so the connection closes when the child exits.
        with theirs, nullcontext() if imports_main else main_seen_as(None, None), _started_by(script):
            self._process.start()

    @property
    def is_wrapped(self) -> bool:
        """Whether another program runs the process: `pid` and the exit code are those of that program."""
        return self._folder is not None

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.exitcode is not None

    def join(self, timeout_s: float) -> int | None:
        """Wait for the process to exit; returns the exit code, or None at the timeout."""
        until = time.monotonic() + timeout_s
        # In short waits: multiprocessing waits for the end of a pipe that a grandchild may hold open.
        while not self.has_ended and (remaining_s := until - time.monotonic()) > 0:
            self._process.join(min(remaining_s, _POLL_S))
        return self._process.exitcode

    def end(self) -> None:
        """Close the connection for writing, so that the process exits by itself; does not wait."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """Kill the process; may be called twice."""
        if self.is_wrapped:
            with suppress(psutil.Error):
                for process in psutil.Process(self.pid).children(recursive=True):
                    process.kill()
        self._process.kill()

    def reap(self) -> None:
        """Leave no zombie and no open socket after `kill`."""
        self.join(_REAP_TIMEOUT_S)
        self.remove_wrapper()
        self.connection.close()

    def remove_wrapper(self) -> None:
        """Remove the script of a wrapped process, once it has started; may be called twice."""
        if self._folder is not None:
            self._folder.cleanup()

    def how_it_ended(self) -> str:
        """Verb and cause, such as `exited with code 3`, for a process that has exited or is about to exit."""
        code = self.join(_REAP_TIMEOUT_S)
        if code is None:
            return "closed its connection"
        if code >= 0:
            return f"exited with code {code}"
        names = {number.value: number.name for number in signal.Signals}  # real-time signals have no name
        name = names.get(-code, f"signal {-code}")
        return f"was killed by {name}" + (", perhaps out of memory," if -code == signal.SIGKILL else "")


def num_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def let_fork_server_end() -> None:
    """Let the fork server that started this process exit with its driver.

    multiprocessing has no public way to close the descriptor by which a child keeps its fork server alive.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_pid is None and server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def _preload(modules: Iterable[str]) -> None:
    """Add to the modules that the fork server imports; multiprocessing can only set the whole list."""
    wanted = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    forkserver.set_forkserver_preload(list(dict.fromkeys([*wanted, *modules])))


def _wrapper_script(folder: str, command: Sequence[str]) -> Path:
    """Write a script that runs a command with its arguments in a separate process group, out of reach of Ctrl-C."""
    path = Path(folder, "python")
    own_group = [sys.executable, "-ISc", "import os, sys; os.setpgid(0, 0); os.execvp(sys.argv[1], sys.argv[1:])"]
    path.write_text(f'#!/bin/sh\nexec {shlex.join([*own_group, *command])} "$@"\n')
    path.chmod(0o700)
    return path


@contextmanager
def _started_by(executable: Path | None) -> Iterator[None]:
    """Within the context, multiprocessing spawns processes with the interpreter `executable`; None: the current one."""
    with _executable_lock:
        if executable is None:
            yield
            return
        resource_tracker.ensure_running()  # else it would be spawned with `executable` too
        before = spawn.get_executable()
        spawn.set_executable(str(executable))
        try:
            yield
        finally:
            spawn.set_executable(before)


@contextmanager
def main_seen_as(spec: ModuleSpec | None, file: str | None) -> Iterator[None]:
    """Within the context, multiprocessing sees another main module; with None twice, no module, as in a notebook."""
    with _main_lock:
        main = sys.modules["__main__"]
        stand_in = types.ModuleType("__main__")  # has all of main's content: other threads may be pickling
        vars(stand_in).update({**vars(main), "__spec__": spec, "__file__": file})
        sys.modules["__main__"] = stand_in
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def pickled(what: str, content: Any) -> bytes:
    """Pickle content for another process with cloudpickle, which accepts any function.

    Raises:
        ConfigError: if it cannot be pickled.
    """
    try:
        return cloudpickle.dumps(content)
    except Exception as error:  # pickle raises any error of the object's methods
        raise ConfigError(
            f"{what} cannot be sent to a process: {type(error).__name__}: {error}; "
            "if an object cannot be pickled, create it inside that process instead of passing it"
        ) from error


@dataclass(frozen=True)
class ChildSettings:
    """Settings that the driver passes to the process of a worker."""

    rank: int
    hosting: Hosting
    environment: Mapping[str, str]
    num_threads: int
    log_path: Path | None
    """File for the output of the process; None if the process writes to the driver's output."""
    die_with_starting_thread: bool
    """Let Linux kill the process when the thread that started it ends; only correct if that is the main thread."""
    wrapper: Sequence[str] = ()
    """Words of a command that runs the process, such as a profiler."""


def serve(connection: socket.socket, settings: ChildSettings) -> None:
    """Send the id of this process, then serve the driver's calls until it closes the connection.

    The first call makes the worker and returns the process id too.
    """
    leave_signals_to_driver()
    end_with_driver(settings.die_with_starting_thread, with_thread=settings.hosting.uses_torch)
    if settings.log_path is not None:
        redirect_output(settings.log_path)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the driver sends it to get the stack, once it knows the process id
    with suppress(OSError):
        connection.sendall(os.getpid().to_bytes(8, "big"))
    if settings.hosting.start_method == "forkserver":
        os.environ.clear()  # these variables date from the start of the fork server
    os.environ.update(settings.environment)
    nsys.take_request_from_environment()

    if settings.hosting.uses_torch:
        import torch

        from lucidrl.utils.allocator import keep_freed_memory

        torch.set_num_threads(settings.num_threads)
        keep_freed_memory()

    from lucidrl.distributed.workers.messages import Message, call_of, receive_messages, send

    worker: Any = None

    def run(messages: Sequence[Message]) -> Returned:
        nonlocal worker
        method, args, kwargs = call_of(messages)
        if worker is None:
            worker = method(*args, **kwargs)
            return Returned(os.getpid())
        call = method if callable(method) else attrgetter(method)(worker)
        start = time.perf_counter()
        value = call(*args, **kwargs)
        return Returned(value, _times_since(start, settings.hosting))

    with suppress(EOFError, OSError):  # the driver closed the connection or exited
        while True:
            request = receive_messages(connection)
            try:
                reply = Message.of(run(request))
            except BaseException as error:  # SystemExit too: the driver reports it and kills this process
                if settings.log_path is not None:
                    traceback.print_exc()
                reply = Message.of(describe_error(error))
            send(connection, reply)
            del request, reply  # an idle worker holds no batch
    if worker is not None:
        worker.shutdown()


def _times_since(start: float, hosting: Hosting) -> CallTimes:
    """Times of the call that began at `start`; with the spans of this thread since the last call, if it has spans."""
    call_s = time.perf_counter() - start
    if not hosting.uses_torch:  # spans need torch
        return CallTimes(call_s)
    from lucidrl.profiling.spans import recorder

    totals = {name: (total.seconds, total.count) for name, total in recorder.drain().items()}
    return CallTimes(call_s, recorder.take_exclusive(), totals)


def leave_signals_to_driver() -> None:
    """Ignore Ctrl-C and SIGHUP, which reach every process of a terminal: the driver handles them for its workers."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def end_with_driver(die_with_starting_thread: bool, with_thread: bool = True) -> None:
    """Make this process exit when the driver is killed.

    Args:
        die_with_starting_thread: see `ChildSettings`.
        with_thread: also watch the driver in a thread. If both arguments are false, a busy worker must watch its parent
            itself; an idle worker sees the closed connection.
    """
    if die_with_starting_thread and sys.platform == "linux":
        # This signal also kills a process that is stopped, or stuck in native code.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        let_fork_server_end()

    if not with_thread:
        return

    def watch() -> None:
        driver = multiprocessing.parent_process()
        assert driver is not None
        driver.join()
        time.sleep(_DRIVER_GONE_GRACE_S)  # an idle worker sees the closed connection and exits by itself
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="driver-watch", daemon=True).start()


def redirect_output(path: Path) -> None:
    """Redirect output of Python and native code to the log, line by line."""
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout, sys.stderr = (_line_buffered(descriptor) for descriptor in (1, 2))


def _line_buffered(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
