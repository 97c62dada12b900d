"""Workers on the nodes of a Ray cluster.

On each node an agent holds the node's share of a placement group and starts its ranks as the local launcher does; the
agent of rank 0's node hosts the store at which all meet. Arguments go through Ray's object store, once to a node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.launchers.driver_program import DriverProgram
from lucidrl.distributed.launchers.failures import START, explain_loss
from lucidrl.distributed.launchers.interfaces import WHOLE, Arguments, NodeChoice, NodeLost, Part, RankLabel, Worker
from lucidrl.distributed.launchers.log_folder import LogFolder, marked
from lucidrl.distributed.launchers.node_agent import NodeAgent, NodePlan, NodeStart
from lucidrl.distributed.launchers.processes import ProcessLauncher
from lucidrl.distributed.launchers.rank_log import RankLog
from lucidrl.distributed.launchers.ray_connection import LOCAL, connected
from lucidrl.distributed.launchers.ray_placement import Room, reserved, reserved_for_actors
from lucidrl.distributed.launchers.ray_words import node_name
from lucidrl.distributed.launchers.remote_ranks import RemoteNode, RemoteRanks, answer_of
from lucidrl.distributed.place import LOOPBACK
from lucidrl.errors import ConfigError
from lucidrl.profiling.settings import FOLDER_VARIABLE, traces_folder
from lucidrl.utils import nsys
from lucidrl.utils.imports import require_package
from lucidrl.utils.nsys_launch import warn_of_no_nsys

_log = logging.getLogger(__name__)


class RayProcesses(ProcessLauncher):
    """Ranks on one or several nodes, each in a process with torchrun's variables in its environment.

    Args:
        worker_class: importable by name in a new process, on every node.
        arguments: of its constructor, the same on every rank.
        cluster: which Ray, how many nodes and ranks, what each needs, deadline of the start.
        log_dir: where `rank_N.log` with the output of rank N goes, from whichever node; by default a temporary folder,
            which is kept only if something goes wrong.
        role: what errors call one of them.
        name: what profiling calls them, with their rank behind it.
        part: of a whole that the ranks are; it numbers them in names and logs, and shares the cores of a node.
        nodes: where they may be; by default anywhere.

    Raises:
        ConfigError: if Ray is not there or has no room, before anything is started.
        WorkerError: if a node is lost meanwhile.
    """

    def __init__(
        self,
        worker_class: type[Worker],
        arguments: Arguments,
        cluster: ClusterConfig,
        log_dir: Path | None,
        role: str = "rank",
        name: str = "worker",
        part: Part = WHOLE,
        nodes: NodeChoice | None = None,
    ):
        def start_ranks(logs: LogFolder) -> RemoteRanks:
            return _start_ranks(cluster, logs, role, name, part, nodes)

        super().__init__(start_ranks, log_dir, worker_class, arguments, cluster.start_timeout_s)


def check_can_be_placed(
    cluster: ClusterConfig,
    others: Sequence[Part] = (),
    choose_nodes: Callable[[Sequence[str]], NodeChoice | None] = lambda ids: None,
    num_env_actors: int = 0,
) -> None:
    """Refuse workers for which there is no room in a Ray that is there, all together; nothing is started.

    Of one that is yet to be started for the run, only that it has a single node is known.

    Args:
        others: groups of one worker that are to be there at the same time.
        choose_nodes: where these may be, given the nodes of the first group.
        num_env_actors: of an environment, beside all of them.

    Raises:
        ConfigError: if Ray is not installed, not to be reached, or too small.
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
        room = held.enter_context(reserved(cluster, is_own_ray))
        nodes = choose_nodes(room.node_ids())
        for part in others:
            held.enter_context(reserved(cluster.of_one(), is_own_ray, part, nodes))
        if num_env_actors:
            held.enter_context(reserved_for_actors(num_env_actors, is_own_ray))


def is_to_be_started(cluster: ClusterConfig) -> bool:
    """Whether a Ray will be started for the run: none is named, and the program is not connected to one."""
    import ray

    return cluster.address in (None, LOCAL) and not ray.is_initialized()


def _start_ranks(
    cluster: ClusterConfig, logs: LogFolder, role: str, name: str, part: Part, choice: NodeChoice | None
) -> RemoteRanks:
    program = DriverProgram.of_this_process()  # first: in a rank of a script without the usual guard it raises
    with ExitStack() as held:
        is_own_ray = held.enter_context(connected(cluster.address, cluster.allow_open_dashboard))
        room = held.enter_context(reserved(cluster, is_own_ray, part, choice))
        nodes = _start_agents(program, cluster, room, held)
        ranks = [rank for node in nodes for rank in node.ranks]
        labels = [RankLabel(rank, role, logs.of_rank(part.first + rank), part) for rank in ranks]
        for node in nodes:
            node.logs = [RankLog(labels[rank].log_path) for rank in node.ranks]
        try:
            facts = _ask_all(nodes, cluster, [node.actor.facts.remote() for node in nodes])
            for node, found in zip(nodes, facts, strict=True):
                node.name = node_name(found.ip, found.node_id)
            labels = [replace(label, node=nodes[label.rank // cluster.ranks_per_node].name) for label in labels]
            ips = [found.ip for found in facts]
            starts = _start_processes(cluster, nodes, ips, logs, role, name, part, with_gpus=room.num_gpus > 0)
        except NodeLost as lost:
            raise explain_loss(lost, START, labels) from lost.__cause__
        _tell_of_traces(nodes, starts)
        facts_of_ranks = [(wrapper, start.sees_logs) for start in starts for wrapper in start.wrappers]
        labels = [
            replace(label, wrapper=wrapper, sees_logs=sees_logs)
            for label, (wrapper, sees_logs) in zip(labels, facts_of_ranks, strict=True)
        ]
        return RemoteRanks(nodes, labels, held.pop_all())


def _start_agents(program: DriverProgram, cluster: ClusterConfig, room: Room, held: ExitStack) -> list[RemoteNode]:
    """One on each node; `held` ends them, and with them whatever they have started."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    share = cluster.ranks_per_node
    nodes = []
    for number in range(cluster.num_nodes):
        options = {
            "num_cpus": room.num_cpus,
            "num_gpus": room.num_gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(room.group, number),
            "runtime_env": program.runtime_env,
        }
        actor = ray.remote(NodeAgent).options(**options).remote(program)
        held.callback(_end_agent, actor)
        nodes.append(RemoteNode(actor, f"number {number}", range(number * share, (number + 1) * share)))
    return nodes


def _start_processes(
    cluster: ClusterConfig,
    nodes: Sequence[RemoteNode],
    ips: Sequence[str],
    logs: LogFolder,
    role: str,
    name: str,
    part: Part,
    with_gpus: bool,
) -> list[NodeStart]:
    if len(nodes) == 1:
        ips = [LOOPBACK]  # nobody else has to reach the ranks
    (port,) = _ask_all(nodes[:1], cluster, [nodes[0].actor.listen.remote(ips[0])])
    numbers = range(part.first, part.first + cluster.num_workers)
    with logs.marked() as mark, _marked_traces(name, numbers) as traces_mark:
        plans = [
            NodePlan(
                role=role,
                name=name,
                part=part,
                ranks=node.ranks,
                world_size=cluster.num_workers,
                ip=ip,
                store=(ips[0], port),
                num_threads=cluster.num_threads,
                with_gpus=with_gpus,
                log_dir=logs.path.resolve(),
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
def _marked_traces(name: str, numbers: Sequence[int]) -> Iterator[str | None]:
    """A file of this name is in the traces folder meanwhile, if workers are to record steps and it can be there."""
    with ExitStack() as held:
        mark = None
        if any(nsys.matches(nsys.worker_name(name, number)) for number in numbers):
            with suppress(OSError):  # whoever writes there will say so
                traces_folder().mkdir(parents=True, exist_ok=True)
                mark = held.enter_context(marked(traces_folder()))
        yield mark


def _tell_of_traces(nodes: Sequence[RemoteNode], starts: Sequence[NodeStart]) -> None:
    pairs = list(zip(nodes, starts, strict=True))
    if lacking := [node.name for node, start in pairs if start.lacks_nsys]:
        warn_of_no_nsys(f" of node {', '.join(lacking)}")
    if keeping := [node.name for node, start in pairs if start.keeps_traces]:
        _log.warning(
            "%s is not seen by node %s: traces of ranks there stay there, in a folder of that name; "
            "let them go to where all nodes see them, by run.root or %s",
            traces_folder(),
            ", ".join(keeping),
            FOLDER_VARIABLE,
        )


def _ask_all(nodes: Sequence[RemoteNode], cluster: ClusterConfig, references: Sequence[Any]) -> list[Any]:
    pairs = zip(nodes, references, strict=True)
    return [answer_of(node, reference, cluster.start_timeout_s) for node, reference in pairs]


def _end_agent(actor: Any) -> None:
    import ray

    if ray.is_initialized():  # the program may have left Ray before
        ray.kill(actor)
