"""One simulated Ray cluster for all tests of a session, and what a test has started."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from tests.ray.collecting import check_actors_gave_all_back
from tests.ray.nodes import MARK, check_all_was_given_back


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests of local clusters, in `test_own_ray*.py`, after those of simulated ones.

    A program that has been connected to a Ray with tokens, as local clusters have, cannot start actors in one without.
    """
    here = str(Path(__file__).parent)
    places = [place for place, item in enumerate(items) if str(item.path).startswith(here)]
    ordered = sorted((items[place] for place in places), key=lambda item: item.path.name.startswith("test_own_ray"))
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


@pytest.fixture(scope="session")
def simulated():
    """A cluster of two nodes with two CPUs each, all on this machine. This program is not connected to it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.setenv(MARK, str(os.getpid()))
        patched.setenv("RAY_worker_register_timeout_seconds", "300")  # a busy machine starts Python slowly
        simulated = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        simulated.add_node(num_cpus=2)
    yield simulated
    simulated.shutdown()


@pytest.fixture(scope="module")
def cluster(simulated):
    """The same cluster; this program is connected to it for the tests of a module, as if by its own `ray.init`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.setenv(MARK, str(os.getpid()))
        ray.init(address=simulated.address, log_to_driver=False, logging_level=logging.ERROR)
        yield simulated
        assert ray.is_initialized()
        check_all_was_given_back()
        ray.shutdown()


@pytest.fixture(scope="module")
def ray_of_the_program(cluster):
    """The connection that a program has made before it makes a collector."""
    yield
    check_actors_gave_all_back()


@pytest.fixture
def processes_of_ray():
    """All that this process started since, without Python's resource tracker, which stays for good."""
    before = psutil.Process().children(recursive=True)

    def found() -> list[psutil.Process]:
        new = [child for child in psutil.Process().children(recursive=True) if child not in before]
        return [child for child in new if "resource_tracker" not in " ".join(child.cmdline())]

    return found
