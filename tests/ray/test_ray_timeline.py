"""Ranks on several nodes are shown on one clock."""

from __future__ import annotations

import pytest

from lucidrl.distributed.config import ClusterConfig
from lucidrl.profiling.settings import FOLDER_VARIABLE
from tests.unit.report.meeting import median_gap_ms, meet

pytestmark = pytest.mark.slow
TWO_NODES = ClusterConfig(launcher="ray", num_workers=2, num_nodes=2, start_timeout_s=300, call_timeout_s=60)


@pytest.mark.parametrize("ahead_s", [0.0, 5.0])
def test_ranks_on_two_nodes_leave_a_barrier_at_the_same_time(cluster, tmp_path, monkeypatch, ahead_s):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "traces"))
    true_gap_ms = meet(tmp_path, TWO_NODES, ahead_s)
    assert median_gap_ms(tmp_path) <= 2 + true_gap_ms
