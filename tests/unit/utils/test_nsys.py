"""Requested steps are recorded once; invalid requests are refused before a model is loaded."""

from __future__ import annotations

import gc
import logging

import pytest

from lucidrl.errors import ConfigError
from lucidrl.models.control.config import ControlPolicyConfig, CriticConfig
from lucidrl.models.control.interfaces import DiscreteActions, ObservationSpace
from lucidrl.models.control.policy import ControlPolicy
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.policy.policy import Policy
from lucidrl.utils import nsys
from lucidrl.utils.nsys import StepRange, end_gpu_profile, maybe_gpu_profile_step
from tests.unit.profiling.reading import run_program


@pytest.fixture
def set_request(monkeypatch):
    """set_request(patterns, steps) sets the request of the variables."""

    def set_request(patterns: str, steps: str) -> None:
        monkeypatch.setattr(nsys, "NRL_NSYS_WORKER_PATTERNS", patterns)
        monkeypatch.setattr(nsys, "NRL_NSYS_PROFILE_STEP_RANGE", steps)

    set_request("", "")
    return set_request


class Noting:
    """Notes the calls, with the step at which they came."""

    step = 0

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start_gpu_profiling(self) -> None:
        self.calls.append(f"start at {self.step}")

    def stop_gpu_profiling(self) -> None:
        self.calls.append(f"stop at {self.step}")

    def visit(self, *steps: int) -> list[str]:
        for step in steps:
            self.step = step
            maybe_gpu_profile_step(self, step)
        return self.calls


# Requests


def test_without_variables_there_is_no_request(set_request):
    assert nsys.profile_request() is None
    assert Noting().visit(1, 2, 3) == []


@pytest.mark.parametrize("text", ["3:5", " 3 : 5 ", "03:5"])
def test_a_range_has_its_start_and_not_its_stop(text):
    steps = StepRange.parse(text)
    assert [step for step in range(1, 8) if step in steps] == [3, 4]


MISTAKES = {
    "no patterns": (
        "",
        "3:5",
        "NRL_NSYS_PROFILE_STEP_RANGE='3:5' needs NRL_NSYS_WORKER_PATTERNS too, such as '[*]'; set",
    ),
    "no range": ("*policy*", "", r"PATTERNS='\*policy\*' needs NRL_NSYS_PROFILE_STEP_RANGE too, such as 3:5; set both"),
    "only commas": (" , ,", "3:5", r"NRL_NSYS_WORKER_PATTERNS=', ,' has no pattern; write patterns such as"),
    "one number": ("*", "3", "NRL_NSYS_PROFILE_STEP_RANGE: '3' is not a range of steps; write start:stop"),
    "no number": ("*", "a:b", "'a:b' is not a range of steps"),
    "three numbers": ("*", "1:2:3", "'1:2:3' is not a range of steps"),
    "negative": ("*", "-1:3", "'-1:3' is not a range of steps"),
    "fractions": ("*", "1.5:3", "'1.5:3' is not a range of steps"),
    "from 0": ("*", "0:3", "'0:3' begins at 0, but steps count from 1; write 1:3"),
    "empty": ("*", "3:3", "'3:3' has no steps; write 3:4 for step 3"),
    "backwards": ("*", "5:3", "'5:3' has no steps"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_function_refuses_an_invalid_request(set_request, mistake):
    patterns, steps, sentence = MISTAKES[mistake]
    set_request(patterns, steps)
    policy = Noting()
    for function in (nsys.profile_request, lambda: nsys.matches("policy-0"), lambda: policy.visit(1)):
        with pytest.raises(ConfigError, match=sentence):
            function()
    assert policy.calls == []


def test_an_invalid_request_is_refused_before_a_model_is_loaded(set_request):
    set_request("*", "0:3")
    with pytest.raises(ConfigError, match="count from 1"):
        Policy({"model_name": "no such folder"}, embedded_tokenizer())
    with pytest.raises(ConfigError, match="count from 1"):
        ControlPolicy(ObservationSpace((4,)), DiscreteActions(2), ControlPolicyConfig(), CriticConfig())


def test_the_variables_are_read_at_import(tmp_path):
    code = "from lucidrl.utils import nsys; print(nsys.NRL_NSYS_WORKER_PATTERNS, nsys.NRL_NSYS_PROFILE_STEP_RANGE)"
    variables = {"NRL_NSYS_WORKER_PATTERNS": "*policy*", "NRL_NSYS_PROFILE_STEP_RANGE": "2:4"}
    assert run_program(code, tmp_path, variables).split() == ["*policy*", "2:4"]


def test_patterns_are_shell_wildcards_with_commas_between_them(set_request):
    set_request("*policy*, generation-[01]", "1:2")
    names = ["policy-0", "policy-17", "generation-0", "generation-2", "driver", "Policy-0"]
    assert [name for name in names if nsys.matches(name)] == ["policy-0", "policy-17", "generation-0"]


def test_patterns_that_no_worker_has_are_refused_with_the_names(set_request):
    set_request("*critic*", "1:2")
    with pytest.raises(
        ConfigError, match=r"no worker of this run matches '\*critic\*'.*one of these: policy-0, driver"
    ):
        nsys.check_patterns(["policy-0", "driver"])
    set_request("*policy*,*generation*", "1:2")
    nsys.check_patterns(["policy-0", "driver"])


def test_a_worker_records_unless_the_request_names_others(set_request):
    assert nsys.is_recorded("policy-1")
    assert not nsys.matches("policy-1")
    set_request("policy-0", "1:2")
    assert nsys.is_recorded("policy-0")
    assert not nsys.is_recorded("policy-1")


# Recording


def test_it_starts_at_the_first_step_inside_and_stops_at_the_first_outside(set_request):
    set_request("*", "3:5")
    assert Noting().visit(1, 2, 3, 4, 5, 6, 7) == ["start at 3", "stop at 5"]


@pytest.mark.parametrize(
    ("steps", "calls"),
    [
        ((4, 5, 6), ["start at 4", "stop at 5"]),  # a run that goes on in the middle of the range
        ((6, 7), []),  # or after it
        ((1, 4, 9), ["start at 4", "stop at 9"]),  # not every step need be told
        ((3, 2), ["start at 3", "stop at 2"]),
        ((3, 3, 3, 5, 5), ["start at 3", "stop at 5"]),
        ((3, 5, 3, 4, 5), ["start at 3", "stop at 5"]),  # a second visit
    ],
)
def test_each_happens_once(set_request, steps, calls):
    set_request("*", "3:5")
    assert Noting().visit(*steps) == calls


def test_several_policies_are_recorded_at_once_each_on_its_own(set_request):
    set_request("*", "2:4")
    first, second = Noting(), Noting()
    first.visit(1, 2)
    second.visit(3)
    first.visit(4)
    assert (first.calls, second.calls) == (["start at 2", "stop at 4"], ["start at 3"])
    second.visit(4)
    assert second.calls == ["start at 3", "stop at 4"]


def test_the_end_of_a_loop_stops_it_and_nothing_else_does_again(set_request):
    set_request("*", "2:9")
    policy = Noting()
    end_gpu_profile(policy)
    policy.visit(1, 2)
    end_gpu_profile(policy)
    end_gpu_profile(policy)
    assert policy.visit(3, 9) == ["start at 2", "stop at 2"]


def test_a_policy_that_cannot_start_does_not_record(set_request):
    class Failing(Noting):
        def start_gpu_profiling(self) -> None:
            raise OSError("no counters")

    set_request("*", "2:4")
    policy = Failing()
    with pytest.raises(OSError, match="no counters"):
        policy.visit(2)
    assert policy.visit(3, 4) == []  # nor is it started again


def test_a_policy_that_cannot_stop_is_neither_stopped_nor_started_again(set_request):
    class Failing(Noting):
        def stop_gpu_profiling(self) -> None:
            super().stop_gpu_profiling()
            raise OSError("no room")

    set_request("*", "2:3")
    policy = Failing()
    with pytest.raises(OSError, match="no room"):
        policy.visit(2, 3)
    assert policy.visit(4, 2, 5) == ["start at 2", "stop at 3"]


class Slotted:
    """Takes no attribute, no weak reference and no hash."""

    __slots__ = ("calls",)
    __hash__ = None

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __eq__(self, other: object) -> bool:
        return True

    def start_gpu_profiling(self) -> None:
        self.calls.append("start")

    def stop_gpu_profiling(self) -> None:
        self.calls.append("stop")


def test_any_object_will_do(set_request):
    set_request("*", "2:3")
    first, second = Slotted(), Slotted()
    for step in (1, 2, 3, 4):
        maybe_gpu_profile_step(first, step)
    assert (first.calls, second.calls) == (["start", "stop"], [])


def test_nothing_is_left_on_the_object(set_request):
    set_request("*", "2:3")
    policy = Noting()
    before = set(vars(policy))
    policy.visit(1, 2)
    assert vars(policy).keys() - before == {"step"}


def test_bookkeeping_ends_with_the_object(set_request):
    set_request("*", "2:3")
    for kind in (Noting, Slotted):
        policy = kind()
        for step in (2, 3):
            maybe_gpu_profile_step(policy, step)
        key = id(policy)
        del policy
        gc.collect()
        assert key not in nsys._done
        assert key not in nsys._running


def test_a_policy_that_records_is_kept_until_it_has_stopped(set_request):
    set_request("*", "2:9")
    stopped = []

    class Temporary(Noting):
        def stop_gpu_profiling(self) -> None:
            stopped.append(self.calls)

    Temporary().visit(2)
    gc.collect()
    nsys._end_all()
    assert stopped == [["start at 2"]]


def test_the_end_of_the_program_stops_what_still_records_and_that_once(tmp_path):
    code = """
from lucidrl.utils import nsys
nsys.NRL_NSYS_WORKER_PATTERNS, nsys.NRL_NSYS_PROFILE_STEP_RANGE = "*", "2:4"

class Policy:
    def __init__(self, name): self.name = name
    def start_gpu_profiling(self): print("start", self.name)
    def stop_gpu_profiling(self):
        print("stop", self.name)
        if self.name == "b": raise OSError("no room")

a, b, c = map(Policy, "abc")
for step in (1, 2, 3, 4):
    nsys.maybe_gpu_profile_step(a, step)
for policy in (b, c):
    nsys.maybe_gpu_profile_step(policy, 2)
print("end")
"""
    lines = run_program(code, tmp_path).splitlines()
    assert lines == ["start a", "stop a", "start b", "start c", "end", "stop b", "stop c"]


def test_a_failure_at_the_end_is_logged_and_the_others_are_stopped(set_request, caplog):
    class Failing(Noting):
        def stop_gpu_profiling(self) -> None:
            raise OSError("no room")

    set_request("*", "2:4")
    failing, fine = Failing(), Noting()
    failing.visit(2)
    fine.visit(2)
    with caplog.at_level(logging.WARNING):
        nsys._end_all()
    assert fine.calls == ["start at 2", "stop at 2"]
    assert "a recording could not be stopped" in caplog.text


def test_a_fork_does_not_stop_what_its_parent_records(tmp_path):
    code = """
import os
import sys
from lucidrl.utils import nsys

class Policy:
    def start_gpu_profiling(self): ...
    def stop_gpu_profiling(self): print("stop", os.getpid() == parent, flush=True)

parent = os.getpid()
nsys.set_profile_request("*", "2:4")
policy = Policy()
nsys.maybe_gpu_profile_step(policy, 2)
if os.fork() == 0:
    sys.exit()
os.wait()
"""
    assert run_program(code, tmp_path).splitlines() == ["stop True"]
