"""A cluster with an open dashboard is joined only if the settings allow it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ray.cluster_utils import Cluster


@pytest.fixture
def address(monkeypatch):
    """Of a cluster with a dashboard on all interfaces, which this program is not connected to."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)  # set by a Ray that was started in this process before
    dashboard = {"include_dashboard": True, "dashboard_host": "0.0.0.0"}
    simulated = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **dashboard})
    yield simulated.address
    simulated.shutdown()


@pytest.mark.slow
def test_an_open_dashboard_is_refused_before_anything_starts_unless_allowed(address):
    def check(*settings: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from lucidrl.cli import main; main()", "check", f"cluster.address={address}"]
        return subprocess.run([*command, *settings], capture_output=True, text=True, timeout=120)

    refused = check()
    assert refused.returncode == 2
    assert f"the dashboard of cluster.address={address}, at " in refused.stderr
    assert "--dashboard-host=127.0.0.1" in refused.stderr
    allowed = check("cluster.allow_open_dashboard=true")
    assert allowed.returncode == 0, allowed.stderr
