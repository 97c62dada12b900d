"""The runner: a forked process that verifies one completion after the other, until the parent kills it.

The parent, a `VerifierWorker`, sends pickled items and enforces the timeout. Replies are plain numbers and text, so the
parent never unpickles bytes that a runner wrote.
"""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from contextlib import suppress
from typing import NoReturn

from lucidrl.rewards.interfaces import Limits, PoolJob
from lucidrl.rewards.outcome import Verified, VerifierOutcome, verified

READY, SCORED, PARSE_FAILURE, CRASH, BAD_ROW, TEXT = range(6)
"""Kinds of replies. A runner sends READY once, before its first item."""
OUTCOMES: dict[int, VerifierOutcome] = {
    SCORED: "scored",
    PARSE_FAILURE: "parse_failure",
    CRASH: "crash",
    BAD_ROW: "crash",
    TEXT: "scored",
}
_KINDS: dict[VerifierOutcome, int] = {"scored": SCORED, "parse_failure": PARSE_FAILURE, "crash": CRASH}
HEADER = struct.Struct(">BBdI")
"""Header of a reply: kind, whether this is the runner's last reply, score, and length of the text that follows."""
SIZE = struct.Struct(">Q")
"""Header of an item: its size in bytes."""

_MOST_TEXT_BYTES = 1000
MOST_RESULT_BYTES = 1 << 20
"""Longest text of a reply: the result of a tool."""
_MOST_ITEMS = 5000
_MOST_GROWTH_BYTES = 32 << 20
"""A runner that has grown by more than this is replaced after its current item: the caches of a verifier, such as those
of math-verify's parser, grow with every new expression."""
LARGE_BYTES = 1 << 20
"""After an item larger than this, the heap's free memory is returned to the kernel."""
_PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def run(connection: socket.socket, verifier: PoolJob, limits: Limits, parent: int) -> NoReturn:
    """Verify items in a process that was just forked; never returns."""
    try:
        _detach(connection, parent)
        _set_limits(limits)
        _serve(connection, verifier, limits)
    finally:
        os._exit(0)


def _detach(connection: socket.socket, parent: int) -> None:
    """Detach from the parent's terminal, output and open files; on Linux, die when the parent dies."""
    os.setsid()  # a process group that can be killed as a whole
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # the runner adopts orphans of its children
    if os.getppid() != parent:
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    own = connection.fileno()
    os.closerange(3, own)
    os.closerange(own + 1, os.sysconf("SC_OPEN_MAX"))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _set_limits(limits: Limits) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            now_bytes = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now_bytes + limits.memory_bytes,) * 2)


def _serve(connection: socket.socket, verifier: PoolJob, limits: Limits) -> None:
    pid, hard_cpu_limit = os.getpid(), resource.getrlimit(resource.RLIMIT_CPU)[1]
    start_bytes = _peak_bytes()
    _send(connection, READY)
    for number in range(1, _MOST_ITEMS + 1):
        item = _receive(connection)
        if item is None:
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        # Children of the runner inherit the limit; each has its own CPU time.
        cpu_limit = math.ceil(used.ru_utime + used.ru_stime + limits.timeout_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit, hard_cpu_limit))
        found = _verify(verifier, item)
        if os.getpid() != pid:  # a child that the verifier forked returned from the call
            return
        if len(item) > LARGE_BYTES:
            del item
            trim_memory()
        is_worn = number == _MOST_ITEMS or _peak_bytes() - start_bytes > _MOST_GROWTH_BYTES
        is_last = is_worn or found.outcome == "crash" or _has_children()
        if found.text:
            _send(connection, TEXT, is_last, text=found.text, most_bytes=MOST_RESULT_BYTES)
        else:
            kind = BAD_ROW if found.is_bad_row else _KINDS[found.outcome]
            _send(connection, kind, is_last, found.score, found.detail)
        if is_last:
            signal.pause()  # the parent kills this process and its children


def _verify(verifier: PoolJob, item: bytes) -> Verified:
    try:
        return verified(verifier, *pickle.loads(item))
    except BaseException as error:  # SystemExit too
        return Verified("crash", detail=f"{type(error).__name__}: {error}")


def _send(
    connection: socket.socket,
    kind: int,
    is_last: bool = False,
    score: float = 0.0,
    text: str = "",
    most_bytes: int = _MOST_TEXT_BYTES,
) -> None:
    encoded = text.encode(errors="replace")[:most_bytes]
    connection.sendall(HEADER.pack(kind, is_last, score, len(encoded)) + encoded)


def _receive(connection: socket.socket) -> bytes | None:
    """The next item; None if the parent closed the connection."""
    header = _read(connection, SIZE.size)
    return None if header is None else _read(connection, SIZE.unpack(header)[0])


def _read(connection: socket.socket, size_bytes: int) -> bytes | None:
    parts = []
    while size_bytes:
        part = b""
        with suppress(OSError):
            part = connection.recv(min(size_bytes, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size_bytes -= len(part)
    return b"".join(parts)


def _has_children() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def trim_memory() -> None:
    """Return the heap's free memory to the kernel; by default the C library keeps it."""
    with suppress(AttributeError, OSError):  # only glibc has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def _peak_bytes() -> int:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)
