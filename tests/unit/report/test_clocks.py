"""Processes with different clocks are shown on one clock."""

from __future__ import annotations

import json

import pytest

from lucidrl.distributed.config import ClusterConfig
from lucidrl.profiling import clock
from lucidrl.profiling.clock import ClockOffset, measured_offset
from lucidrl.profiling.settings import FOLDER_VARIABLE
from tests.unit.report.meeting import median_gap_ms, meet

TWO = ClusterConfig(num_workers=2, num_threads=1, start_timeout_s=300, call_timeout_s=60)


def test_the_shortest_reading_gives_offset_and_error(monkeypatch):
    own = iter([0, 90, 1000, 1010, 2000, 2100, 3000, 3050])
    other = iter([5100, 6005, 7000, 8000])
    monkeypatch.setattr(clock, "NUM_READINGS", 2)
    assert measured_offset(lambda: next(other), lambda: next(own)) == ClockOffset(5000, 5)


def test_offsets_over_a_relay_add_up():
    assert ClockOffset(100, 5).of_relayed(ClockOffset(-30, 2)) == ClockOffset(70, 7)


@pytest.mark.slow
@pytest.mark.parametrize("ahead_s", [0.0, 5.0])
def test_ranks_leave_a_barrier_at_the_same_time(tmp_path, monkeypatch, ahead_s):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "traces"))
    true_gap_ms = meet(tmp_path, TWO, ahead_s)
    lines = (tmp_path / "traces" / "clocks.jsonl").read_text().splitlines()
    measured = {entry["process"]: entry for entry in map(json.loads, lines)}
    assert abs(measured["worker-1"]["offset_ns"] - ahead_s * 1e9) <= measured["worker-1"]["error_ns"] + 100_000
    assert median_gap_ms(tmp_path) <= 2 + true_gap_ms
