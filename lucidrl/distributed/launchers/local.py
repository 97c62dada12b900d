"""Workers in processes of this machine.

The driver hosts the store at which the ranks meet, on a port that it listens to before any of them starts: no other
program can take it in between, and groups that start at once cannot mix. Every wait has a deadline. When a rank fails
in any way, all are killed: others may wait for it in a collective, and what they hold is of no use without it.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from lucidrl.distributed.child_main import Raised
from lucidrl.distributed.child_process import num_cores
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.launchers.failures import START, explain_failure
from lucidrl.distributed.launchers.interfaces import Arguments, Worker
from lucidrl.distributed.launchers.messages import Message
from lucidrl.distributed.launchers.rank_main import RankSettings, Returned
from lucidrl.distributed.launchers.rank_process import Died, Outcome, RankProcess
from lucidrl.errors import DataError, WorkerError
from lucidrl.utils.nsys import request_environment, worker_name
from lucidrl.utils.nsys_launch import nsys_command

_log = logging.getLogger(__name__)

_GRACE_S = 1.0
"""After a rank raised, the others have this long to answer too: the one that raised first may only be a witness."""
_POLL_S = 0.2
_SHUTDOWN_DEADLINE_S = 10.0
_WRITING_DEADLINE_S = 60.0
"""Of a shutdown in which ranks write what they recorded."""
_LAST_WORDS_S = 10.0
"""After a failure, ranks that record have this long to end what they do and to write; a stuck one does not."""


class LocalProcesses:
    """Several ranks, each in a spawned process with torchrun's variables in its environment.

    Args:
        worker_class: importable by name in a new process.
        arguments: of its constructor, the same on every rank.
        cluster: number of ranks, threads, deadline of the start.
        log_dir: where `rank_N.log` with the output of rank N goes; by default a temporary folder, which is kept only
            if something goes wrong.
        role: what errors call one of them.
        name: what profiling calls them, with their rank behind it.

    Raises:
        WorkerError: if a rank does not start; an error of ours that a worker raises is raised as it is.
    """

    def __init__(
        self,
        worker_class: type[Worker],
        arguments: Arguments,
        cluster: ClusterConfig,
        log_dir: Path | None,
        role: str = "rank",
        name: str = "worker",
    ):
        self.is_recording = False
        self.size = cluster.num_workers
        self._ended: str | None = None
        self._temporary_dir = Path(tempfile.mkdtemp(prefix="lucidrl-workers-")) if log_dir is None else None
        log_dir = log_dir or self._temporary_dir
        assert log_dir is not None
        log_dir.mkdir(parents=True, exist_ok=True)
        store = _store_on_this_machine()
        self._store: TCPStore | None = store  # lives as long as the ranks
        self._ranks: list[RankProcess] = []
        atexit.register(self.shutdown)
        try:
            message = _message(worker_class.__name__, (worker_class, arguments))
            for rank in range(self.size):
                wrapper = nsys_command(worker_name(name, rank))
                self._ranks.append(RankProcess(_settings(rank, role, cluster, store.port, log_dir, wrapper)))
            pids = self._run(START, [message] * self.size, cluster.start_timeout_s)
            for process, pid in zip(self._ranks, pids, strict=True):
                process.meet(pid)
        except BaseException:
            self._kill("did not start")
            raise

    def run(self, method: str, calls: Sequence[Arguments], timeout_s: float) -> list[Any]:
        """Call the method on every rank; arguments that several ranks share are pickled once.

        Raises:
            WorkerError: if a rank raises, dies or misses the deadline, or the group has ended before; an error of ours
                that a worker raises is raised as it is. All ranks have ended then.
            DataError: if the arguments cannot be pickled; nothing has happened then.
        """
        if self._ended:
            raise WorkerError(f"{method} cannot run: the worker group {self._ended}; start another one")
        keys = [(id(call.kwargs), *map(id, call.args)) for call in calls]
        messages = {key: _message(method, (method, call)) for key, call in dict(zip(keys, calls, strict=True)).items()}
        return self._run(method, [messages[key] for key in keys], timeout_s)

    def shutdown(self) -> None:
        """Let the workers shut down; those that take too long are killed. May be called twice."""
        if self._ended:
            return
        try:
            codes = self._let_end(_WRITING_DEADLINE_S if self._may_write else _SHUTDOWN_DEADLINE_S)
        finally:
            self._kill("was shut down")
        for rank, code in zip(self._ranks, codes, strict=True):
            if code != 0:
                how = "took too long" if code is None else f"ended with exit code {code}"
                _log.warning("%s %s in its shutdown; its output is in %s", rank.name, how, rank.log.path)
        if self._temporary_dir is not None and codes == [0] * self.size:
            shutil.rmtree(self._temporary_dir, ignore_errors=True)

    def _run(self, phase: str, messages: Sequence[Message], timeout_s: float) -> list[Any]:
        try:
            outcomes = self._exchange(messages, timeout_s)
            values = [outcome.value for _, outcome in sorted(outcomes.items()) if isinstance(outcome, Returned)]
            if len(values) == self.size:
                return values
            failure = explain_failure(phase, timeout_s, outcomes, self._ranks)
        except BaseException:  # Ctrl-C for instance; the ranks are in the middle of something
            self._abandon(f"was interrupted in {phase}")
            raise
        self._abandon(f"failed in {phase}")
        raise failure

    def _exchange(self, messages: Sequence[Message], timeout_s: float) -> dict[int, Outcome]:
        """What came of the messages, in order of arrival; ranks without an answer in time are missing."""
        answers: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()

        def exchange(rank: RankProcess, message: Message) -> None:
            answers.put((rank.rank, rank.exchange(message)))

        # The threads only wait, for sockets that a stuck rank neither fills nor drains; `kill` ends them all.
        for rank, message in zip(self._ranks, messages, strict=True):
            threading.Thread(target=exchange, args=(rank, message), name=rank.name, daemon=True).start()
        outcomes: dict[int, Outcome] = {}
        until = time.monotonic() + timeout_s
        while len(outcomes) < self.size and (remaining_s := until - time.monotonic()) > 0:
            try:
                number, outcome = answers.get(timeout=min(remaining_s, _POLL_S))
            except queue.Empty:
                # A process that a dead rank started may keep its connection open.
                dead = [rank for rank in self._ranks if rank.rank not in outcomes and rank.has_ended]
                if not dead:
                    continue
                number, outcome = dead[0].rank, Died()
            outcomes[number] = outcome
            if isinstance(outcome, Died):
                break
            if isinstance(outcome, Raised):
                until = min(until, time.monotonic() + _GRACE_S)
        return outcomes

    @property
    def _may_write(self) -> bool:
        """Whether something is recorded; what wraps a rank writes its report when that has ended."""
        return self.is_recording or any(rank.is_wrapped for rank in self._ranks)

    def _let_end(self, timeout_s: float) -> list[int | None]:
        """Ask all ranks to shut down and leave; their exit codes, None for those that have not left in time."""
        for rank in self._ranks:
            rank.end()
        until = time.monotonic() + timeout_s
        return [rank.join(max(0.0, until - time.monotonic())) for rank in self._ranks]

    def _abandon(self, ended: str) -> None:
        """End ranks that are of no use any more; they may write what they recorded first."""
        try:
            if self._may_write:
                codes = self._let_end(_LAST_WORDS_S)
                if lost := [rank.name for rank, code in zip(self._ranks, codes, strict=True) if code is None]:
                    _log.warning(
                        "%s did not end within %g s; what was recorded there, beside spans, is lost",
                        ", ".join(lost),
                        _LAST_WORDS_S,
                    )
        finally:
            self._kill(ended)

    def _kill(self, ended: str) -> None:
        self._ended = self._ended or ended
        self.is_recording = False
        atexit.unregister(self.shutdown)
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.reap()
        self._store = None
        if self._temporary_dir is not None:
            with suppress(OSError):  # kept if there is anything to read
                self._temporary_dir.rmdir()


def _store_on_this_machine() -> TCPStore:
    """A store that listens on a free port of the loopback interface, from now on."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _settings(
    rank: int, role: str, cluster: ClusterConfig, port: int, log_dir: Path, wrapper: Sequence[str]
) -> RankSettings:
    num_threads = cluster.num_threads or _share_of_threads(cluster.num_workers)
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(cluster.num_workers),
        "LOCAL_WORLD_SIZE": str(cluster.num_workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # tells torch that the store is there, and rank 0 need not host it
        "OMP_NUM_THREADS": str(num_threads),
        **request_environment(),
    }
    # What wraps a rank may start it from any thread of its own.
    dies_with_thread = threading.current_thread() is threading.main_thread() and not wrapper
    return RankSettings(rank, role, environment, num_threads, log_dir / f"rank_{rank}.log", dies_with_thread, wrapper)


def _share_of_threads(num_workers: int) -> int:
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # OpenMP takes a list, one number a nesting level
    if told.isdigit() and int(told) > 0:
        return int(told)
    return max(1, num_cores() // num_workers)


def _message(what: str, content: Any) -> Message:
    try:
        return Message.of(content)
    except Exception as error:  # pickle raises whatever the object's own methods raise
        raise DataError(
            f"the arguments of {what} cannot be sent to the workers: {type(error).__name__}: {error}; "
            "pass objects that can be pickled, and functions and classes of a module instead of local ones"
        ) from error
