"""Workers on the nodes of a Ray cluster: the driver starts and calls them through one `NodeAgent` per node.

Arguments go through Ray's object store, once per node. The agent of rank 0's node hosts the rendezvous store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.interfaces import Hosting, NodeLost, WorkerLabel, WorkerReport
from lucidrl.distributed.workers.logs import LogFolder, WorkerLog, marked
from lucidrl.distributed.workers.messages import Message, Stored
from lucidrl.distributed.workers.outcomes import START, Exited, Outcome, Returned, explain_loss
from lucidrl.distributed.workers.place import LOOPBACK
from lucidrl.distributed.workers.ray_actor import DriverProgram, NodeAgent, NodeNews, NodePlan, NodeStart
from lucidrl.distributed.workers.ray_cluster import connected
from lucidrl.distributed.workers.ray_resources import last_line, node_name, reserved
from lucidrl.profiling.clock import measured_offset
from lucidrl.profiling.settings import FOLDER_VARIABLE, traces_folder
from lucidrl.utils import nsys
from lucidrl.utils.nsys_launch import warn_of_no_nsys

_log = logging.getLogger(__name__)

_ROUND_S = 0.5
"""Longest time that one call of an agent waits for workers to reply or exit."""
_SILENCE_S = 20.0
"""An agent without a reply for this long is unresponsive."""
_REPORT_TIMEOUT_S = 6.0
_KILL_TIMEOUT_S = 8.0
_storing = threading.Lock()


@dataclass
class RayNode:
    """The driver's view of a node with workers."""

    actor: Any
    """Ray's handle of the `NodeAgent`."""
    ranks: range
    name: str
    waiting: set[int] = field(default_factory=set)
    """Ranks with a pending call."""
    news: Any = None
    """Reference to the pending `NodeNews`."""
    silent_after: float = 0.0
    """Monotonic time after which the agent counts as unresponsive if the news are still pending."""
    is_lost: bool = False
    logs: Sequence[WorkerLog] = ()
    """Logs of the node's workers, as the driver sees them."""

    def check_connected(self) -> None:
        """Raise NodeLost if the program has disconnected from Ray: the next call would start another Ray."""
        import ray

        if not ray.is_initialized():
            raise self.lost("this program has disconnected from Ray")

    def poll(self) -> None:
        self.check_connected()
        self.news = self.actor.poll.remote(_ROUND_S)
        self.silent_after = time.monotonic() + _SILENCE_S

    def result(self, reference: Any, timeout_s: float) -> Any:
        """The result of a call to the agent; NodeLost if the call fails or times out."""
        import ray
        from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError

        self.check_connected()
        try:
            return ray.get(reference, timeout=timeout_s)
        except GetTimeoutError as error:
            raise self.lost(f"its agent did not reply within {timeout_s:g} s") from error
        except OutOfMemoryError as error:  # Ray's text is very long
            raise self.lost("Ray killed its agent because the memory of the node was nearly full") from error
        except RayError as error:
            has_exited = isinstance(error, RayActorError) and "creation task" not in str(error)
            reason = "its agent exited" if has_exited else f"its agent failed with {last_line(error)}"
            raise self.lost(reason) from error

    def lost(self, reason: str) -> NodeLost:
        self.is_lost = True
        return NodeLost(self.name, self.ranks, reason, [log.tail() for log in self.logs])


def start_on_ray(cluster: ClusterConfig, hosting: Hosting, logs: LogFolder) -> RayWorkers:
    """Start the processes of all workers on one or several nodes; they wait for their first call.

    Raises:
        ConfigError: if Ray is not available or lacks resources; nothing was started.
        WorkerError: if a node is lost during the start.
    """
    program = DriverProgram.of_this_process()  # first, since it raises in a rank of a script without main guard
    hosting = replace(hosting, start_method="spawn", log_dir=logs.path.resolve() if hosting.captures_output else None)
    labels = [
        WorkerLabel(rank, hosting, logs.of_worker(hosting.number(rank)) if hosting.captures_output else None)
        for rank in range(cluster.num_workers)
    ]
    per_node = cluster.ranks_per_node
    with ExitStack() as held:
        is_own_ray = held.enter_context(connected(cluster.address, cluster.allow_open_dashboard))
        room = held.enter_context(reserved(cluster, is_own_ray, hosting))
        nodes = []
        for number in range(cluster.num_nodes):
            actor = room.actor(NodeAgent, number, program.runtime_env).remote(program)
            held.callback(_end_agent, actor)
            node = RayNode(actor, range(number * per_node, (number + 1) * per_node), f"number {number}")
            node.logs = [WorkerLog(path) for rank in node.ranks if (path := labels[rank].log_path) is not None]
            nodes.append(node)
        try:
            found = _results(nodes, [node.actor.node.remote() for node in nodes], cluster.start_timeout_s)
            for node, (node_id, ip) in zip(nodes, found, strict=True):
                node.name = node_name(ip, node_id)
            labels = [replace(label, node=nodes[label.rank // per_node].name) for label in labels]
            starts = _start_processes(cluster, nodes, found[0][1], hosting, room.options["num_gpus"] > 0)
        except NodeLost as lost:
            raise explain_loss(lost, START, labels) from lost.__cause__
        _warn_of_traces(nodes, starts)
        of_ranks = [(wrapper, start.sees_logs) for start in starts for wrapper in start.wrappers]
        labels = [
            replace(label, wrapper=wrapper, sees_logs=sees_logs)
            for label, (wrapper, sees_logs) in zip(labels, of_ranks, strict=True)
        ]
        return RayWorkers(nodes, labels, held.pop_all())


def _start_processes(
    cluster: ClusterConfig, nodes: Sequence[RayNode], first_ip: str, hosting: Hosting, with_gpus: bool
) -> list[NodeStart]:
    ip = first_ip if len(nodes) > 1 else LOOPBACK  # ranks of one node need no other interface
    store = None
    if hosting.joins_process_group:
        store = (ip, nodes[0].result(nodes[0].actor.listen.remote(ip), cluster.start_timeout_s))
    with ExitStack() as held:
        logs_mark = None if hosting.log_dir is None else held.enter_context(marked(hosting.log_dir))
        traces_mark: Path | None = None
        if any(nsys.matches(hosting.profiled_name(rank)) for rank in range(cluster.num_workers)):
            with suppress(OSError):  # reported when workers write the traces
                traces_folder().mkdir(parents=True, exist_ok=True)
                traces_mark = held.enter_context(marked(traces_folder()))
        plans = [NodePlan(node.ranks, cluster, hosting, store, with_gpus, logs_mark, traces_mark) for node in nodes]
        references = [node.actor.start.remote(plan) for node, plan in zip(nodes, plans, strict=True)]
        return _results(nodes, references, cluster.start_timeout_s)


def _warn_of_traces(nodes: Sequence[RayNode], starts: Sequence[NodeStart]) -> None:
    pairs = list(zip(nodes, starts, strict=True))
    if lacking := [node.name for node, start in pairs if start.lacks_nsys]:
        warn_of_no_nsys(f" of node {', '.join(lacking)}")
    if keeping := [node.name for node, start in pairs if start.keeps_traces]:
        _log.warning(
            "node %s does not see %s: its workers write their traces to a local folder of that name; "
            "set run.root or %s to a folder that all nodes share",
            ", ".join(keeping),
            traces_folder(),
            FOLDER_VARIABLE,
        )


class RayWorkers:
    """The same methods as `LocalWorkers`, on Ray nodes; except `shutdown` and `kill`, they may raise `NodeLost`.

    Args:
        nodes: the nodes, whose agents have started the workers.
        labels: labels of all workers.
        held: resources to release when the workers have exited.
    """

    def __init__(self, nodes: Sequence[RayNode], labels: Sequence[WorkerLabel], held: ExitStack):
        self.labels = labels
        self._nodes, self._held = nodes, held

    def send(self, messages: Mapping[int, Sequence[Message]]) -> None:
        self._nodes[0].check_connected()
        references: dict[int, Any] = {}  # by identity of the message
        for message in (message for call in messages.values() for message in call):
            if id(message) not in references:
                references[id(message)] = _reference_to(message)
        for node in self._nodes:
            of_node = dict.fromkeys(id(message) for rank in node.ranks for message in messages[rank])
            indices = {key: index for index, key in enumerate(of_node)}
            calls = {rank: [indices[id(message)] for message in messages[rank]] for rank in node.ranks}
            node.waiting = set(node.ranks)
            node.news = node.actor.send.remote(calls, *(references[key] for key in of_node))
            node.silent_after = float("inf")  # large arguments take long to arrive

    def poll(self, timeout_s: float) -> list[tuple[int, Message | Exited]]:
        import ray

        by_reference = {node.news: node for node in self._nodes if node.news is not None}
        if not by_reference:
            raise NodeLost("(unknown)", [0], "another thread killed all workers of this group")
        next(iter(by_reference.values())).check_connected()
        wait_s = min(node.silent_after for node in by_reference.values()) - time.monotonic()
        arrived, _ = ray.wait(list(by_reference), timeout=min(timeout_s, max(0.0, wait_s)))
        if arrived:
            return self._read(by_reference[arrived[0]])
        for node in by_reference.values():
            if time.monotonic() > node.silent_after:
                if not ray.wait([node.news], timeout=0, fetch_local=False)[0]:
                    raise node.lost(f"its agent did not reply for {_SILENCE_S:g} s")
                node.silent_after = float("inf")  # the reply is on its way
        return []

    def clocks(self, timeout_s: float) -> dict[int, Outcome]:
        """Measure the clocks of the agents, which measure the clocks of their workers; see `LocalWorkers.clocks`.

        The call of an agent takes as long to it as from it; a call of a worker through its agent does not.
        """
        outcomes: dict[int, Outcome] = {}
        for node in self._nodes:

            def ping(node: RayNode = node) -> int:
                return node.result(node.actor.clock.remote(), timeout_s)

            of_agent = measured_offset(ping)
            of_node = node.result(node.actor.call.remote("clocks", timeout_s), timeout_s + _REPORT_TIMEOUT_S)
            for rank, outcome in of_node.items():
                is_measured = isinstance(outcome, Returned)
                outcomes[rank] = Returned(of_agent.of_relayed(outcome.value)) if is_measured else outcome
        return outcomes

    def dead(self) -> dict[int, Exited]:
        references = [node.actor.call.remote("dead") for node in self._nodes]
        return {rank: how for found in _results(self._nodes, references, _SILENCE_S) for rank, how in found.items()}

    def report(self, numbers: Sequence[int], with_stacks: bool) -> dict[int, WorkerReport]:
        by_node = [(node, of_node) for node in self._nodes if (of_node := [n for n in node.ranks if n in numbers])]
        references = [node.actor.call.remote("report", of_node, with_stacks) for node, of_node in by_node]
        reports = _results([node for node, _ in by_node], references, _REPORT_TIMEOUT_S)
        found = {number: report for of_node in reports for number, report in of_node.items()}
        return {number: found[number] for number in numbers}

    def shutdown(self, timeout_s: float) -> dict[int, int | None]:
        """Like `LocalWorkers.shutdown`; the result leaves out unreachable workers."""
        until = time.monotonic() + timeout_s
        while True:
            remaining_s = max(0.0, until - time.monotonic())
            codes = self._exit_codes(min(remaining_s, _ROUND_S))
            if not remaining_s or None not in codes.values():
                return codes

    def kill(self) -> None:
        """Kill all workers and release their resources; may be called twice."""
        import ray

        nodes, self._nodes = [node for node in self._nodes if not node.is_lost], []
        try:
            # The agents kill their workers and return the rest of the output. If an agent is lost, its workers exit.
            if nodes and ray.is_initialized():
                references = [node.actor.kill.remote() for node in nodes]
                ray.wait(references, num_returns=len(nodes), timeout=_KILL_TIMEOUT_S)
                for node, reference in zip(nodes, references, strict=True):
                    with suppress(NodeLost):
                        self._take_logs(node.result(reference, 0))
        finally:
            self._held.close()

    def _exit_codes(self, timeout_s: float) -> dict[int, int | None]:
        """Let the reachable workers exit."""
        import ray

        nodes = [node for node in self._nodes if not node.is_lost and ray.is_initialized()]
        references = [node.actor.shutdown.remote(timeout_s) for node in nodes]
        until = time.monotonic() + timeout_s + _REPORT_TIMEOUT_S
        codes: dict[int, int | None] = {}
        for node, reference in zip(nodes, references, strict=True):
            try:
                news: NodeNews = node.result(reference, max(0.0, until - time.monotonic()))
            except NodeLost as lost:  # workers on other nodes may still shut down
                _log.warning("node %s was lost during the shutdown of its ranks: %s", lost.node, lost)
                continue
            self._take_logs(news)
            codes |= news.exit_codes
        return codes

    def _read(self, node: RayNode) -> list[tuple[int, Message | Exited]]:
        """Read new replies from a node; poll its agent again if calls are pending."""
        news: NodeNews = node.result(node.news, _REPORT_TIMEOUT_S)
        node.news = None
        self._take_logs(news)
        node.waiting -= {rank for rank, _ in news.replies}
        if node.waiting:
            node.poll()
        # Memory of the object store is shared and must not be written to.
        return [(rank, reply if isinstance(reply, Exited) else reply.writable()) for rank, reply in news.replies]

    def _take_logs(self, news: NodeNews) -> None:
        for rank, content in news.logs.items():
            if (path := self.labels[rank].log_path) is not None:
                with path.open("ab") as file:
                    file.write(content)


def _results(nodes: Sequence[RayNode], references: Sequence[Any], timeout_s: float) -> list[Any]:
    return [node.result(reference, timeout_s) for node, reference in zip(nodes, references, strict=True)]


def _end_agent(actor: Any) -> None:
    import ray

    if ray.is_initialized():  # the program may have disconnected before
        ray.kill(actor)


def _reference_to(message: Message) -> Any:
    """Ray's reference to a message; a `Stored` message is put into the object store only once."""
    import ray

    if not isinstance(message, Stored):
        return ray.put(message)
    with _storing:  # each worker of a pool is called by a separate thread
        if message.reference is None:
            message.reference = ray.put(Message(message.parts))
        return message.reference
