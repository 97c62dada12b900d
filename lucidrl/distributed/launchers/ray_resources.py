"""What the nodes of a Ray cluster have and what is free of it, for whoever asks for a part."""

from __future__ import annotations

from collections.abc import Mapping

from lucidrl.distributed.launchers.ray_words import node_name

Resources = Mapping[str, float]
"""Amounts by name, as Ray counts them."""

RETURN_DEADLINE_S = 8.0
"""What another program just gave back takes a moment to be free."""
_ROUNDING = 1e-4
"""Ray counts no finer."""


def totals() -> dict[str, Resources]:
    """Of each node that is alive, by its id."""
    import ray

    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def free() -> dict[str, Resources]:
    """What nobody holds of each node that is alive, by its id."""
    from ray._private.state import available_resources_per_node

    return available_resources_per_node()


def holds(resources: Resources, asked: Resources) -> bool:
    """Whether what is asked for is a part of the resources."""
    return all(amount <= resources.get(name, 0) + _ROUNDING for name, amount in asked.items())


def described(resources: Resources) -> str:
    """For an error."""
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())


def free_on_nodes(asked: Resources) -> str:
    """How much every node has of what is asked for, and how much of it is free, for an error."""
    import ray

    free_by_id = free()
    return "; ".join(
        f"{node_name(node['NodeManagerAddress'], node['NodeID'])} has "
        + ", ".join(
            f"{name} {free_by_id.get(node['NodeID'], {}).get(name, 0):g} of {node['Resources'].get(name, 0):g} free"
            for name in asked
        )
        for node in ray.nodes()
        if node["Alive"]
    )
