"""Which generators there are beside a policy, and on which nodes of a Ray cluster they may run."""

from __future__ import annotations

from collections.abc import Sequence

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.interfaces import Hosting, NodeChoice
from lucidrl.errors import ConfigError
from lucidrl.models.generation.config import GenerationConfig


def generator_hostings(config: GenerationConfig) -> list[Hosting]:
    """The number of each separate generator among all."""
    if config.placement == "policy":
        return []
    total, setting = config.num_workers, "policy.generation.num_workers"
    return [Hosting(first_number=number, pool_size=total, size_setting=setting) for number in range(total)]


def generator_nodes(config: GenerationConfig, policy_nodes: Sequence[str]) -> NodeChoice | None:
    """Where generators may be, given the nodes of the policy's workers; None for anywhere.

    With `refit=ipc` they have to share memory with the policy, and are on its nodes in any case.
    """
    if config.nodes == "any" and config.refit != "ipc":
        return None
    return NodeChoice(tuple(sorted(set(policy_nodes))), is_excluding=config.nodes == "other")


def check_nodes(config: GenerationConfig, cluster: ClusterConfig) -> None:
    """Refuse a choice of nodes where there is none.

    Raises:
        ConfigError: if generators are not started by Ray.
    """
    if config.nodes != "any" and not cluster.uses_ray:
        raise ConfigError(
            f"policy.generation.nodes={config.nodes} chooses among the nodes of a Ray cluster, but generators are "
            "processes of this machine; set cluster.address, or leave it out"
        )
