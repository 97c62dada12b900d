"""Ranks on several nodes are shown on one clock."""

from __future__ import annotations

import pytest

from lucidrl.distributed.config import ClusterConfig
from lucidrl.profiling.settings import FOLDER_VARIABLE
from tests.unit.recipes.test_profile import GRPO, lucidrl
from tests.unit.report.meeting import median_gap_ms, meet
from tests.unit.report.validation import valid_timeline

pytestmark = pytest.mark.slow
TWO_NODES = ClusterConfig(launcher="ray", num_workers=2, num_nodes=2, start_timeout_s=300, call_timeout_s=60)


@pytest.mark.parametrize("ahead_s", [0.0, 5.0])
def test_ranks_on_two_nodes_leave_a_barrier_at_the_same_time(cluster, tmp_path, monkeypatch, ahead_s):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "traces"))
    true_gap_ms = meet(tmp_path, TWO_NODES, ahead_s)
    assert median_gap_ms(tmp_path) <= 2 + true_gap_ms


def test_a_run_on_two_nodes_with_a_generator_is_one_timeline_and_one_report(cluster, tmp_path):
    nodes = (
        "cluster.launcher=ray",
        f"cluster.address={cluster.address}",
        "cluster.num_workers=2",
        "cluster.num_nodes=2",
    )
    generator = ("policy.generation.placement=separate", "policy.generation.refit=collective", "cluster.num_threads=1")
    lucidrl(tmp_path, "grpo", GRPO, "profile.steps=2:4", *nodes, *generator)
    content = valid_timeline(tmp_path / "run" / "traces" / "timeline.json.gz")
    assert content["lucidrl"]["missing"] == []
    names = {event["pid"]: event["args"]["name"] for event in content["traceEvents"] if event["name"] == "process_name"}
    assert {"driver", "policy-0", "policy-1", "generation-0"} <= set(names.values())
    spans = {(names[event["pid"]], event["name"]) for event in content["traceEvents"] if event["ph"] == "X"}
    assert {("policy-0", "train"), ("policy-1", "train"), ("generation-0", "generate"), ("driver", "rollout")} <= spans
    clocks = {entry["process"]: entry["clock"] for entry in content["lucidrl"]["inputs"]}
    assert all(clocks[name]["error_ns"] < 50e6 for name in ("policy-0", "policy-1", "generation-0"))
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Recorded spans of traces/timeline.json.gz" in page
    assert "Missing:" not in page
