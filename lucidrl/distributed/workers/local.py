"""Workers of one machine as processes of this one: started, called, asked where they are, ended.

Nothing is decided here; what an answer, an exit or a silence means is for the driver of all workers to say.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.child import ChildSettings, serve
from lucidrl.distributed.workers.environment import host_store, listen_for_ranks, rank_environment, threads_per_worker
from lucidrl.distributed.workers.interfaces import Hosting, WorkerLabel, WorkerReport
from lucidrl.distributed.workers.logs import LogFolder, WorkerLog, wait_for_growth
from lucidrl.distributed.workers.messages import Message, receive, send_messages
from lucidrl.distributed.workers.outcomes import Exited
from lucidrl.distributed.workers.place import LOOPBACK
from lucidrl.distributed.workers.process import ChildProcess
from lucidrl.utils.nsys import request_environment, worker_name
from lucidrl.utils.nsys_launch import nsys_command

_POLL_S = 0.2


def start_local(cluster: ClusterConfig, hosting: Hosting, logs: LogFolder) -> LocalWorkers:
    """Start the processes of all workers on this machine; they wait for their first call."""
    size = cluster.num_workers
    num_threads = cluster.num_threads or threads_per_worker(hosting.total(size))
    listener = listen_for_ranks(LOOPBACK) if hosting.joins_process_group else None
    inherited = dict(os.environ) if hosting.start_method == "forkserver" else {}
    settings = []
    for rank in range(size):
        environment = {**inherited, "OMP_NUM_THREADS": str(num_threads), **request_environment()}
        if listener is not None:
            store = (LOOPBACK, listener.getsockname()[1])
            environment |= rank_environment(rank, size, local_rank=rank, local_size=size, store=store)
        settings.append(child_settings(rank, hosting, environment, num_threads, logs))
    workers = LocalWorkers(settings)
    if listener is not None:
        workers.host_store(listener)
    return workers


def child_settings(
    rank: int, hosting: Hosting, environment: Mapping[str, str], num_threads: int, logs: LogFolder
) -> ChildSettings:
    """Of a process that is to be started by this one."""
    number = hosting.number(rank)
    wrapper = nsys_command(worker_name(hosting.name, number))
    # A fork server has a single thread. What wraps a worker may start it from any thread.
    is_from_main = hosting.start_method == "forkserver" or threading.current_thread() is threading.main_thread()
    return ChildSettings(
        rank,
        hosting,
        environment,
        num_threads,
        logs.of_worker(number) if hosting.captures_output else None,
        die_with_starting_thread=is_from_main and not wrapper,
        wrapper=wrapper,
    )


class LocalWorkers:
    """Started at once; see `Workers`.

    Args:
        settings: of each worker's process.
    """

    def __init__(self, settings: Sequence[ChildSettings]):
        self.labels = [
            WorkerLabel(one.rank, one.hosting, one.log_path, wrapper=next(iter(one.wrapper), "")) for one in settings
        ]
        self._processes: dict[int, _WorkerProcess] = {}
        self._answers: queue.SimpleQueue[tuple[int, Message | None]] = queue.SimpleQueue()
        self._waiting: set[int] = set()
        self._store: Any = None
        try:
            for one in settings:
                self._processes[one.rank] = _WorkerProcess(one)
        except BaseException:
            self.kill()
            raise

    def host_store(self, listener: socket.socket) -> None:
        """Host the store at which ranks meet; it lives as long as they do.

        To be called after their start: they import torch meanwhile, as this process may have to.
        """
        try:
            self._store = host_store(listener)
        except BaseException:
            self.kill()
            raise

    def send(self, messages: Mapping[int, Sequence[Message]]) -> None:
        def exchange(rank: int, call: Sequence[Message]) -> None:
            self._answers.put((rank, self._processes[rank].exchange(call)))

        self._waiting = set(messages)
        # The threads only wait, for sockets that a stuck worker neither fills nor drains; `kill` ends them all.
        for rank, call in messages.items():
            name = self._processes[rank].name
            threading.Thread(target=exchange, args=(rank, call), name=name, daemon=True).start()

    def poll(self, timeout_s: float) -> list[tuple[int, Message | Exited]]:
        until = time.monotonic() + timeout_s
        while True:
            remaining_s = max(0.0, until - time.monotonic())
            found: list[tuple[int, Message | None]]
            try:
                found = [self._answers.get(timeout=min(remaining_s, _POLL_S))]
            except queue.Empty:
                # A process that a dead worker started may keep its connection open.
                dead = [rank for rank in self._waiting if self._processes[rank].has_ended]
                found = [(rank, None) for rank in dead[:1]]
            if found or not remaining_s:
                break
        while not self._answers.empty():
            found.append(self._answers.get())
        self._waiting -= {rank for rank, _ in found}
        return [(rank, message or Exited(self._processes[rank].how_it_ended())) for rank, message in found]

    def dead(self) -> dict[int, Exited]:
        return {rank: Exited(process.how_it_ended()) for rank, process in self._processes.items() if process.has_ended}

    def meet(self, pids: Sequence[int]) -> None:
        for process, pid in zip(self._processes.values(), pids, strict=True):
            process.meet(pid)

    def follow_log(self, rank: int, path: Path) -> None:
        """Find the output of a worker there from now on."""
        self.labels[rank] = replace(self.labels[rank], log_path=path)
        self._processes[rank].log = WorkerLog(path)

    def report(self, numbers: Sequence[int], with_stacks: bool) -> dict[int, WorkerReport]:
        found = {number: WorkerReport("") for number in numbers}
        logs = {number: log for number in numbers if (log := self._processes[number].log) is not None}
        for number, log in logs.items():
            found[number] = WorkerReport(log.tail())  # before the workers write where they are
        if with_stacks and logs:
            sizes = {number: self._processes[number].ask_for_stack(log) for number, log in logs.items()}
            wait_for_growth([(log, sizes[number]) for number, log in logs.items()])
            for number, log in logs.items():
                found[number] = WorkerReport(found[number].tail, log.stack_from(sizes[number]))
        return found

    def let_end(self, timeout_s: float) -> dict[int, int | None]:
        for process in self._processes.values():
            process.end()
        until = time.monotonic() + timeout_s
        return {rank: process.join(max(0.0, until - time.monotonic())) for rank, process in self._processes.items()}

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.reap()
        self._store = None


class _WorkerProcess(ChildProcess):
    """Started at once; it listens as soon as it has imported what it needs."""

    def __init__(self, settings: ChildSettings):
        hosting = settings.hosting
        self.name = f"{hosting.role} {hosting.number(settings.rank)}"
        self.log = None if settings.log_path is None else WorkerLog(settings.log_path)
        self._connection, theirs = socket.socketpair()
        with theirs:  # its only other holder is the process, so that the connection ends with it
            super().__init__(
                serve,
                (theirs, settings),
                name=self.name,
                start_method=hosting.start_method,
                imports_main=hosting.imports_main,
                preload=hosting.preload,
                wrapper=settings.wrapper,
            )
        self._worker = None if self.is_wrapped else psutil.Process(self.pid)

    def meet(self, pid: int) -> None:
        """Learn the process id of the worker itself, since another program may run it; the wrapper's file goes."""
        self.remove_wrapper()
        with suppress(psutil.NoSuchProcess):
            self._worker = psutil.Process(pid)

    def exchange(self, call: Sequence[Message]) -> Message | None:
        """Send a call and wait for the answer, without a timeout: `kill` ends the wait. None if the process ended."""
        try:
            send_messages(self._connection, call)
            return receive(self._connection)
        except (EOFError, OSError):
            return None

    def ask_for_stack(self, log: WorkerLog) -> int:
        """Make the process write where it is into its log; returns the log's size before that."""
        size_bytes = log.size_bytes()
        if self._worker is not None:
            with suppress(psutil.NoSuchProcess):
                self._worker.send_signal(signal.SIGUSR1)
        return size_bytes

    def end(self) -> None:
        """Ask the worker to shut down and exit; does not wait."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """End the process now, and every wait for it; may be called twice."""
        super().kill()
        if self._worker is not None:  # its wrapper may have ended before
            with suppress(psutil.NoSuchProcess):
                self._worker.kill()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # a process that it started may hold the other end

    def reap(self) -> None:
        """Leave nothing behind after `kill`."""
        super().reap()
        self._connection.close()
