"""What torchrun would give its ranks: variables of their place among each other, and a store at which they meet."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from lucidrl.distributed.child_process import num_cores

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def listen_for_ranks(ip: str) -> socket.socket:
    """A socket for the store of ranks: on one address of this machine, at a free port, from now on.

    No other program can take the port before the ranks start, and groups that start at once cannot mix.
    """
    return socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET)


def host_store(listener: socket.socket) -> TCPStore:
    """The store, at the listener's address; it ends with the object."""
    from torch.distributed import TCPStore

    ip, port = listener.getsockname()[:2]
    return TCPStore(ip, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def rank_environment(
    rank: int, world_size: int, *, local_rank: int, local_size: int, store: tuple[str, int], num_threads: int
) -> dict[str, str]:
    """Variables of a rank.

    Args:
        rank, world_size: among all ranks.
        local_rank, local_size: among those of its machine.
        store: address and port of the store.
        num_threads: of its computation on CPUs.
    """
    ip, port = store
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": ip,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # tells torch that the store is there, and rank 0 need not host it
        "OMP_NUM_THREADS": str(num_threads),
    }


def threads_of_a_rank(local_size: int) -> int:
    """What OMP_NUM_THREADS says or, unset, an equal share of the cores that this process may use."""
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # OpenMP takes a list, one number a nesting level
    if told.isdigit() and int(told) > 0:
        return int(told)
    return max(1, num_cores() // local_size)
