"""The driver reports every fault of an env process soon, and leaves no process or memory behind."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lucidrl.envs import ParallelEnv
from lucidrl.envs.process_main import RESET
from lucidrl.errors import EnvironmentFailure
from tests.faults.processes import wait_until_gone
from tests.tiers import slow_except
from tests.unit.envs.faulty import healthy, one_faulty

SHORT_S = 0.7
"""Timeout of a step that hangs; faults that are detected without it use a long one."""
LONG_S = 90.0
REPETITIONS = 3
FAULTS = {
    "raise": (r"ValueError: the wheel came off", r"in _raise\n"),
    "unpicklable": (r"UnpicklableError: wheel and axle", r"in _raise_unpicklable\n"),
    "leave": (r"SystemExit: enough", r"sys\.exit"),
    "exit": (r"the process of envs 2 to 3 exited with code 7", None),
    "kill": (r"the process of envs 2 to 3 was killed by SIGKILL, perhaps out of memory", None),
    "hang": (r"it took longer than step_timeout_s=0\.7; raise the timeout if the env needs longer", r"in hang_here"),
}


@pytest.fixture(scope="module", autouse=True)
def fork_server():
    """It stays for the next processes, and must not be taken for something left behind."""
    ParallelEnv(1, healthy).close()


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = children()
    yield
    gc.collect()
    assert children() == before
    assert "lucidrl-envs" not in Path("/proc/self/maps").read_text()
    assert "lucidrl-envs" not in " ".join(os.readlink(link) for link in open_descriptors())


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def open_descriptors() -> list[str]:
    return [path for number in os.listdir("/proc/self/fd") if os.path.islink(path := f"/proc/self/fd/{number}")]


def step_until_it_fails(env: ParallelEnv) -> tuple[EnvironmentFailure, float]:
    """The failure, and how long the step took that it came from."""
    for _ in range(5):
        begun = time.monotonic()
        try:
            env.step_and_reset_into(env.new_actions(), env.new_frame(), env.new_frame())
        except EnvironmentFailure as failure:
            return failure, time.monotonic() - begun
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("fault", slow_except(FAULTS, "kill", "hang"))
def test_a_faulty_env_is_named_in_time_and_everything_ends(fault):
    what, trace = FAULTS[fault]
    step_timeout_s = SHORT_S if fault == "hang" else LONG_S
    for _ in range(REPETITIONS):
        env = ParallelEnv(4, one_faulty(4, 3, fault), num_processes=2, step_timeout_s=step_timeout_s)
        env.set_seed(20)
        env.reset()
        failure, seconds = step_until_it_fails(env)
        assert re.fullmatch(rf"env 3 \(seed 23, action \[0, 0\]\) failed in its step: {what}", str(failure))
        assert seconds < 30
        if trace is not None:
            assert re.search(trace, str(failure.__cause__))
        with pytest.raises(EnvironmentFailure, match="the env processes have exited: env 3"):
            env.reset()
        begun = time.monotonic()
        env.close()
        assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("number", "step_timeout_s", "what"),
    [
        pytest.param(signal.SIGKILL, LONG_S, "killed by SIGKILL", id="killed"),
        pytest.param(signal.SIGSTOP, SHORT_S, "longer than step_timeout_s=0.7", id="stopped", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_is_killed_or_stopped_from_outside_is_reported(number, step_timeout_s, what):
    for _ in range(REPETITIONS):
        env = ParallelEnv(2, healthy, num_processes=2, step_timeout_s=step_timeout_s)
        env.reset()
        os.kill(env.processes[1].pid, number)
        failure, seconds = step_until_it_fails(env)
        assert re.match(rf"env 1 \(never seeded, action \[0, 0\]\) failed in its step: .*{what}", str(failure))
        assert seconds < 30


@pytest.mark.parametrize("fault", slow_except(["raise", "exit", "hang"], "raise"))
def test_a_reset_that_fails_is_reported(fault):
    step_timeout_s = SHORT_S if fault == "hang" else LONG_S
    env = ParallelEnv(2, one_faulty(2, 1, fault, in_reset=True), num_processes=1, step_timeout_s=step_timeout_s)
    with pytest.raises(EnvironmentFailure, match=r"env 1 \(never seeded\) failed in its reset: "):
        env.reset()


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (
            "import os; os._exit(3)",
            r"env 1 \(never seeded\) failed in its start: the process .* exited with code 3",
        ),
        pytest.param(
            "import time; time.sleep(99)",
            r"env 1 .* failed in its start: it took longer than start_timeout_s=3; raise the timeout",
            marks=pytest.mark.slow,
        ),
        ("1 / 0", r"env 1 \(never seeded\) failed in its start: ZeroDivisionError: division by zero"),
    ],
)
def test_a_start_that_fails_is_reported(code, what):
    with pytest.raises(EnvironmentFailure, match=what):
        ParallelEnv(2, [healthy, lambda: exec(code)], num_processes=2, start_timeout_s=3)


def test_a_busy_env_does_not_keep_anyone_from_closing():
    env = ParallelEnv(2, one_faulty(2, 0, "hang", in_reset=True), num_processes=2)
    env.rows.mask[...] = True
    for process in env.processes:
        process.start(RESET)
    begun = time.monotonic()
    env.close()
    assert time.monotonic() - begun < 30


def test_processes_map_no_memory_that_has_a_name():
    with ParallelEnv(2, healthy, num_processes=2) as env:
        env.reset()
        for process in env.processes:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert "lucidrl-envs (deleted)" in maps
            assert "/dev/shm" not in maps


SCRIPT = """
import os, sys, time
from lucidrl.envs import ParallelEnv
from tests.unit.envs.faulty import Faulty

class OfThisScript(Faulty):
    pass

fault = sys.argv[1] if sys.argv[1:] else None
env = ParallelEnv(2, [OfThisScript, lambda: OfThisScript(fault, in_reset=True)], num_processes=2)
print(*(process.pid for process in env.processes), flush=True)
"""


@pytest.fixture
def run_script(tmp_path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], list[int]]]]:
    """Starts a program without `if __name__ == "__main__":`; returns it and its env processes."""
    programs = []

    def run(then: str, *args: str) -> tuple[subprocess.Popen[str], list[int]]:
        (tmp_path / "program.py").write_text(SCRIPT + then)
        program = subprocess.Popen(
            [sys.executable, str(tmp_path / "program.py"), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
            start_new_session=True,
        )
        programs.append(program)
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len(pids) == 2
        return program, pids

    yield run
    for program in programs:
        with suppress(ProcessLookupError):  # nothing is left, unless a test failed
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()


@pytest.mark.slow
def test_a_program_that_forgets_to_close_exits(run_script):
    program, pids = run_script("env.rollout(3)")
    output, errors = program.communicate(timeout=120)
    assert (program.returncode, output, errors) == (0, "", "")
    wait_until_gone(pids)


@pytest.mark.slow
def test_a_killed_program_leaves_neither_idle_nor_busy_processes(run_script):
    program, pids = run_script("env.reset()", "hang")
    time.sleep(0.3)
    program.kill()
    program.wait()
    wait_until_gone(pids)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not end a process with its parent")
def test_a_killed_program_leaves_no_stopped_process(run_script):
    program, pids = run_script("time.sleep(1000)")
    os.kill(pids[0], signal.SIGSTOP)
    program.kill()
    program.wait()
    wait_until_gone(pids)


@pytest.mark.slow
def test_ctrl_c_is_reported_once(run_script):
    program, pids = run_script("env.reset()", "hang")
    time.sleep(0.3)
    os.killpg(program.pid, signal.SIGINT)
    _, errors = program.communicate(timeout=120)
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")
    wait_until_gone(pids)
