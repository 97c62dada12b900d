"""Worker processes on this machine.

`lucidrl.distributed.workers.processes.ProcessGroup`, not torch's class of that name, uses them: it interprets their
replies, exits and timeouts.
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
from typing import TYPE_CHECKING

import psutil

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.interfaces import Hosting, WorkerLabel, WorkerReport
from lucidrl.distributed.workers.logs import LogFolder, WorkerLog, wait_for_growth
from lucidrl.distributed.workers.messages import Message, call_messages, receive, receive_number, send_messages
from lucidrl.distributed.workers.outcomes import Exited, Outcome, Returned, outcome_of
from lucidrl.distributed.workers.place import LOOPBACK
from lucidrl.distributed.workers.process import ChildProcess, ChildSettings, num_cores, serve
from lucidrl.profiling.clock import measured_offset, now_ns
from lucidrl.utils.nsys import request_environment
from lucidrl.utils.nsys_launch import nsys_command

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_POLL_S = 0.2


def start_local(cluster: ClusterConfig, hosting: Hosting, logs: LogFolder) -> LocalWorkers:
    """Start the processes of all workers on this machine; they wait for their first call."""
    listener = listen_for_ranks(LOOPBACK) if hosting.joins_process_group else None
    store = None if listener is None else (LOOPBACK, listener.getsockname()[1])
    inherited = dict(os.environ) if hosting.start_method == "forkserver" else {}
    workers = LocalWorkers(range(cluster.num_workers), cluster, hosting, logs, inherited, store)
    workers.host_store(listener)
    return workers


class LocalWorkers:
    """Processes of workers; the constructor starts them. `RayWorkers` has the same methods for other nodes.

    Args:
        ranks: which ranks of the cluster run on this machine.
        environment: environment variables of every process, in addition to the variables of its rank.
        store: address and port of the store for the ranks' rendezvous; None if they form no process group.
    """

    def __init__(
        self,
        ranks: range,
        cluster: ClusterConfig,
        hosting: Hosting,
        logs: LogFolder,
        environment: Mapping[str, str],
        store: tuple[str, int] | None,
    ):
        num_threads = cluster.num_threads or threads_per_worker(hosting.total(len(ranks)))
        environment = {**environment, "OMP_NUM_THREADS": str(num_threads), **request_environment()}
        self.labels: list[WorkerLabel] = []
        """Labels of all workers, in order."""
        self._processes: dict[int, _WorkerProcess] = {}
        self._replies: queue.SimpleQueue[tuple[int, Message | None]] = queue.SimpleQueue()
        self._waiting: set[int] = set()
        self._store: TCPStore | None = None
        try:
            for rank in ranks:
                wrapper = nsys_command(hosting.profiled_name(rank))
                log_path = logs.of_worker(hosting.number(rank)) if hosting.captures_output else None
                self.labels.append(WorkerLabel(rank, hosting, log_path, wrapper=next(iter(wrapper), "")))
                variables = {**environment, **rank_environment(rank, ranks, cluster.num_workers, store)}
                # A fork server has a single thread. A wrapper may start the worker from any thread.
                is_from_main = threading.current_thread() is threading.main_thread()
                dies_with_thread = (hosting.start_method == "forkserver" or is_from_main) and not wrapper
                settings = ChildSettings(rank, hosting, variables, num_threads, log_path, dies_with_thread, wrapper)
                self._processes[rank] = _WorkerProcess(settings)
        except BaseException:
            self.kill()
            raise

    def host_store(self, listener: socket.socket | None) -> None:
        """Host the store for the rendezvous of the ranks until `kill`; does nothing without a listener.

        Call it after starting the processes: their import of torch then overlaps with that of this process.
        """
        if listener is None:
            return
        try:
            from torch.distributed import TCPStore

            ip, port = listener.getsockname()[:2]
            self._store = TCPStore(ip, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        except BaseException:
            self.kill()
            raise

    def send(self, messages: Mapping[int, Sequence[Message]]) -> None:
        """Send each worker its call; `poll` then returns the replies.

        A call is one or several messages: the method with its arguments, then the `Stored` arguments.
        """

        def exchange(rank: int, call: Sequence[Message]) -> None:
            self._replies.put((rank, self._processes[rank].exchange(call)))

        self._waiting = set(messages)
        # The threads only wait for sockets, which a stuck worker neither fills nor drains; `kill` ends them all.
        for rank, call in messages.items():
            name = self._processes[rank].name
            threading.Thread(target=exchange, args=(rank, call), name=name, daemon=True).start()

    def poll(self, timeout_s: float) -> list[tuple[int, Message | Exited]]:
        """Return new replies; wait up to `timeout_s` for the first."""
        until = time.monotonic() + timeout_s
        while True:
            remaining_s = max(0.0, until - time.monotonic())
            found: list[tuple[int, Message | None]]
            try:
                found = [self._replies.get(timeout=min(remaining_s, _POLL_S))]
            except queue.Empty:
                # A child of a dead worker may keep its connection open.
                dead = [rank for rank in self._waiting if self._processes[rank].has_ended]
                found = [(rank, None) for rank in dead[:1]]
            if found or not remaining_s:
                break
        while not self._replies.empty():
            found.append(self._replies.get())
        self._waiting -= {rank for rank, _ in found}
        return [(rank, message or Exited(self._processes[rank].how_it_ended())) for rank, message in found]

    def clocks(self, timeout_s: float) -> dict[int, Outcome]:
        """Measure the clocks of the workers against the clock of this process, one worker after the other.

        Returns:
            By rank, a `Returned` with a `ClockOffset`. Ends at the first worker that fails, with its outcome, or that
            does not reply within the timeout, without one.
        """
        outcomes: dict[int, Outcome] = {}
        call = call_messages(now_ns, (), {})
        for rank in self._processes:

            def ping(rank: int = rank) -> int:
                self.send({rank: call})
                for _, reply in self.poll(timeout_s):
                    outcome = outcome_of(reply)
                    if isinstance(outcome, Returned):
                        return outcome.value
                    outcomes[rank] = outcome
                raise _NoReply

            try:
                outcomes[rank] = Returned(measured_offset(ping))
            except _NoReply:
                break
        return outcomes

    def dead(self) -> dict[int, Exited]:
        """Workers that have exited; use it only while no call is pending."""
        return {rank: Exited(process.how_it_ended()) for rank, process in self._processes.items() if process.has_ended}

    def follow_log(self, rank: int, path: Path) -> None:
        """Read the output of a worker from another file from now on."""
        self.labels[rank] = replace(self.labels[rank], log_path=path)
        self._processes[rank].log = WorkerLog(path)

    def report(self, numbers: Sequence[int], with_stacks: bool) -> dict[int, WorkerReport]:
        """The last output of some workers and, if requested, their stacks."""
        logs = {number: log for number in numbers if (log := self._processes[number].log) is not None}
        tails = {number: log.tail() for number, log in logs.items()}  # before the workers write their stacks
        stacks: dict[int, str] = {}
        if with_stacks and logs:
            sizes = {number: log.size_bytes() for number, log in logs.items()}
            for number in logs:
                self._processes[number].write_stack()
            wait_for_growth([(log, sizes[number]) for number, log in logs.items()])
            stacks = {number: log.stack_from(sizes[number]) for number, log in logs.items()}
        return {number: WorkerReport(tails.get(number, ""), stacks.get(number, "")) for number in numbers}

    def shutdown(self, timeout_s: float) -> dict[int, int | None]:
        """Let all workers shut down; returns their exit codes, None for workers still running at the timeout."""
        for process in self._processes.values():
            process.end()
        until = time.monotonic() + timeout_s
        return {rank: process.join(max(0.0, until - time.monotonic())) for rank, process in self._processes.items()}

    def kill(self) -> None:
        """Kill all workers; may be called twice."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.reap()
        self._store = None


class _NoReply(Exception):  # noqa: N818 - something observed
    """A worker did not return the reading of its clock."""


class _WorkerProcess(ChildProcess):
    """The process of one worker."""

    def __init__(self, settings: ChildSettings):
        hosting = settings.hosting
        self.name = f"{hosting.role} {hosting.number(settings.rank)}"
        self.log = None if settings.log_path is None else WorkerLog(settings.log_path)
        self._worker: psutil.Process | None = None
        super().__init__(
            serve,
            (settings,),
            name=self.name,
            start_method=hosting.start_method,
            imports_main=hosting.imports_main,
            preload=hosting.preload,
            wrapper=settings.wrapper,
        )

    def exchange(self, call: Sequence[Message]) -> Message | None:
        """Send a call and wait for the reply, without a timeout; None if the process exited or was killed."""
        try:
            if self._worker is None:  # the worker first sends its process id; `pid` may be the wrapper's
                with suppress(psutil.NoSuchProcess):
                    self._worker = psutil.Process(receive_number(self.connection))
                self.remove_wrapper()
            send_messages(self.connection, call)
            return receive(self.connection)
        except (EOFError, OSError):
            return None

    def write_stack(self) -> None:
        """Make the process write its stack into its log."""
        if self._worker is not None:
            with suppress(psutil.NoSuchProcess):
                self._worker.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Kill the process; pending exchanges return. May be called twice."""
        super().kill()
        if self._worker is not None:  # its wrapper may have exited before
            with suppress(psutil.NoSuchProcess):
                self._worker.kill()
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # a child of the worker may hold the other end


def listen_for_ranks(ip: str) -> socket.socket:
    """Listen on a free port for the rendezvous store of the ranks; no other program can take the port meanwhile."""
    return socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET)


def rank_environment(rank: int, ranks: range, world_size: int, store: tuple[str, int] | None) -> dict[str, str]:
    """Environment variables of a rank, as torchrun sets them; none without a store. `ranks`: all on its machine."""
    if store is None:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(ranks.index(rank)),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "MASTER_ADDR": store[0],
        "MASTER_PORT": str(store[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store exists; rank 0 must not host one
    }


def threads_per_worker(num_workers: int) -> int:
    """OMP_NUM_THREADS; if it is unset, the cores that this process may use, divided by the number of workers."""
    first, _, _ = os.environ.get("OMP_NUM_THREADS", "").partition(",")  # OpenMP takes a list, one per nesting level
    if first.isdigit() and int(first) > 0:
        return int(first)
    return max(1, num_cores() // num_workers)
