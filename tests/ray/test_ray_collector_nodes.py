"""RayCollector on several nodes, one of which is lost."""

from __future__ import annotations

import logging
import time

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lucidrl.collectors import RayCollector
from tests.faults.processes import wait_until_gone
from tests.ray.collecting import Policy
from tests.unit.envs.faulty import healthy


@pytest.mark.slow
def test_a_lost_node_is_reported_and_its_actors_restart_on_another():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        other = cluster.add_node(num_cpus=2, resources={"other": 2})
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        options = [{}, {"scheduling_strategy": soft_affinity(other.node_id)}]
        with RayCollector(
            [healthy] * 2, Policy(), frames_per_batch=20, sync=True, remote_options=options, max_restarts=3
        ) as collector:
            collector.update_policy_weights_(Policy(3))
            collector.next()
            lost = collector.workers.pids[1]
            cluster.remove_node(other, allow_graceful=False)
            begun = time.monotonic()
            while collector.num_restarts == 0:  # Ray may deliver a reply that was on its way
                assert (collector.next()["largest"] == 3).all()
                assert time.monotonic() - begun < 120
            wait_until_gone([lost], timeout_s=180)
    finally:
        ray.shutdown()
        cluster.shutdown()


def soft_affinity(node_id):
    return NodeAffinitySchedulingStrategy(node_id, soft=True)
