"""Settings of where workers run that contradict each other are refused, with what to do about it."""

from __future__ import annotations

import pytest

from lucidrl.distributed.config import ClusterConfig
from lucidrl.errors import ConfigError
from lucidrl.utils.config import validate


def test_an_address_means_ray_and_nothing_else_does():
    assert not ClusterConfig(num_workers=2).uses_ray
    assert ClusterConfig(address="auto").uses_ray
    assert ClusterConfig(launcher="ray").uses_ray
    assert ClusterConfig(launcher="ray", num_workers=6, num_nodes=3).ranks_per_node == 2


@pytest.mark.parametrize("address", ["auto", "local", "10.0.0.1:6379", "head-node.example:6379", "[fd00::2]:6379"])
def test_addresses_of_clusters_are_taken(address):
    assert ClusterConfig(address=address).address == address


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"address": "ray://head:10001"}, "is neither auto, local nor host:port; ray:// addresses are for clients"),
        ({"address": "head"}, "'head' is neither auto, local nor host:port"),
        ({"launcher": "local", "address": "auto"}, "address=auto is for workers that Ray starts; set launcher=ray"),
        ({"num_workers": 2, "num_nodes": 2}, "num_nodes=2 is for workers that Ray starts; set launcher=ray"),
        ({"allow_open_dashboard": True}, "allow_open_dashboard=True is for workers that Ray starts"),
        ({"num_gpus_per_worker": 0}, "num_gpus_per_worker=0 is for workers that Ray starts"),
        ({"launcher": "ray", "num_workers": 3, "num_nodes": 2}, "num_workers=3 is not a multiple of num_nodes=2"),
        ({"launcher": "slurm"}, "'auto', 'local' or 'ray'"),
    ],
)
def test_what_does_not_fit_together_is_refused(settings, complaint):
    with pytest.raises(ConfigError) as caught:
        validate(ClusterConfig, settings, at="cluster")
    assert complaint in str(caught.value)
