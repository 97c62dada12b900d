"""Workers in processes of this machine, whose driver hosts the store at which they meet."""

from __future__ import annotations

import threading
from pathlib import Path

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.launchers.interfaces import WHOLE, Arguments, Part, Worker
from lucidrl.distributed.launchers.log_folder import LogFolder
from lucidrl.distributed.launchers.processes import ProcessLauncher
from lucidrl.distributed.launchers.rank_environment import listen_for_ranks, rank_environment, threads_of_a_rank
from lucidrl.distributed.launchers.rank_main import RankSettings
from lucidrl.distributed.launchers.rank_set import RankSet
from lucidrl.distributed.place import LOOPBACK
from lucidrl.utils.nsys import request_environment, worker_name
from lucidrl.utils.nsys_launch import nsys_command


class LocalProcesses(ProcessLauncher):
    """Several ranks, each in a spawned process with torchrun's variables in its environment.

    Args:
        worker_class: importable by name in a new process.
        arguments: of its constructor, the same on every rank.
        cluster: number of ranks, threads, deadline of the start.
        log_dir: where `rank_N.log` with the output of rank N goes; by default a temporary folder, which is kept only
            if something goes wrong.
        role: what errors call one of them.
        name: what profiling calls them, with their rank behind it.
        part: of a whole that the ranks are; it numbers them in names and logs, and shares the cores.
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
    ):
        def start_ranks(logs: LogFolder) -> RankSet:
            listener = listen_for_ranks(LOOPBACK)
            port = listener.getsockname()[1]
            settings = [_settings(rank, role, name, part, cluster, port, logs) for rank in range(cluster.num_workers)]
            return RankSet(settings, listener)

        super().__init__(start_ranks, log_dir, worker_class, arguments, cluster.start_timeout_s)


def _settings(
    rank: int, role: str, name: str, part: Part, cluster: ClusterConfig, port: int, logs: LogFolder
) -> RankSettings:
    size = cluster.num_workers
    num_threads = cluster.num_threads or threads_of_a_rank(part.total or size)
    environment = rank_environment(
        rank, size, local_rank=rank, local_size=size, store=(LOOPBACK, port), num_threads=num_threads
    )
    wrapper = nsys_command(worker_name(name, part.first + rank))
    return RankSettings(
        rank,
        role,
        environment | request_environment(),
        num_threads,
        logs.of_rank(part.first + rank),
        # What wraps a rank may start it from any thread of its own.
        die_with_starting_thread=threading.current_thread() is threading.main_thread() and not wrapper,
        part=part,
        wrapper=wrapper,
    )
