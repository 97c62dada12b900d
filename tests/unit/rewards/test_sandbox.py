"""Code of a model runs without reach of anything outside, within limits, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from lucidrl.rewards import sandbox
from lucidrl.rewards.sandbox import SandboxError, SandboxLimits, SandboxResult, run_python

OTHERS = ("0x40000000", "0x20000")
"""Flags of network and mount namespaces."""
SHORT = SandboxLimits(timeout_s=0.4)


def run(code: str, **kwargs) -> SandboxResult:
    return run_python(code, **kwargs)


def boundary_or_skip() -> None:
    isolation = run("pass").isolation
    if not isolation.is_boundary:
        pytest.skip(f"this kernel refuses namespaces: {isolation.missing}")


def sandbox_processes() -> list[psutil.Process]:
    """Programs of sandboxes and processes with a user id of a sandbox."""
    found = []
    for process in psutil.process_iter(["cmdline", "uids", "status"]):
        uids, words = process.info["uids"], process.info["cmdline"] or []
        if process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        if (uids and uids.real >= 2_000_000_000) or any("sandbox_program" in word for word in words):
            found.append(process)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    left = sandbox_processes()  # those of other tests end soon
    assert psutil.wait_procs(left, timeout=5)[1] == []


def test_code_reads_its_input_and_writes_its_outputs():
    code = "import os, sys; print(input().upper()); print('no', file=sys.stderr); os.write(3, b'report')"
    result = run(code, stdin="grüß\n")
    assert (result.outcome, result.exit_code) == ("ok", 0)
    assert (result.stdout, result.stderr, result.report) == ("GRÜSS\n", "no\n", "report")


@pytest.mark.parametrize(
    ("code", "outcome", "exit_code"),
    [
        ("import sys; sys.exit(3)", "failed", 3),
        ("import os; os._exit(0)", "ok", 0),
        ("def f(): return f()\nf()", "failed", 1),
        ("\0", "failed", 1),
        ("x = '\ud800'", "failed", 1),
    ],
)
def test_the_end_of_the_code_is_reported(code, outcome, exit_code):
    result = run(code)
    assert (result.outcome, result.exit_code) == (outcome, exit_code)


def test_a_traceback_shows_the_code_alone():
    stderr = run("def f():\n    raise ValueError('bad')\nf()").stderr
    assert "ValueError: bad" in stderr
    assert "sandbox_program" not in stderr


def test_endless_loops_and_sleeps_time_out():
    started = time.monotonic()
    assert run("while True: pass", limits=SHORT).outcome == "timeout"
    assert run("import time; time.sleep(60)", limits=SHORT).outcome == "timeout"
    assert time.monotonic() - started < 2 * SHORT.timeout_s + 2


@pytest.mark.slow
def test_the_kernel_limits_cpu_time():
    result = run("while True: pass", limits=SandboxLimits(timeout_s=20, cpu_s=1))
    assert (result.outcome, result.exit_code) == ("timeout", -signal.SIGKILL)


def test_a_memory_hog_is_refused():
    result = run("x = bytearray(2**33)", limits=SandboxLimits(timeout_s=5, memory_bytes=2**28))
    assert result.outcome == "failed"
    assert "MemoryError" in result.stderr


def test_ten_megabytes_of_output_cost_no_memory():
    tracemalloc.start()
    try:
        result = run("for _ in range(160): print('x' * 65536)", limits=SandboxLimits(timeout_s=10))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.outcome == "ok"
    assert result.stdout_is_cut
    assert len(result.stdout) == SandboxLimits.output_chars
    assert peak < 2**20


@pytest.mark.slow
def test_a_fork_bomb_meets_its_limit_and_leaves_nothing():
    code = "import os, time\nwhile True:\n  try: os.fork()\n  except OSError: time.sleep(0.01)"
    result = run(code, limits=SHORT)
    assert result.outcome == "timeout"


def test_killing_every_process_kills_none_outside():
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        run("import os, signal\ntry: os.kill(-1, signal.SIGKILL)\nexcept OSError: pass")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_daemon_of_the_code_dies_with_it():
    code = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
        time.sleep(0.1)
    """
    assert run(dedent(code)).outcome == "ok"
    # The fixture finds no process.


def test_files_of_the_driver_are_out_of_reach(tmp_path):
    boundary_or_skip()
    secret = tmp_path / "secret.txt"
    secret.write_text("token")
    code = f"print(open({str(secret)!r}).read())"
    assert run(code).outcome == "failed"
    assert "token" not in run(code).stdout
    assert run("import os; print(os.path.exists('/etc'), os.path.exists('/proc/1'))").stdout == "False False\n"


def test_code_writes_to_its_own_folder_alone(tmp_path):
    boundary_or_skip()
    outside = [str(tmp_path / "x"), "/tmp/lucidrl-sandbox-test", "/usr/lib/x", "/x", "/dev/shm/x"]
    code = f"""
import os, tempfile
open("mine", "w").write("x")
open(os.path.expanduser("~/mine too"), "w").write("x")
tempfile.NamedTemporaryFile().write(b"x")
for path in {outside!r}:
    try:
        open(path, "w")
    except OSError:
        continue
    print("wrote", path)
"""
    result = run(code)
    assert (result.outcome, result.stdout) == ("ok", "")
    assert run("import os; print(os.listdir())").stdout == "[]\n"


@pytest.mark.slow
def test_files_have_a_limit():
    boundary_or_skip()
    limits = SandboxLimits(timeout_s=5, folder_bytes=2**20)
    code = "for name in 'abcd':\n  open(name, 'wb').write(bytes(2**19))"
    assert "No space left" in run(code, limits=limits).stderr
    big = "open('a', 'wb').write(bytes(2**20))"
    assert run(big, limits=SandboxLimits(timeout_s=5, file_bytes=2**16)).outcome == "failed"


def test_code_has_no_network():
    boundary_or_skip()
    code = "import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)"
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        result = run(code.format(port=server.getsockname()[1]))
    assert result.outcome == "failed"
    assert "OSError" in result.stderr


def test_code_sees_no_variables_of_the_driver(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "token")
    assert "SECRET_TOKEN" not in run("import os; print(list(os.environ))").stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the user id")
def test_code_of_root_runs_as_another_user_without_rights():
    result = run("import os; print(os.getuid() >= 2_000_000_000, os.getgroups()); os.setuid(0)")
    assert result.stdout == "True []\n"
    assert "PermissionError" in result.stderr
    assert "user" in result.isolation.done


@pytest.mark.slow
def test_the_code_dies_with_a_caller_that_is_killed():
    program = "from lucidrl.rewards.sandbox import run_python; run_python('import time; time.sleep(60)')"
    caller = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[3])
    until = time.monotonic() + 10
    while len(started := psutil.Process(caller.pid).children(recursive=True)) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    assert len(started) == 2
    caller.kill()
    caller.wait()
    assert not psutil.wait_procs(started, timeout=5)[1]


def test_a_sandbox_that_does_not_start_is_an_error_and_no_result(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "_PROGRAM", tmp_path / "missing.py")
    with pytest.raises(SandboxError, match=r"exited without a report: .*missing\.py"):
        run("pass")


@pytest.mark.parametrize("denied", ["0x20000000", *(pytest.param(flag, marks=pytest.mark.slow) for flag in OTHERS)])
def test_what_the_kernel_refuses_is_reported(monkeypatch, tmp_path, denied):
    """Without a namespace the limits still hold, and nothing is left."""
    source = sandbox._PROGRAM.read_text()
    changed = source.replace(
        "    def unshare(self, flags):\n",
        f"    def unshare(self, flags):\n        if flags == {denied}:\n            raise OSError(1, 'refused')\n",
    )
    assert changed != source
    program = tmp_path / "sandbox_program.py"
    program.write_text(changed)
    monkeypatch.setattr(sandbox, "_PROGRAM", program)
    code = (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(60)\nopen('x', 'w').write('x')\nprint('done')"
    )
    result = run(code, limits=SandboxLimits(timeout_s=5))
    assert (result.outcome, result.stdout) == ("ok", "done\n")
    assert not result.isolation.is_boundary
    assert "refused" in str(result.isolation.missing)
    assert not list(Path("/tmp").glob("lucidrl-sandbox-*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="others keep their user id")
def test_a_root_that_cannot_change_its_user_loses_its_capabilities(monkeypatch, tmp_path):
    source = sandbox._PROGRAM.read_text()
    changed = source.replace("        os.setgroups([])\n", "        raise OSError(1, 'refused')\n")
    assert changed != source
    program = tmp_path / "sandbox_program.py"
    program.write_text(changed)
    monkeypatch.setattr(sandbox, "_PROGRAM", program)
    result = run("import os; print(os.getuid()); os.chroot('/dev')")
    assert result.stdout == "0\n"
    assert "PermissionError" in result.stderr
    assert {"user"} == set(result.isolation.missing)
    assert result.isolation.is_boundary
    assert not sandbox.Isolation(sandbox.BOUNDARIES).is_boundary
