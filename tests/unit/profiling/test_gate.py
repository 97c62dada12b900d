"""Whether a process has per-frame ranges."""

from __future__ import annotations

import os
import warnings

import pytest

import lucidrl
from lucidrl.profiling import gate
from tests.unit.profiling.reading import run_program


@pytest.mark.parametrize(
    ("variables", "is_armed"),
    [
        ({}, False),
        ({"LUCIDRL_PROFILING": "1"}, True),
        ({"TORCHRL_PROFILING": "1"}, True),
        ({"TORCHRL_PROFILING": "true"}, True),
        ({"TORCHRL_PROFILING": "True"}, True),
        ({"TORCHRL_PROFILING": "0"}, False),
        ({"TORCHRL_PROFILING": ""}, False),
        ({"LUCIDRL_PROFILING": "0", "TORCHRL_PROFILING": "1"}, False),
        ({"LUCIDRL_PROFILING": "", "TORCHRL_PROFILING": "1"}, True),
    ],
)
def test_either_variable_arms_and_our_own_decides(variables, is_armed):
    assert gate._asks_for_ranges(variables) is is_armed


def test_switching_on_without_arming_warns_and_does_nothing(monkeypatch):
    monkeypatch.setattr(gate, "is_armed", False)
    monkeypatch.setattr(gate, "is_enabled", False)
    with pytest.warns(UserWarning, match="set LUCIDRL_PROFILING=1 before lucidrl is imported") as warned:
        lucidrl.set_profiling_enabled(True)
    assert warned[0].filename == __file__  # the warning names the caller
    assert not gate.is_enabled


def test_switching_off_without_arming_does_not_warn(monkeypatch):
    monkeypatch.setattr(gate, "is_armed", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lucidrl.set_profiling_enabled(False)


def test_other_processes_are_armed_as_this_one_is(monkeypatch):
    monkeypatch.setattr(gate, "is_armed", False)
    assert gate.armed_environment() == {}
    monkeypatch.setattr(gate, "is_armed", True)
    assert gate._asks_for_ranges(gate.armed_environment())


@pytest.mark.slow
def test_a_program_can_arm_itself_before_it_defines_anything_and_not_later(tmp_path):
    code = """if True:
        import os
        from lucidrl.profiling import gate
        {before}
        from lucidrl.envs.base import EnvBase
        {after}
        print(hasattr(EnvBase.step, "__wrapped__"), os.environ.get("LUCIDRL_PROFILING"))
    """
    assert run_program(code.format(before="assert gate.arm()", after=""), tmp_path).split() == ["True", "1"]
    assert run_program(code.format(before="pass", after="assert not gate.arm()"), tmp_path).split() == ["False", "1"]
    assert "LUCIDRL_PROFILING" not in os.environ
