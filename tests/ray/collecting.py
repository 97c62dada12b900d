"""What tests of RayCollector share."""

from __future__ import annotations

import gc

import ray

from tests.ray.nodes import wait_for
from tests.unit.collectors.toys import Chance, Versioned

HOST = r"[\d.]+ \([0-9a-f]{8}\)"
NODE = rf"on node {HOST}"


class Policy(Versioned):
    """Reports its version, as `Versioned` does, and draws its actions."""

    def forward(self, observation):
        return {**super().forward(observation), "action": Chance()(observation)}


def check_actors_gave_all_back():
    """All CPUs are free, and no object is referred to by this program any more."""
    wait_for(lambda: ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU"))
    wait_for(_refers_to_nothing)


def _refers_to_nothing():
    gc.collect()  # a thread that just ended leaves cycles
    return not ray._private.worker.global_worker.core_worker.get_all_reference_counts()
