"""The node of a process, and the address at which other nodes reach it.

Under Ray this is Ray's node, which the `NodeAgent` passes to its workers in variables; otherwise it is the machine.
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
    """Where a worker runs."""

    node: str
    """Ray's id of the node, or an id of the machine."""
    ip: str
    """Address for other nodes; without Ray that of the loopback interface."""
    device: str
    """The worker's device, by a name that is the same in all processes."""


def place_with(device: str) -> Place:
    """The place of this process."""
    return Place(node_id(), os.environ.get(_IP_VARIABLE, LOOPBACK), device)


def node_id() -> str:
    """Id of the node that this process runs on; that of a machine is the same at every start."""
    if _NODE_VARIABLE in os.environ:
        return os.environ[_NODE_VARIABLE]
    # Containers made from one image may share the machine's id, and machines a name; hardly ever both.
    machine = _MACHINE_ID.read_text().strip() if _MACHINE_ID.exists() else ""
    return hashlib.sha256(f"{machine}/{socket.gethostname()}".encode()).hexdigest()[:16]


def node_environment(node: str, ip: str) -> Mapping[str, str]:
    """Variables with the place of a process."""
    return {_NODE_VARIABLE: node, _IP_VARIABLE: ip}
