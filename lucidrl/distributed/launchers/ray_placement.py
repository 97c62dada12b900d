"""Room for ranks on the nodes of a Ray cluster: asked for as a whole, and had or refused within seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.launchers.interfaces import WHOLE, NodeChoice, Part
from lucidrl.errors import ConfigError

_DEADLINE_S = 8.0
"""What another program just gave back takes a moment to be free."""
_SHARED_CPUS = 0.01
"""Of a worker in a Ray that was started for the run: there, as without Ray, workers share the machine's cores."""

Resources = Mapping[str, float]


@dataclass(frozen=True)
class Room:
    """What was given: the same on every node."""

    group: Any
    """Ray's placement group, with a bundle a node."""
    num_nodes: int
    num_cpus: float
    num_gpus: float

    def node_ids(self) -> Sequence[str]:
        """Of the nodes that it is on."""
        from ray.util.placement_group import placement_group_table

        return list(placement_group_table(self.group)["bundles_to_node_id"].values())


@contextmanager
def reserved(
    cluster: ClusterConfig, is_own_ray: bool, part: Part = WHOLE, nodes: NodeChoice | None = None
) -> Iterator[Room]:
    """Hold room for all ranks meanwhile.

    Args:
        is_own_ray: whether the Ray was started for the run.
        part: of a whole that the ranks are, for the error.
        nodes: that they may be on; by default all.

    Raises:
        ConfigError: if there is no such room, with what was asked for and what is there.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    ranks_per_node = cluster.ranks_per_node
    num_cpus = ranks_per_node * (cluster.num_cpus_per_worker or (_SHARED_CPUS if is_own_ray else 1))
    num_gpus = ranks_per_node * _gpus_per_worker(cluster)
    bundle = {"CPU": num_cpus, "GPU": num_gpus} if num_gpus else {"CPU": num_cpus}
    totals = [total for node_id, total in _totals().items() if nodes is None or nodes.allows(node_id)]
    if sum(_holds(total, bundle) for total in totals) < cluster.num_nodes:
        raise _no_room(cluster, bundle, part, nodes)
    group = placement_group(
        [bundle] * cluster.num_nodes,
        strategy="STRICT_SPREAD",
        bundle_label_selector=None if nodes is None else [_selector(nodes)] * cluster.num_nodes,
    )
    try:
        if not group.wait(_DEADLINE_S):
            raise _no_room(cluster, bundle, part, nodes)
        yield Room(group, cluster.num_nodes, num_cpus, num_gpus)
    finally:
        if ray.is_initialized():  # the program may have left Ray before
            remove_placement_group(group)


def _gpus_per_worker(cluster: ClusterConfig) -> int:
    if cluster.num_gpus_per_worker is not None:
        return cluster.num_gpus_per_worker
    return 1 if any(total.get("GPU") for total in _totals().values()) else 0


def _totals() -> dict[str, Resources]:
    """Of each node that is alive, by its id."""
    import ray

    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _holds(resources: Resources, bundle: Resources) -> bool:
    return all(resources.get(name, 0) >= amount for name, amount in bundle.items())


def _selector(nodes: NodeChoice) -> dict[str, str]:
    return {"ray.io/node-id": f"{'!' if nodes.is_excluding else ''}in({','.join(nodes.ids)})"}


def _no_room(cluster: ClusterConfig, bundle: Resources, part: Part, choice: NodeChoice | None) -> ConfigError:
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    nodes = [
        f"{node['NodeManagerAddress']} ({node['NodeID'][:8]}) has "
        + ", ".join(
            f"{name} {free.get(node['NodeID'], {}).get(name, 0):g} of {node['Resources'].get(name, 0):g} free"
            for name in bundle
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    asked = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
    if part.total is None:
        who = f"cluster.num_workers={cluster.num_workers} on cluster.num_nodes={cluster.num_nodes}"
        where, remedy = f"each of {cluster.num_nodes} nodes", "spread the workers over more cluster.num_nodes, "
    else:
        who, where, remedy = f"number {part.first} of {part.setting}={part.total}", "one node", ""
    if choice is not None:
        where += f" {'other than' if choice.is_excluding else 'of'} {', '.join(name[:8] for name in choice.ids)}"
    return ConfigError(
        f"{who} asks Ray for {asked} on {where}, but " + "; ".join(nodes) + f". Lower {part.setting}, "
        f"cluster.num_cpus_per_worker or cluster.num_gpus_per_worker, {remedy}or end what holds the rest"
    )
