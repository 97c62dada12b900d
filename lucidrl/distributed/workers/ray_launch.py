"""Starts workers on the nodes of a Ray cluster: an agent per node reserves their resources and runs their processes.

The agent of rank 0's node hosts the store at which ranks meet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.environment import DriverProgram
from lucidrl.distributed.workers.interfaces import Hosting, NodeChoice, NodeLost, Numbering, WorkerLabel
from lucidrl.distributed.workers.logs import LogFolder, WorkerLog, marked
from lucidrl.distributed.workers.outcomes import START, explain_loss
from lucidrl.distributed.workers.place import LOOPBACK
from lucidrl.distributed.workers.ray_actor import NodeAgent, NodePlan, NodeStart
from lucidrl.distributed.workers.ray_cluster import LOCAL, connected
from lucidrl.distributed.workers.ray_resources import Room, node_name, reserved
from lucidrl.distributed.workers.ray_workers import RayNode, RayWorkers, answer_of
from lucidrl.errors import ConfigError
from lucidrl.profiling.settings import FOLDER_VARIABLE, traces_folder
from lucidrl.utils import nsys
from lucidrl.utils.imports import require_package
from lucidrl.utils.nsys_launch import warn_of_no_nsys

_log = logging.getLogger(__name__)


def start_on_ray(cluster: ClusterConfig, hosting: Hosting, logs: LogFolder) -> RayWorkers:
    """Start the processes of all workers on one or several nodes; they wait for their first call.

    Raises:
        ConfigError: if Ray is not there or has no room, before anything is started.
        WorkerError: if a node is lost meanwhile.
    """
    program = DriverProgram.of_this_process()  # first: in a rank of a script without the usual guard it raises
    hosting = replace(hosting, start_method="spawn", log_dir=logs.path.resolve() if hosting.captures_output else None)
    with ExitStack() as held:
        is_own_ray = held.enter_context(connected(cluster.address, cluster.allow_open_dashboard))
        room = held.enter_context(reserved(cluster, is_own_ray, hosting))
        nodes = _start_agents(program, cluster, room, held)
        ranks = [rank for node in nodes for rank in node.ranks]
        labels = [
            WorkerLabel(rank, hosting, logs.of_worker(hosting.number(rank)) if hosting.captures_output else None)
            for rank in ranks
        ]
        for node in nodes:
            node.logs = [WorkerLog(path) for rank in node.ranks if (path := labels[rank].log_path) is not None]
        try:
            facts = _ask_all(nodes, cluster, [node.actor.facts.remote() for node in nodes])
            for node, found in zip(nodes, facts, strict=True):
                node.name = node_name(found.ip, found.node_id)
            labels = [replace(label, node=nodes[label.rank // cluster.ranks_per_node].name) for label in labels]
            starts = _start_processes(cluster, nodes, [found.ip for found in facts], hosting, room.num_gpus > 0)
        except NodeLost as lost:
            raise explain_loss(lost, START, labels) from lost.__cause__
        _warn_of_traces(nodes, starts)
        facts_of_ranks = [(wrapper, start.sees_logs) for start in starts for wrapper in start.wrappers]
        labels = [
            replace(label, wrapper=wrapper, sees_logs=sees_logs)
            for label, (wrapper, sees_logs) in zip(labels, facts_of_ranks, strict=True)
        ]
        return RayWorkers(nodes, labels, held.pop_all())


def check_can_be_placed(
    cluster: ClusterConfig,
    others: Sequence[Numbering] = (),
    choose_nodes: Callable[[Sequence[str]], NodeChoice | None] = lambda ids: None,
    num_env_workers: int = 0,
) -> None:
    """Refuse workers for which a running Ray has no room, all together; nothing is started.

    Of a local cluster that is yet to be started, only that it has a single node is known.

    Args:
        others: workers of a pool that run at the same time.
        choose_nodes: where these may run, given the nodes of the first group.
        num_env_workers: of an environment, beside all of them.

    Raises:
        ConfigError: if Ray is not installed, not reachable, or too small.
    """
    require_package("ray", "cluster.launcher=ray")
    if is_to_be_started(cluster):
        if cluster.num_nodes > 1:
            raise ConfigError(
                f"cluster.num_nodes={cluster.num_nodes} is for a Ray cluster, but a Ray that is started for the run is "
                "one node; set cluster.address, or leave num_nodes out"
            )
        return
    with ExitStack() as held:
        is_own_ray = held.enter_context(connected(cluster.address, cluster.allow_open_dashboard))
        room = held.enter_context(reserved(cluster, is_own_ray, Hosting()))
        nodes = choose_nodes(room.node_ids())
        for numbering in others:
            held.enter_context(reserved(cluster.of_one(), is_own_ray, Hosting(numbering=numbering, nodes=nodes)))
        for number in range(num_env_workers):
            numbering = Numbering(number, num_env_workers, "env.num_workers")
            held.enter_context(reserved(cluster.of_one(with_gpus=False), is_own_ray, Hosting(numbering=numbering)))


def is_to_be_started(cluster: ClusterConfig) -> bool:
    """Whether a local cluster will be started: none is named, and the program is not connected to one."""
    import ray

    return cluster.address in (None, LOCAL) and not ray.is_initialized()


def _start_agents(program: DriverProgram, cluster: ClusterConfig, room: Room, held: ExitStack) -> list[RayNode]:
    """One on each node; `held` ends them, and with them what they have started."""
    share = cluster.ranks_per_node
    nodes = []
    for number in range(cluster.num_nodes):
        actor = room.actor(NodeAgent, number, program.runtime_env).remote(program)
        held.callback(_end_agent, actor)
        nodes.append(RayNode(actor, f"number {number}", range(number * share, (number + 1) * share)))
    return nodes


def _start_processes(
    cluster: ClusterConfig, nodes: Sequence[RayNode], ips: Sequence[str], hosting: Hosting, with_gpus: bool
) -> list[NodeStart]:
    if len(nodes) == 1:
        ips = [LOOPBACK]  # no other node has to reach the ranks
    store = None
    if hosting.joins_process_group:
        (port,) = _ask_all(nodes[:1], cluster, [nodes[0].actor.listen.remote(ips[0])])
        store = (ips[0], port)
    with ExitStack() as held:
        mark = None if hosting.log_dir is None else held.enter_context(marked(hosting.log_dir))
        traces_mark = held.enter_context(_marked_traces(cluster, hosting))
        plans = [
            NodePlan(
                hosting=hosting,
                ranks=node.ranks,
                world_size=cluster.num_workers,
                ip=ip,
                store=store,
                num_threads=cluster.num_threads,
                with_gpus=with_gpus,
                mark=mark,
                profiling={**nsys.request_environment(), FOLDER_VARIABLE: str(traces_folder())},
                traces_mark=traces_mark,
            )
            for node, ip in zip(nodes, ips, strict=True)
        ]
        return _ask_all(
            nodes, cluster, [node.actor.start.remote(plan) for node, plan in zip(nodes, plans, strict=True)]
        )


@contextmanager
def _marked_traces(cluster: ClusterConfig, hosting: Hosting) -> Iterator[str | None]:
    """Keep a file of this name in the traces folder meanwhile, if workers record steps and it can be written."""
    names = [nsys.worker_name(hosting.name, hosting.number(rank)) for rank in range(cluster.num_workers)]
    with ExitStack() as held:
        mark = None
        if any(map(nsys.matches, names)):
            with suppress(OSError):  # reported when traces are written
                traces_folder().mkdir(parents=True, exist_ok=True)
                mark = held.enter_context(marked(traces_folder()))
        yield mark


def _warn_of_traces(nodes: Sequence[RayNode], starts: Sequence[NodeStart]) -> None:
    pairs = list(zip(nodes, starts, strict=True))
    if lacking := [node.name for node, start in pairs if start.lacks_nsys]:
        warn_of_no_nsys(f" of node {', '.join(lacking)}")
    if keeping := [node.name for node, start in pairs if start.keeps_traces]:
        _log.warning(
            "%s is not seen by node %s: traces of workers there stay there, in a folder of that name; "
            "set run.root or %s to a folder that all nodes see",
            traces_folder(),
            ", ".join(keeping),
            FOLDER_VARIABLE,
        )


def _ask_all(nodes: Sequence[RayNode], cluster: ClusterConfig, references: Sequence[Any]) -> list[Any]:
    pairs = zip(nodes, references, strict=True)
    return [answer_of(node, reference, cluster.start_timeout_s) for node, reference in pairs]


def _end_agent(actor: Any) -> None:
    import ray

    if ray.is_initialized():  # the program may have left Ray before
        ray.kill(actor)
