"""Rays that the tests of a module share: one of two nodes, and one for collectors; what a test has started."""

from __future__ import annotations

import logging
import os

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from tests.ray.collecting import check_actors_gave_all_back
from tests.ray.nodes import MARK, check_all_was_given_back


@pytest.fixture(scope="module")
def cluster():
    """This program is connected to it, as by a `ray.init` of its own."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.setenv(MARK, str(os.getpid()))
        simulated = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        simulated.add_node(num_cpus=2)
        ray.init(address=simulated.address, log_to_driver=False, logging_level=logging.ERROR)
        yield simulated
        check_all_was_given_back()
        ray.shutdown()
        simulated.shutdown()


@pytest.fixture(scope="module")
def ray_of_the_program():
    """One that a program has started before it makes a collector."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        yield
        assert ray.is_initialized()
        check_actors_gave_all_back()
        ray.shutdown()


@pytest.fixture
def processes_of_ray():
    """All that this process started since, without Python's resource tracker, which stays for good."""
    before = psutil.Process().children(recursive=True)

    def found() -> list[psutil.Process]:
        new = [child for child in psutil.Process().children(recursive=True) if child not in before]
        return [child for child in new if "resource_tracker" not in " ".join(child.cmdline())]

    return found
