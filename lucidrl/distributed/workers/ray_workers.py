"""Workers on the nodes of a Ray cluster, as their driver reaches them: through one agent per node (`NodeAgent`).

Arguments go through Ray's object store, once per node.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from lucidrl.distributed.workers.interfaces import (
    NodeLost,
    WorkerLabel,
    WorkerReport,
)
from lucidrl.distributed.workers.logs import WorkerLog, append
from lucidrl.distributed.workers.messages import Message, Stored
from lucidrl.distributed.workers.outcomes import Exited
from lucidrl.distributed.workers.ray_actor import NodeNews
from lucidrl.distributed.workers.ray_resources import last_line

_log = logging.getLogger(__name__)

_ROUND_S = 0.5
"""How long an agent waits for its ranks, to answer or to leave, before it says that they have not."""
_SILENCE_S = 20.0
"""An agent that has not even said that is out of reach."""
_REPORT_DEADLINE_S = 6.0
_KILL_DEADLINE_S = 8.0
_storing = threading.Lock()


@dataclass
class RayNode:
    """A node with ranks, as its driver sees it."""

    actor: Any
    """Ray's handle of the agent."""
    name: str
    ranks: range
    waiting: set[int] = field(default_factory=set)
    """Ranks that have a message and have not answered."""
    news: Any = None
    """What the agent was asked for last, if it has not been read: a reference to `NodeNews`."""
    silent_after: float = 0.0
    """When that should have come."""
    is_lost: bool = False
    logs: Sequence[WorkerLog] = ()
    """Of its ranks, where the driver finds them."""

    def check_connected(self) -> None:
        """Raise NodeLost if the program has left Ray: the next call would start another one."""
        import ray

        if not ray.is_initialized():
            raise self.lost("this program has left Ray")

    def ask(self) -> None:
        self.check_connected()
        self.news = self.actor.poll.remote(_ROUND_S)
        self.silent_after = time.monotonic() + _SILENCE_S

    def lost(self, reason: str) -> NodeLost:
        self.is_lost = True
        return NodeLost(self.name, self.ranks, reason, [log.tail() for log in self.logs])


class RayWorkers:
    """What `Ranks` says, on nodes.

    Args:
        nodes: their agents have started the ranks.
        labels: of all ranks.
        held: what is to be given back when the ranks have ended.
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
            node.silent_after = float("inf")  # large arguments take their time to arrive

    def poll(self, timeout_s: float) -> list[tuple[int, Message | Exited]]:
        import ray

        asked = {node.news: node for node in self._nodes if node.news is not None}
        if not asked:
            raise NodeLost("of ranks that this program ended", [0], "another thread ended them")
        next(iter(asked.values())).check_connected()
        wait_s = min(node.silent_after for node in asked.values()) - time.monotonic()
        arrived, _ = ray.wait(list(asked), timeout=min(timeout_s, max(0.0, wait_s)))
        if arrived:
            return self._read(asked[arrived[0]])
        for node in asked.values():
            if time.monotonic() > node.silent_after:
                if not ray.wait([node.news], timeout=0, fetch_local=False)[0]:
                    raise node.lost(f"its agent has not answered for {_SILENCE_S:g} s")
                node.silent_after = float("inf")  # the answer is on its way
        return []

    def dead(self) -> dict[int, Exited]:
        asked = [(node, node.actor.dead.remote()) for node in self._nodes]
        found: dict[int, Exited] = {}
        for node, reference in asked:
            found |= answer_of(node, reference, _SILENCE_S)
        return found

    def meet(self, pids: Sequence[int]) -> None:
        for node in self._nodes:  # what is asked next is done after this, and tells if the node is lost
            node.actor.meet.remote([pids[rank] for rank in node.ranks])

    def report(self, numbers: Sequence[int], with_stacks: bool) -> dict[int, WorkerReport]:
        asked = [(node, [rank for rank in node.ranks if rank in numbers]) for node in self._nodes]
        references = [(node, node.actor.report.remote(of_node, with_stacks)) for node, of_node in asked if of_node]
        found: dict[int, WorkerReport] = {}
        for node, reference in references:
            found |= answer_of(node, reference, _REPORT_DEADLINE_S)
        return {number: found[number] for number in numbers}

    def let_end(self, timeout_s: float) -> dict[int, int | None]:
        until = time.monotonic() + timeout_s
        while True:
            remaining_s = max(0.0, until - time.monotonic())
            codes = self._exit_codes(min(remaining_s, _ROUND_S))
            if not remaining_s or None not in codes.values():
                return codes

    def kill(self) -> None:
        import ray

        nodes, self._nodes = [node for node in self._nodes if not node.is_lost], []
        try:
            # The agents end their ranks, and tell the rest of what these wrote. Ranks of others end with these.
            if nodes and ray.is_initialized():
                references = [node.actor.kill.remote() for node in nodes]
                ray.wait(references, num_returns=len(nodes), timeout=_KILL_DEADLINE_S)
                for node, reference in zip(nodes, references, strict=True):
                    with suppress(NodeLost):
                        self._take_logs(answer_of(node, reference, 0))
        finally:
            self._held.close()

    def _exit_codes(self, timeout_s: float) -> dict[int, int | None]:
        """Of the ranks within reach, which have been asked to leave."""
        import ray

        nodes = [node for node in self._nodes if not node.is_lost and ray.is_initialized()]
        references = [node.actor.let_end.remote(timeout_s) for node in nodes]
        until = time.monotonic() + timeout_s + _REPORT_DEADLINE_S
        codes: dict[int, int | None] = {}
        for node, reference in zip(nodes, references, strict=True):
            try:
                news: NodeNews = answer_of(node, reference, max(0.0, until - time.monotonic()))
            except NodeLost as lost:  # those of other nodes have their time all the same
                _log.warning("node %s was lost while its ranks were to end: %s", lost.node, lost)
                continue
            self._take_logs(news)
            codes |= news.exit_codes
        return codes

    def _read(self, node: RayNode) -> list[tuple[int, Message | Exited]]:
        """What an agent says; it is asked again if there is more to come."""
        news: NodeNews = answer_of(node, node.news, _REPORT_DEADLINE_S)
        node.news = None
        self._take_logs(news)
        node.waiting -= {rank for rank, _ in news.answers}
        if node.waiting:
            node.ask()
        # Memory of the object store is shared and must not be written to.
        return [(rank, answer if isinstance(answer, Exited) else answer.writable()) for rank, answer in news.answers]

    def _take_logs(self, news: NodeNews) -> None:
        for rank, content in news.logs.items():
            if (path := self.labels[rank].log_path) is not None:
                append(path, content)


def answer_of(node: RayNode, reference: Any, timeout_s: float) -> Any:
    """What the agent of a node returned; NodeLost if it does not in time, or cannot."""
    import ray
    from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError

    node.check_connected()
    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError as error:
        raise node.lost(f"its agent has not answered within {timeout_s:g} s") from error
    except OutOfMemoryError as error:  # what Ray says of it is a page
        raise node.lost("Ray ended its agent, because the memory of the node was nearly full") from error
    except RayError as error:
        is_gone = isinstance(error, RayActorError) and "creation task" not in str(error)
        raise node.lost("its agent is gone" if is_gone else f"its agent failed with {last_line(error)}") from error


def _reference_to(message: Message) -> Any:
    """Ray's reference to a message; one that several calls pass on is put into the object store once."""
    import ray

    if not isinstance(message, Stored):
        return ray.put(message)
    with _storing:  # workers of a pool are called by threads of their own
        if message.reference is None:
            message.reference = ray.put(Message(message.parts))
        return message.reference
