"""Where a process is: on which node, and at which address others reach that.

Under Ray a node is what Ray calls one, told to a rank by whoever starts it there; otherwise it is the machine.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"

_NODE_VARIABLE, _IP_VARIABLE = "LUCIDRL_NODE_ID", "LUCIDRL_NODE_IP"
_MACHINE_ID = Path("/etc/machine-id")


@dataclass(frozen=True)
class Place:
    """Of a worker."""

    node: str
    """Ray's id of the node, or one of the machine."""
    ip: str
    """At which other nodes reach it; without Ray there are none, and it is that of the loopback interface."""
    device: str
    """What all processes that use the worker's device call it."""


def place_with(device: str) -> Place:
    """Where this process is."""
    return Place(node_id(), os.environ.get(_IP_VARIABLE, LOOPBACK), device)


def node_id() -> str:
    """Of the node that this process runs on; that of a machine is the same at every start."""
    if _NODE_VARIABLE in os.environ:
        return os.environ[_NODE_VARIABLE]
    # Containers made from one image may share the machine's id, and machines a name; hardly ever both.
    machine = _MACHINE_ID.read_text().strip() if _MACHINE_ID.exists() else ""
    return hashlib.sha256(f"{machine}/{socket.gethostname()}".encode()).hexdigest()[:16]


def node_environment(node: str, ip: str) -> Mapping[str, str]:
    """Variables that tell a process where it is."""
    return {_NODE_VARIABLE: node, _IP_VARIABLE: ip}
