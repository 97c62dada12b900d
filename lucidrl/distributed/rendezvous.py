"""Rendezvous of the process group for weight transfer, which is separate from torch's default group.

Rank 0 of the group is policy rank 0, the other ranks are generators. Rank 0 hosts the store on exactly one address;
torch by itself would listen on every interface. Rank 0 waits for all members, up to a timeout, and then
publishes a result to them: that the group is complete, or an error message.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lucidrl.errors import RefitError

_POLL_S = 0.02
_READ_TIMEOUT_S = 5.0
"""How long rank 0 keeps the store of a failed group, so that members can read the error message."""
_COMPLETE = "complete"


@dataclass(frozen=True)
class Membership:
    """Address, size and rank with which a process joins a group.

    Raises:
        RefitError: if a value is not valid.
    """

    ip: str
    port: int
    rank: int
    world_size: int
    device: torch.device
    """Device of the tensors."""

    def __post_init__(self) -> None:
        try:
            is_wildcard = ipaddress.ip_address(self.ip).is_unspecified
        except ValueError:
            raise RefitError(f"ip={self.ip!r} is not an IP address; pass the address of policy rank 0") from None
        if is_wildcard:
            raise RefitError(
                f"ip={self.ip} means every interface of the machine, but weights are sent over a single one; "
                "pass the address at which the generators reach policy rank 0"
            )
        if not 0 < self.port < 1 << 16:
            raise RefitError(f"port={self.port} is not a TCP port; pass a free one from 1 to 65535")
        if self.world_size < 2 or not 0 <= self.rank < self.world_size:
            raise RefitError(
                f"rank={self.rank} with world_size={self.world_size} is not valid in the process group for weight "
                "transfer: world_size must be at least 2, and rank from 0 to world_size - 1; pass rank 0 for policy "
                "rank 0, ranks from 1 for the generators, and 1 plus the number of generators as world_size"
            )

    @property
    def address(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


def free_port(ip: str) -> int:
    """A port that is currently free at `ip`, an address of this machine."""
    with socket.create_server((ip, 0), family=_family(ip)) as listener:
        return listener.getsockname()[1]


def meet(member: Membership, timeout_s: float) -> tuple[dist.TCPStore, Any]:
    """Join the group; returns the store, which must live as long as the group, and torch's backend.

    Gloo listens on the interface that leads to `member.ip`; NCCL_SOCKET_IFNAME sets the interface of nccl.

    Args:
        timeout_s: timeout of the rendezvous and of every operation of the group.

    Raises:
        RefitError: if the address cannot be used or reached, a member is missing at the timeout, two members have the
            same rank, or members differ in world size or device type.
    """
    until = time.monotonic() + timeout_s
    own_ip = member.ip
    if member.rank == 0:
        store = _host(member, timeout_s)
        _await_members(store, member, timeout_s, until)
    else:
        own_ip = _reach(member, timeout_s, until)
        store = _connect(member, until)
        _await_outcome(store, member, timeout_s, until)
    try:
        return store, _make_backend(store, member, own_ip, timeout_s)
    except RuntimeError as error:
        raise RefitError(
            f"rank {member.rank} of the process group for weight transfer at {member.address} could not connect to the "
            f"other members: {error}; check whether a member has exited, and whether a firewall separates their "
            "machines"
        ) from error


def _host(member: Membership, timeout_s: float) -> dist.TCPStore:
    try:
        listener = socket.create_server((member.ip, member.port), family=_family(member.ip))
    except OSError as error:
        raise RefitError(
            f"policy rank 0 cannot listen on {member.address}: {os.strerror(error.errno or 0)}; ip must be an address "
            "of its machine, and port must be free there"
        ) from error
    store = dist.TCPStore(
        member.ip,
        member.port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    store.set("world_size", str(member.world_size))
    return store


def _family(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


def _reach(member: Membership, timeout_s: float, until: float) -> str:
    """Wait until rank 0 listens; returns the local address of the connection.

    Uses a plain socket, because torch's client exceeds its timeout and logs every attempt.
    """
    while True:
        remaining_s = max(_POLL_S, until - time.monotonic())
        try:
            with socket.create_connection((member.ip, member.port), timeout=remaining_s) as connection:
                return connection.getsockname()[0]
        except OSError as error:
            if time.monotonic() + _POLL_S >= until:
                raise RefitError(
                    f"rank {member.rank} did not reach policy rank 0 at {member.address} within {timeout_s:g} s: "
                    f"{error.strerror or error}; call init_collective on policy and generators at the same time, with "
                    "the same ip and port"
                ) from error
        time.sleep(_POLL_S)


def _connect(member: Membership, until: float) -> dist.TCPStore:
    timeout = timedelta(seconds=max(_POLL_S, until - time.monotonic()))
    store: Future[dist.TCPStore] = Future()

    def connect() -> None:
        try:
            store.set_result(dist.TCPStore(member.ip, member.port, is_master=False, timeout=timeout))
        except RuntimeError as error:
            store.set_exception(error)

    # In a thread, because torch waits forever if the server is not a TCPStore.
    threading.Thread(target=connect, name="weight-transfer-store", daemon=True).start()
    try:
        return store.result(timeout.total_seconds())
    except (RuntimeError, TimeoutError) as error:
        raise RefitError(
            f"the server at {member.address} is not policy rank 0; pass the same ip and port to init_collective on "
            "policy and generators"
        ) from error


def _await_members(store: dist.TCPStore, host: Membership, timeout_s: float, until: float) -> None:
    """On rank 0: wait for all members and publish the result to them."""
    present = [0]
    problem = None
    while len(present) < host.world_size and problem is None:
        key = f"arrival/{len(present)}"
        if _is_set_in_time(store, key, until):
            arrived = json.loads(store.get(key))
            problem = _disagreement(arrived, host, present)
            present.append(arrived["rank"])
        else:
            problem = (
                f"only {len(present)} of {host.world_size} members (rank {', '.join(map(str, present))}) joined at "
                f"{host.address} within {timeout_s:g} s; start the others with this address, or correct world_size, "
                "which counts policy rank 0 and all generators"
            )
    store.set("outcome", problem or _COMPLETE)
    if problem is not None:
        readers_until = time.monotonic() + _READ_TIMEOUT_S  # the store is closed after the error
        with suppress(RuntimeError):
            while store.add("readers", 0) < store.add("arrivals", 0) and time.monotonic() < readers_until:
                time.sleep(_POLL_S)
        raise RefitError(problem)


def _disagreement(arrived: dict[str, Any], host: Membership, present: list[int]) -> str | None:
    who = f"a member joined at {host.address} as rank {arrived['rank']}"
    if arrived["world_size"] != host.world_size:
        return (
            f"{who} with world_size={arrived['world_size']}, but policy rank 0 has {host.world_size}; pass the same "
            "world_size everywhere: 1 for policy rank 0, plus the number of generators"
        )
    if arrived["device"] != host.device.type:
        return (
            f"{who} with weights on {arrived['device']}, but policy rank 0 has them on {host.device.type}; use the "
            "same device type"
        )
    if arrived["rank"] in present:
        return f"{who}, but this rank has joined already; give every generator a different rank, starting at 1"
    return None


def _await_outcome(store: dist.TCPStore, member: Membership, timeout_s: float, until: float) -> None:
    """On the other ranks: join, and wait for the result that rank 0 publishes; raise RefitError if it is an error."""
    try:
        number = store.add("arrivals", 1)
        arrival = {"rank": member.rank, "world_size": member.world_size, "device": member.device.type}
        store.set(f"arrival/{number}", json.dumps(arrival))
        is_decided = _is_set_in_time(store, "outcome", until)
        outcome = store.get("outcome").decode() if is_decided else ""
        world_size = int(store.get("world_size"))
        store.add("readers", 1)  # last: rank 0 may close the store now
    except RuntimeError as error:
        raise RefitError(
            f"policy rank 0 at {member.address} exited before the process group for weight transfer was complete; see "
            "the error of policy rank 0"
        ) from error
    if not is_decided:
        raise RefitError(
            f"the process group for weight transfer at {member.address} was not complete within {timeout_s:g} s; start "
            f"all {world_size} members at the same time"
        )
    if outcome != _COMPLETE:
        raise RefitError(outcome)
    if number >= world_size:
        raise RefitError(
            f"rank {member.rank} joined at {member.address} after all {world_size} members of the process group for "
            "weight transfer; give every group a different address, and every generator a different rank"
        )


def _is_set_in_time(store: dist.TCPStore, key: str, until: float) -> bool:
    """Wait for a key; returns whether it is set. Polls, because torch logs warnings when its own wait times out."""
    while not store.check([key]):
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL_S)
    return True


def _make_backend(store: dist.TCPStore, member: Membership, own_ip: str, timeout_s: float) -> Any:
    timeout = timedelta(seconds=timeout_s)
    torch_dist: Any = dist  # torch's type stubs lack both classes
    if member.device.type == "cuda":
        options = torch_dist.ProcessGroupNCCL.Options()
        # At this timeout torch's watchdog kills the process; waits with the real timeout raise earlier.
        options._timeout = 2 * timeout
        return torch_dist.ProcessGroupNCCL(store, member.rank, member.world_size, options)
    options = torch_dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [torch_dist.ProcessGroupGloo.create_device(hostname=own_ip)]
    return torch_dist.ProcessGroupGloo(store, member.rank, member.world_size, options)
