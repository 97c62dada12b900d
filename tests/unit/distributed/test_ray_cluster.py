"""Which Ray an address leads to."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("ray")

from lucidrl.distributed.workers import ray_cluster, ray_resources
from lucidrl.distributed.workers.ray_cluster import connected, is_own_folder
from lucidrl.errors import ConfigError


@pytest.mark.parametrize("address", ["127.0.0.1:6379", "localhost:6379"])
def test_a_loopback_address_is_that_of_the_node_as_for_ray(address, monkeypatch):
    monkeypatch.setattr("ray._private.services.get_node_ip_address", lambda: "10.1.2.3")
    assert ("10.1.2.3", 6379) in ray_cluster._endpoints(address)
    assert not ray_cluster._endpoints(address) & ray_cluster._endpoints("10.1.2.3:6380")


def test_a_name_that_leads_nowhere_is_at_no_place():
    assert ray_cluster._endpoints("no-such-host.invalid:6379") == set()


def test_what_is_automatic_is_decided_by_the_variable_and_tried_at_once(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=127.0.0.1:1 is not a reachable Ray"), connected("auto"):
        pass


def test_folders_of_local_clusters_differ_from_those_of_other_rays():
    assert is_own_folder("/tmp/lucid-ray-abc")
    assert not is_own_folder("/tmp/ray")


def test_an_actor_that_its_user_places_waits_until_ray_has_noticed_a_dead_node(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as alive, socket.create_server(("127.0.0.1", 0)) as dying:
        ports = [listener.getsockname()[1] for listener in (alive, dying)]
        dying.close()
        nodes = [{"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port} for port in ports]
        reported = iter([nodes, nodes, nodes[:1]])
        monkeypatch.setattr(ray_resources, "_alive_nodes", lambda: next(reported))
        monkeypatch.setattr(ray_resources, "_CONNECT_TIMEOUT_S", 0.1)
        ray_resources.wait_for_dead_nodes()
        assert list(reported) == []


def test_the_wait_for_a_dead_node_ends(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dead = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": listener.getsockname()[1]}
    monkeypatch.setattr(ray_resources, "_alive_nodes", lambda: [dead])
    monkeypatch.setattr(ray_resources, "_NOTICE_S", 0.2)
    monkeypatch.setattr(ray_resources, "_CONNECT_TIMEOUT_S", 0.1)
    ray_resources.wait_for_dead_nodes()
