"""Named ranges: nothing at all unless the process is armed, and what torch's profiler shows if it is."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import lucidrl
from lucidrl.profiling import gate, ranges, spans
from tests.unit.profiling.reading import ranges_of, read_trace


def as_if_armed(is_armed, monkeypatch):
    """The module as a process has it that decided so when it was imported."""
    monkeypatch.setattr(gate, "is_armed", is_armed)
    monkeypatch.setattr(gate, "is_enabled", is_armed)
    spec = importlib.util.spec_from_file_location("ranges_of_another_process", ranges.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def armed(monkeypatch):
    return as_if_armed(True, monkeypatch)


@pytest.fixture
def recorded(tmp_path):
    """Runs something under torch's profiler; its named ranges."""

    def record(work):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            work()
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))
        return ranges_of(tmp_path / "trace.json")

    return record


def add(left, right=1):
    """Adds."""
    return left + right


def test_unarmed_the_decorated_function_is_the_original(monkeypatch):
    unarmed = as_if_armed(False, monkeypatch)
    assert unarmed.profiled("add")(add) is add


def test_unarmed_every_block_is_the_same_null_context(monkeypatch):
    unarmed = as_if_armed(False, monkeypatch)
    assert unarmed._maybe_record_function("a") is unarmed._maybe_record_function("b") is spans.NOT_RECORDED


def test_an_armed_function_does_what_it_did(armed):
    ranged = armed.profiled("add")(add)
    assert (ranged(1, right=2), ranged.__name__, ranged.__doc__, ranged.__wrapped__) == (3, "add", "Adds.", add)


def test_calls_and_blocks_are_ranges_within_each_other(armed, recorded):
    ranged = armed.profiled("call")(add)

    def work():
        with armed._maybe_record_function("block"):
            ranged(torch.ones(2))
            ranged(torch.ones(2))

    block, *calls = recorded(work)
    assert block.name == "block"
    assert [call.name for call in block.inner] == ["call", "call"]
    assert block.inner == calls


def test_ranges_are_annotations_as_those_of_record_function(armed, recorded, tmp_path):
    recorded(lambda: armed.profiled("call")(add)(1))
    (event,) = [event for event in read_trace(tmp_path / "trace.json")["traceEvents"] if event["name"] == "call"]
    assert (event["cat"], event["ph"]) == ("user_annotation", "X")


def test_ranges_can_be_silenced_and_come_back(armed, recorded):
    def work():
        for is_enabled in (True, False, True):
            lucidrl.set_profiling_enabled(is_enabled)
            with armed._maybe_record_function(f"block {is_enabled}"):
                armed.profiled(f"call {is_enabled}")(add)(1)

    assert [each.name for each in recorded(work)] == ["block True", "call True"] * 2


def test_a_range_ends_where_its_code_raises(armed, recorded):
    @armed.profiled("fails")
    def fail():
        raise ValueError("no")

    def work():
        with pytest.raises(ValueError):
            fail()
        with armed._maybe_record_function("after"):
            pass

    assert [(each.name, each.inner) for each in recorded(work)] == [("fails", []), ("after", [])]


def test_armed_and_enabled_a_block_is_not_recorded_without_a_profiler(armed):
    assert armed._maybe_record_function("block") is spans.NOT_RECORDED
