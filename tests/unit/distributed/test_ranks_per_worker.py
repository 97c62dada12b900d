"""Under Ray, a worker that consists of several ranks reserves the resources of as many workers."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers import ray_resources
from lucidrl.distributed.workers.interfaces import Hosting
from lucidrl.distributed.workers.ray_resources import reserved
from lucidrl.errors import ConfigError

REPLICA = Hosting(pool_size=1, size_setting="policy.generation.num_workers", num_ranks=2)
NODE = {"NodeID": "node", "NodeManagerAddress": "10.0.0.1", "Alive": True}


@pytest.fixture
def node(monkeypatch):
    """Return a function that sets the resources of the only node of a cluster."""

    def has(**resources: float) -> None:
        monkeypatch.setattr(ray_resources, "_alive_nodes", lambda: [{**NODE, "Resources": resources}])
        monkeypatch.setattr(ray_resources.ray_internals, "free_by_node", lambda: {"node": resources})
        monkeypatch.setattr(ray_resources, "_held", lambda *_: nullcontext())

    return has


def test_a_worker_of_two_ranks_reserves_two_gpus_and_the_cpus_of_two_workers(node):
    node(CPU=8.0, GPU=2.0)
    with reserved(ClusterConfig(launcher="ray", num_cpus_per_worker=3), False, REPLICA) as room:
        assert room.options["num_gpus"] == 2
        assert room.options["num_cpus"] == 6


def test_too_few_gpus_for_the_ranks_are_refused(node):
    node(CPU=8.0, GPU=1.0)
    refused = pytest.raises(ConfigError, match=r"asks Ray for CPU 2, GPU 2 on one node, but .* GPU 1 of 1 free")
    with refused, reserved(ClusterConfig(launcher="ray"), False, REPLICA):
        pass
