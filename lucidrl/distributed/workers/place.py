"""The node of a process, and the address at which other nodes reach it.

Under Ray, the node is Ray's node: the `NodeAgent` passes it to the workers in environment variables. Without Ray, the
node is the machine.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

LOOPBACK = "127.0.0.1"

_NODE_VARIABLE, _IP_VARIABLE = "LUCIDRL_NODE_ID", "LUCIDRL_NODE_IP"
_MACHINE_ID = Path("/etc/machine-id")


@dataclass(frozen=True)
class Place:
    """Where a worker runs."""

    node: str
    """Ray's id of the node, or an id of the machine."""
    ip: str
    """Address at which other nodes reach the worker; without Ray, the loopback address."""
    device: str
    """Name of the worker's device; all processes use the same name for it."""


def place_with(device: str) -> Place:
    """The place of this process, which uses `device`."""
    return Place(node_id(), os.environ.get(_IP_VARIABLE, LOOPBACK), device)


def node_id() -> str:
    """Id of the node that this process runs on; without Ray, an id of the machine that stays the same over restarts."""
    if _NODE_VARIABLE in os.environ:
        return os.environ[_NODE_VARIABLE]
    # Containers of one image may share a machine id, and machines may share a host name; hardly ever both.
    machine = _MACHINE_ID.read_text().strip() if _MACHINE_ID.exists() else ""
    return hashlib.sha256(f"{machine}/{socket.gethostname()}".encode()).hexdigest()[:16]


def node_environment(node: str, ip: str) -> Mapping[str, str]:
    """Environment variables that give a process its node id and address."""
    return {_NODE_VARIABLE: node, _IP_VARIABLE: ip}


def interface_of(ip: str) -> str | None:
    """Name of this machine's network interface with an address; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if ip in [each.address for each in addresses]:
            return name
    return None
