"""What messages call the nodes of a Ray cluster, and what they repeat of Ray's own errors."""

from __future__ import annotations

_MOST_SHOWN = 300
"""Characters of what Ray says about a death, which may be a page; all of it is in the error's cause."""
_LOST_WITH_NODE = "because its node has died"
"""Of an actor, in Ray's error."""


def node_name(ip: str, node_id: str) -> str:
    """An address alone is not enough: several nodes may be simulated on one machine."""
    return f"{ip} ({node_id[:8]})"


def own_node_name() -> str:
    """Of the node that this process, a worker of Ray's, is on."""
    import ray

    return node_name(ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id())


def died_with_node(error: BaseException) -> bool:
    """Whether an actor was lost because its node was; Ray says so in words only."""
    return _LOST_WITH_NODE in str(error)


def last_words(error: BaseException) -> str:
    """The line in which Ray names the cause."""
    *_, line = str(error).strip().splitlines() or [type(error).__name__]
    line = line.strip()
    return line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]} ..."
