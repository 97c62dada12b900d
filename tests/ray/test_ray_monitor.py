"""The monitor of a Ray cluster sees the nodes of a real one."""

from __future__ import annotations

import urllib.request

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lucidrl.utils.logger.interface import LoggerInterface
from lucidrl.utils.logger.ray_monitor import RayGpuMonitorLogger, _wanted_samples
from tests.ray.nodes import wait_for


def monitor(parent_logger=None):
    return RayGpuMonitorLogger(0.2, 0.2, "ray", "ray/ray_step", parent_logger)


class Memory(LoggerInterface):
    def __init__(self):
        self.calls = []

    def log_metrics(self, metrics, step, prefix="", step_metric=None):
        self.calls.append((metrics, step, prefix, step_metric))

    def log_hyperparams(self, params):
        raise AssertionError("would replace those of the run")


def test_a_real_cluster_is_seen_node_by_node(cluster, caplog):
    parent = Memory()
    ray_monitor = monitor(parent)
    ray_monitor.start()
    wait_for(lambda: parent.calls and "node.1.mem_gb" in parent.calls[-1][0])
    ray_monitor.stop()
    metrics, step, prefix, step_metric = parent.calls[-1]
    assert (prefix, step_metric, metrics["ray/ray_step"]) == ("ray", "ray/ray_step", step / 1000)
    for node in ("node.0", "node.1"):
        # Ray counts what the container may have, where there is one.
        assert 0.1 < metrics[f"{node}.mem_gb"] < metrics[f"{node}.mem_total_gb"]
        assert metrics[f"{node}.mem_total_gb"] <= psutil.virtual_memory().total / 1024**3
        assert 0 <= metrics[f"{node}.cpu.util"] <= 100
    assert not caplog.records


def test_reading_only_some_lines_of_a_real_page_reads_the_same_samples(cluster):
    address = monitor()._metric_addresses()[0]
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    page = opener.open(f"http://{address}/metrics", timeout=60).read().decode()
    names = {"ray_node_cpu_utilization", "ray_node_mem_used", "ray_node_mem_total"}
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    wanted = [sample for sample in samples if sample.name in names]
    assert {sample.name for sample in wanted} == names
    assert sorted(_wanted_samples(page)) == sorted(wanted)


@pytest.mark.slow
def test_a_real_node_that_leaves_is_left_out_and_the_others_stay(cluster):
    ray_monitor = monitor()
    ray_monitor._collect_metrics()
    node = cluster.add_node(num_cpus=1)
    wait_for(lambda: "node.2.mem_gb" in ray_monitor._collect_metrics())
    cluster.remove_node(node)
    wait_for(lambda: "node.2.mem_gb" not in ray_monitor._collect_metrics())
    assert {"node.0.mem_gb", "node.1.mem_gb"} < ray_monitor._collect_metrics().keys()
