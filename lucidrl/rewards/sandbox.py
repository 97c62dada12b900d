"""Run Python code that a model wrote: with limits, and in separate namespaces and files where the kernel allows."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Outcome = Literal["ok", "failed", "killed", "timeout"]

BOUNDARIES = ("processes", "network", "files")
"""Kinds of isolation that together separate the code from the machine, if it has no Linux capabilities; see
docs/verifiers.md."""

_PROGRAM = Path(__file__).with_name("sandbox_program.py")
_GRACE_S = 10.0
"""Time for the start and the end of the sandbox program, in addition to the timeout of the code."""
_CHUNK = 1 << 16
_ENVIRONMENT = {"HOME": "/box", "TMPDIR": "/box", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
_KEPT_VARIABLES = ("LD_LIBRARY_PATH",)
"""Environment variables that the interpreter may need to start."""


class SandboxError(RuntimeError):
    """The sandbox itself failed, so the outcome of the code is unknown."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one run. The limits on memory, file size and open files apply to each process."""

    timeout_s: float = 5.0
    """Wall-clock time, from the start of the code."""
    cpu_s: int = 5
    """CPU time per process, in whole seconds."""
    memory_bytes: int = 512 * 2**20
    """Address space of a process."""
    file_bytes: int = 16 * 2**20
    """Size of a file."""
    folder_bytes: int = 32 * 2**20
    """Size of all files, if the sandbox has a private file system."""
    open_files: int = 64
    processes: int = 32
    """Number of processes and threads of the code; root is exempt."""
    output_chars: int = 64 * 2**10
    """Characters kept of standard output, of standard error, and of the sandbox's report on the run; the rest is
    discarded."""


@dataclass(frozen=True)
class Isolation:
    """Which kinds of isolation the sandbox could set up."""

    done: tuple[str, ...]
    """Some of `processes`, `network`, `ipc`, `files` and `user` (another user id, without capabilities); if the user id
    stays the same, also `user_namespace` and `capabilities` (dropped)."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Kinds that could not be set up, with the reason."""

    @property
    def is_boundary(self) -> bool:
        """Whether the code cannot reach processes, network and files outside the sandbox."""
        has_rights = not {"user", "capabilities"} & set(self.done)
        return set(BOUNDARIES) <= set(self.done) and not has_rights


@dataclass(frozen=True)
class SandboxResult:
    """How the code ended."""

    outcome: Outcome
    """`ok`: exit code 0. `failed`: another exit code. `killed`: by a signal. `timeout`: of wall-clock or CPU time."""
    exit_code: int
    """Exit code of the code; negative: the number of the signal that killed it."""
    stdout: str
    stdout_is_cut: bool
    stderr: str
    """The last characters of standard error."""
    report: str
    """What the code wrote to file descriptor 3."""
    isolation: Isolation


def run_python(code: str, *, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult:
    """Run the code as the main module of a fresh interpreter that has only the standard library.

    When this function returns, all processes of the code are dead and its folder is removed. This also happens if the
    caller is killed. Without a process namespace, a process of the code may live a moment longer.

    Raises:
        SandboxError: if the sandbox does not start, or exits without a report.
    """
    limits = limits or SandboxLimits()
    end_s = time.monotonic() + limits.timeout_s + _GRACE_S
    report_read, report_write = os.pipe()
    child_read, child_write = os.pipe()
    request = {
        "code": code,
        "stdin": stdin,
        "limits": asdict(limits),
        "report_fd": report_write,
        "child_fd": child_write,
    }
    message = json.dumps(request).encode()
    interpreter = getattr(sys, "_base_executable", None) or sys.executable
    try:
        process = subprocess.Popen(
            [interpreter, "-I", "-S", "-B", "-X", "utf8", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(report_write, child_write),
            env=_ENVIRONMENT | {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            cwd="/",
            bufsize=0,
        )
    except OSError as error:
        os.close(report_read)
        os.close(child_read)
        raise SandboxError(f"the sandbox cannot start {interpreter}: {error}") from error
    finally:
        os.close(report_write)
        os.close(child_write)
    assert process.stdin
    assert process.stdout
    assert process.stderr
    try:
        outputs = _Outputs(limits.output_chars)
        reports = outputs.add(report_read)
        out, err = outputs.add(process.stdout.fileno()), outputs.add(process.stderr.fileno(), keeps_end=True)
        written = outputs.add(child_read)
        outputs.exchange(process.stdin.fileno(), len(message).to_bytes(8) + message, until=reports, end_s=end_s)
    finally:
        # Closing its input makes a program that did not reply kill the code.
        process.stdin.close()
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
        os.close(report_read)
        os.close(child_read)
    return _result(reports.text, out, err.text, written.text, limits)


class _Kept:
    """The first, or the last, bytes read from a pipe."""

    def __init__(self, max_size: int, keeps_end: bool) -> None:
        self._content = bytearray()
        self._max_size, self._keeps_end = max_size, keeps_end
        self.is_cut = False
        self.is_closed = False

    def add(self, chunk: bytes) -> None:
        self._content += chunk
        if len(self._content) > self._max_size:
            self.is_cut = True
            del self._content[slice(-self._max_size) if self._keeps_end else slice(self._max_size, None)]

    @property
    def text(self) -> str:
        return self._content.decode("utf-8", "replace")


class _Outputs:
    """Reads several pipes concurrently; keeps a bounded number of bytes of each."""

    def __init__(self, max_size: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._max_size = max_size

    def add(self, descriptor: int, keeps_end: bool = False) -> _Kept:
        os.set_blocking(descriptor, False)
        kept = _Kept(self._max_size, keeps_end)
        self._selector.register(descriptor, selectors.EVENT_READ, kept)
        return kept

    def exchange(self, target: int, message: bytes, until: _Kept, end_s: float) -> None:
        """Write the message and read all pipes until `until` is closed; then read what is left in the other pipes."""
        unsent = memoryview(message)
        os.set_blocking(target, False)
        self._selector.register(target, selectors.EVENT_WRITE)
        while not until.is_closed and (left_s := end_s - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                if key.fd != target:
                    self._read(key.fd, key.data)
                    continue
                with suppress(BlockingIOError, BrokenPipeError):
                    unsent = unsent[os.write(target, unsent[: _CHUNK * 16]) :]
                if not unsent:
                    self._selector.unregister(target)
        for key in list(self._selector.get_map().values()):
            while key.fd != target and not key.data.is_closed and self._read(key.fd, key.data):
                pass
        self._selector.close()

    def _read(self, descriptor: int, kept: _Kept) -> int:
        """Read a chunk; return its size, 0 if no data is available."""
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return 0
        kept.add(chunk)
        if not chunk:
            kept.is_closed = True
            self._selector.unregister(descriptor)
        return len(chunk)


def _result(reported: str, out: _Kept, stderr: str, written: str, limits: SandboxLimits) -> SandboxResult:
    try:
        report = json.loads(reported)
        isolation = Isolation(tuple(report["setup"]["done"]), report["setup"]["missing"])
    except (ValueError, TypeError, KeyError) as error:
        raise SandboxError(f"the sandbox exited without a report: {stderr.strip()[-500:] or 'no output'}") from error
    exit_code = report["exit"]
    if not report["in_time"] or (exit_code < 0 and report["cpu_s"] >= limits.cpu_s - 0.1):
        outcome: Outcome = "timeout"
    else:
        outcome = "ok" if exit_code == 0 else "failed" if exit_code > 0 else "killed"
    return SandboxResult(outcome, exit_code, out.text, out.is_cut, stderr, written, isolation)
