"""Room for ranks and actors on the nodes of a Ray cluster: asked for as a whole, and had or refused within seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.launchers.interfaces import WHOLE, NodeChoice, Part
from lucidrl.distributed.launchers.ray_resources import (
    RETURN_DEADLINE_S,
    Resources,
    described,
    free,
    free_on_nodes,
    holds,
    totals,
)
from lucidrl.errors import ConfigError

_ONE_EACH = "STRICT_SPREAD"
"""Ray's name for bundles that are on different nodes."""
_NOTICE_S = 30.0
"""Ray takes about half as long to notice that a node is gone."""
_SHARED_CPUS = 0.01
"""Of a worker in a Ray that was started for the run: there, as without Ray, workers share the machine's cores."""


@dataclass(frozen=True)
class Room:
    """What was given: the same on every node."""

    group: Any
    """Ray's placement group, with a bundle a node."""
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
    ranks_per_node = cluster.ranks_per_node
    num_cpus = ranks_per_node * (cluster.num_cpus_per_worker or (_SHARED_CPUS if is_own_ray else 1))
    num_gpus = ranks_per_node * _gpus_per_worker(cluster)
    bundle = {"CPU": num_cpus, "GPU": num_gpus} if num_gpus else {"CPU": num_cpus}
    with _held(_request(cluster, bundle, part, nodes)) as group:
        yield Room(group, num_cpus, num_gpus)


@contextmanager
def reserved_for_actors(count: int, is_own_ray: bool) -> Iterator[Any]:
    """Hold room for actors of an environment meanwhile, spread over the nodes that have it.

    Yields:
        Ray's placement group, with a bundle for each actor.

    Raises:
        ConfigError: if there is no such room, with what was asked for and what is there.
    """
    bundle = {"CPU": _SHARED_CPUS if is_own_ray else 1.0}
    asked = f"env.num_actors={count} asks Ray for {described(bundle)} for each actor"
    with _held(_Request([bundle] * count, "SPREAD", asked, "Lower env.num_actors")) as group:
        yield group


@dataclass(frozen=True)
class _Request:
    """What is asked for, and what its refusal says of it."""

    bundles: Sequence[Resources]
    """All alike."""
    strategy: str
    asked: str
    remedy: str
    nodes: NodeChoice | None = None
    """That may be used; all by default."""

    def fits(self, resources: Mapping[str, Resources]) -> bool:
        """Whether nodes that have these, by id, could hold it."""
        most = 1 if self.strategy == _ONE_EACH else len(self.bundles)
        num_possible = [
            sum(holds(of_node, _times(count, self.bundles[0])) for count in range(1, most + 1))
            for node_id, of_node in resources.items()
            if self.nodes is None or self.nodes.allows(node_id)
        ]
        return sum(num_possible) >= len(self.bundles)


@contextmanager
def _held(request: _Request) -> Iterator[Any]:
    """Ray's placement group, there meanwhile."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    if not request.fits(totals()):
        raise _no_room(request)
    group = placement_group(
        [dict(bundle) for bundle in request.bundles],
        strategy=request.strategy,
        bundle_label_selector=None if request.nodes is None else [_selector(request.nodes)] * len(request.bundles),
    )
    try:
        # If there seems to be room, but Ray cannot give it, a node is gone and Ray has not noticed yet.
        if not group.wait(RETURN_DEADLINE_S) and not (request.fits(free()) and group.wait(_NOTICE_S)):
            raise _no_room(request)
        yield group
    finally:
        if ray.is_initialized():  # the program may have left Ray before
            remove_placement_group(group)


def _times(count: int, bundle: Resources) -> Resources:
    return {name: count * amount for name, amount in bundle.items()}


def _gpus_per_worker(cluster: ClusterConfig) -> int:
    if cluster.num_gpus_per_worker is not None:
        return cluster.num_gpus_per_worker
    return 1 if any(total.get("GPU") for total in totals().values()) else 0


def _request(cluster: ClusterConfig, bundle: Resources, part: Part, nodes: NodeChoice | None) -> _Request:
    if part.total is None:
        who = f"cluster.num_workers={cluster.num_workers} on cluster.num_nodes={cluster.num_nodes}"
        where, remedy = f"each of {cluster.num_nodes} nodes", ", spread the workers over more cluster.num_nodes"
    else:
        who, where, remedy = f"number {part.first} of {part.setting}={part.total}", "one node", ""
    if nodes is not None:
        where += f" {'other than' if nodes.is_excluding else 'of'} {', '.join(name[:8] for name in nodes.ids)}"
    return _Request(
        [bundle] * cluster.num_nodes,
        _ONE_EACH,
        f"{who} asks Ray for {described(bundle)} on {where}",
        f"Lower {part.setting}, cluster.num_cpus_per_worker or cluster.num_gpus_per_worker{remedy}",
        nodes,
    )


def _selector(nodes: NodeChoice) -> dict[str, str]:
    return {"ray.io/node-id": f"{'!' if nodes.is_excluding else ''}in({','.join(nodes.ids)})"}


def _no_room(request: _Request) -> ConfigError:
    return ConfigError(
        f"{request.asked}, but {free_on_nodes(request.bundles[0])}. {request.remedy}, or end what holds the rest"
    )
