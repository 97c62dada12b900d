"""Resources of a Ray cluster: reserved for all workers of a group together, granted or refused within seconds."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers import ray_internals
from lucidrl.distributed.workers.interfaces import Hosting, NodeChoice
from lucidrl.distributed.workers.ray_cluster import LOCAL, connected
from lucidrl.errors import ConfigError
from lucidrl.utils.imports import require_package

Resources = Mapping[str, float]
"""Amounts by name, as Ray counts them."""

_RELEASE_TIMEOUT_S = 8.0
"""Resources that another program just released take some seconds to become free."""
_NOTICE_S = 30.0
"""Longest wait until Ray reports a node dead; Ray takes about half as long."""
_CONNECT_TIMEOUT_S = 1.0
_SHARED_CPUS = 0.01
"""CPUs per worker of a local cluster: there, as without Ray, workers share the machine's cores."""
_ACCELERATOR_MARK = 0.001
"""Amount of the resource that only names the kind of accelerator of a node."""
_ROUNDING = 1e-4
"""Precision of Ray's amounts."""
_MOST_SHOWN = 300
"""Most characters shown of Ray's text about a lost actor, which may fill a page; the error's cause has all of it."""


@dataclass(frozen=True)
class Room:
    """Resources that Ray granted, the same on every node."""

    group: Any
    """Ray's placement group, with one bundle per node; None if the caller's options place the actor."""
    options: Mapping[str, Any]
    """Options of `ray.remote` for the actor of each node."""

    def node_ids(self) -> list[str]:
        """The nodes of the placement group."""
        from ray.util.placement_group import placement_group_table

        return list(placement_group_table(self.group)["bundles_to_node_id"].values())

    def actor(self, actor_class: type, bundle: int, runtime_env: Mapping[str, Any]) -> Any:
        """The actor class for one of the bundles; `env_vars` of the options override those of `runtime_env`.

        Raises:
            ConfigError: if Ray refuses the options.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = dict(self.options)
        own: Mapping[str, Any] = options.get("runtime_env") or {}
        variables = {**(runtime_env.get("env_vars") or {}), **(own.get("env_vars") or {})}
        options["runtime_env"] = {**runtime_env, **own, "env_vars": variables}
        if self.group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self.group, bundle)
        try:
            return ray.remote(actor_class).options(**options)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"Ray refuses the options {dict(self.options)}: {error}; use options that ray.remote takes for actors"
            ) from error


@contextmanager
def reserved(cluster: ClusterConfig, is_own_ray: bool, hosting: Hosting) -> Iterator[Room]:
    """Context manager: hold resources for all workers of a group inside it.

    Args:
        is_own_ray: whether this program started the cluster, on this machine.
        hosting: the nodes that workers may run on, and the options of `ray.remote` for each worker.

    Raises:
        ConfigError: if the cluster lacks the resources; the message names the requested and the free amounts.
    """
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    given = hosting.ray_options
    per_node = cluster.ranks_per_node
    default_cpus = hosting.num_ranks * (cluster.num_cpus_per_worker or (_SHARED_CPUS if is_own_ray else 1))
    num_cpus = per_node * given.get("num_cpus", default_cpus)
    num_gpus = per_node * given.get("num_gpus", 0 if given else hosting.num_ranks * _gpus_per_worker(cluster))
    options = {**given, "num_cpus": num_cpus, "num_gpus": num_gpus}
    bundle, strategy = _bundle(options), given.get("scheduling_strategy")
    if is_placed_by_caller := strategy is not None or not bundle:
        wait_for_dead_nodes()
    if not isinstance(strategy, PlacementGroupSchedulingStrategy) and not _fits(cluster, bundle, hosting, _totals()):
        raise _no_room(cluster, bundle, hosting)
    with nullcontext() if is_placed_by_caller else _held(cluster, bundle, hosting) as group:
        yield Room(group, options)


def check_can_be_placed(
    cluster: ClusterConfig,
    others: Sequence[Hosting] = (),
    choose_nodes: Callable[[Sequence[str]], NodeChoice | None] = lambda ids: None,
    num_env_workers: int = 0,
) -> None:
    """Refuse workers that do not fit into a running Ray cluster together; starts nothing.

    If the run will start a local cluster, only the number of nodes is checked.

    Args:
        cluster: the policy ranks.
        others: workers of a pool that run at the same time as the policy ranks.
        choose_nodes: returns the nodes for `others`, from the ids of the nodes of the policy ranks.
        num_env_workers: number of environment workers that also run at the same time.

    Raises:
        ConfigError: if Ray is not installed, not reachable, or too small.
    """
    require_package("ray", "cluster.launcher=ray")
    if is_to_be_started(cluster):
        if cluster.num_nodes > 1:
            raise ConfigError(
                f"cluster.num_nodes={cluster.num_nodes} needs a Ray cluster, but a local cluster has one node; set "
                "cluster.address, or remove num_nodes"
            )
        return
    with ExitStack() as held:
        is_own_ray = held.enter_context(connected(cluster.address, cluster.allow_open_dashboard))
        room = held.enter_context(reserved(cluster, is_own_ray, Hosting()))
        nodes = choose_nodes(room.node_ids())
        for hosting in others:
            held.enter_context(reserved(cluster.of_one(), is_own_ray, replace(hosting, nodes=nodes)))
        for number in range(num_env_workers):
            hosting = Hosting(first_number=number, pool_size=num_env_workers, size_setting="env.num_workers")
            held.enter_context(reserved(cluster.of_one(with_gpus=False), is_own_ray, hosting))


def is_to_be_started(cluster: ClusterConfig) -> bool:
    """Whether a local cluster will be started: no address is set, and the program is not connected to Ray."""
    import ray

    return cluster.address in (None, LOCAL) and not ray.is_initialized()


def wait_for_dead_nodes() -> None:
    """Wait until Ray reports every dead node as dead; before, Ray would place actors there, which fail at once."""
    until = time.monotonic() + _NOTICE_S
    while time.monotonic() < until and not all(map(_is_reachable, _alive_nodes())):
        time.sleep(_CONNECT_TIMEOUT_S)


def _is_reachable(node: Mapping[str, Any]) -> bool:
    address = (node["NodeManagerAddress"], node["NodeManagerPort"])
    try:
        socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


@contextmanager
def _held(cluster: ClusterConfig, bundle: Resources, hosting: Hosting) -> Iterator[Any]:
    """Context manager: hold a placement group of Ray inside it."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group(
        [dict(bundle)] * cluster.num_nodes,
        strategy="STRICT_SPREAD",  # bundles are on different nodes
        bundle_label_selector=None if hosting.nodes is None else [_selector(hosting.nodes)] * cluster.num_nodes,
    )
    try:
        # If enough resources seem free but Ray grants none, a node is dead and Ray has not noticed yet.
        if not group.wait(_RELEASE_TIMEOUT_S) and not (
            _fits(cluster, bundle, hosting, ray_internals.free_by_node()) and group.wait(_NOTICE_S)
        ):
            raise _no_room(cluster, bundle, hosting)
        yield group
    finally:
        if ray.is_initialized():  # the program may have disconnected before
            remove_placement_group(group)


def _fits(cluster: ClusterConfig, bundle: Resources, hosting: Hosting, resources: Mapping[str, Resources]) -> bool:
    """Whether enough allowed nodes have the resources of the bundle; `resources` is by node id."""
    nodes = hosting.nodes
    allowed = [of_node for node_id, of_node in resources.items() if nodes is None or nodes.allows(node_id)]
    having = [all(amount <= of_node.get(name, 0) + _ROUNDING for name, amount in bundle.items()) for of_node in allowed]
    return sum(having) >= cluster.num_nodes


def _gpus_per_worker(cluster: ClusterConfig) -> int:
    if cluster.num_gpus_per_worker is not None:
        return cluster.num_gpus_per_worker
    return 1 if any(total.get("GPU") for total in _totals().values()) else 0


def _bundle(options: Mapping[str, Any]) -> Resources:
    """Resources that an actor with these options takes from its node."""
    named = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus"), "memory": options.get("memory")}
    wanted = {**named, **(options.get("resources") or {})}
    if kind := options.get("accelerator_type"):
        wanted[f"accelerator_type:{kind}"] = _ACCELERATOR_MARK
    return {name: float(amount) for name, amount in wanted.items() if amount}


def _selector(nodes: NodeChoice) -> dict[str, str]:
    return {"ray.io/node-id": f"{'!' if nodes.is_excluding else ''}in({','.join(nodes.ids)})"}


def _no_room(cluster: ClusterConfig, bundle: Resources, hosting: Hosting) -> ConfigError:
    """The error for missing resources; names the total and the free amount of every node."""
    per_worker = "cluster.num_cpus_per_worker or cluster.num_gpus_per_worker"
    if hosting.pool_size is None:
        who = f"cluster.num_workers={cluster.num_workers} on cluster.num_nodes={cluster.num_nodes}"
        where = f"each of {cluster.num_nodes} nodes"
        remedy = f", {per_worker}, spread the workers over more nodes (cluster.num_nodes)"
    else:
        who, where = f"worker {hosting.first_number} of {hosting.size_setting}={hosting.pool_size}", "one node"
        remedy = f" or {'remote_options' if hosting.ray_options else per_worker}"
    if (nodes := hosting.nodes) is not None:
        where += f" {'other than' if nodes.is_excluding else 'of'} {', '.join(name[:8] for name in nodes.ids)}"
    wanted = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
    free_by_id = ray_internals.free_by_node()
    free = "; ".join(
        f"{node_name(node['NodeManagerAddress'], node['NodeID'])} has "
        + ", ".join(
            f"{name} {free_by_id.get(node['NodeID'], {}).get(name, 0):g} of {node['Resources'].get(name, 0):g} free"
            for name in bundle
        )
        for node in _alive_nodes()
    )
    return ConfigError(
        f"{who} asks Ray for {wanted} on {where}, but {free}. Lower {hosting.size_setting}{remedy}, or stop the "
        "programs that hold the other resources"
    )


def _alive_nodes() -> list[dict[str, Any]]:
    """Nodes that Ray reports as alive."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _totals() -> dict[str, Resources]:
    """Resources of each node that is alive, by its id."""
    return {node["NodeID"]: node["Resources"] for node in _alive_nodes()}


def node_name(ip: str, node_id: str) -> str:
    """Name of a node in errors; it has the id, because several nodes of one machine may have the same address."""
    return f"{ip} ({node_id[:8]})"


def last_line(error: BaseException) -> str:
    """The line of an error in which Ray names the cause."""
    *_, line = str(error).strip().splitlines() or [type(error).__name__]
    line = line.strip()
    return line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]} ..."
