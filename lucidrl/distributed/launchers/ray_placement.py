"""Room for ranks on the nodes of a Ray cluster: asked for as a whole, and had or refused within seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.launchers.ray_resources import (
    RETURN_DEADLINE_S,
    Resources,
    described,
    free_on_nodes,
    holds,
    totals,
)
from lucidrl.errors import ConfigError

_SHARED_CPUS = 0.01
"""Of a worker in a Ray that was started for the run: there, as without Ray, workers share the machine's cores."""


@dataclass(frozen=True)
class Room:
    """What was given: the same on every node."""

    group: Any
    """Ray's placement group, with a bundle a node."""
    num_nodes: int
    num_cpus: float
    num_gpus: float


@contextmanager
def reserved(cluster: ClusterConfig, is_own_ray: bool) -> Iterator[Room]:
    """Hold room for all ranks meanwhile.

    Args:
        is_own_ray: whether the Ray was started for the run.

    Raises:
        ConfigError: if there is no such room, with what was asked for and what is there.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    ranks_per_node = cluster.ranks_per_node
    num_cpus = ranks_per_node * (cluster.num_cpus_per_worker or (_SHARED_CPUS if is_own_ray else 1))
    num_gpus = ranks_per_node * _gpus_per_worker(cluster)
    bundle = {"CPU": num_cpus, "GPU": num_gpus} if num_gpus else {"CPU": num_cpus}
    if sum(holds(total, bundle) for total in totals()) < cluster.num_nodes:
        raise _no_room(cluster, bundle)
    group = placement_group([bundle] * cluster.num_nodes, strategy="STRICT_SPREAD")
    try:
        if not group.wait(RETURN_DEADLINE_S):
            raise _no_room(cluster, bundle)
        yield Room(group, cluster.num_nodes, num_cpus, num_gpus)
    finally:
        if ray.is_initialized():  # the program may have left Ray before
            remove_placement_group(group)


def _gpus_per_worker(cluster: ClusterConfig) -> int:
    if cluster.num_gpus_per_worker is not None:
        return cluster.num_gpus_per_worker
    return 1 if any(total.get("GPU") for total in totals()) else 0


def _no_room(cluster: ClusterConfig, bundle: Resources) -> ConfigError:
    return ConfigError(
        f"cluster.num_workers={cluster.num_workers} on cluster.num_nodes={cluster.num_nodes} asks Ray for "
        f"{described(bundle)} on each of {cluster.num_nodes} nodes, but {free_on_nodes(bundle)}. Lower "
        "cluster.num_workers, cluster.num_cpus_per_worker or cluster.num_gpus_per_worker, spread the workers over more "
        "cluster.num_nodes, or end what holds the rest"
    )
