"""`WorkerGroup`: workers that the driver calls in lock-step; if one fails, all are killed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.interfaces import Arguments, Hosting, Worker
from lucidrl.distributed.workers.processes import ProcessGroup
from lucidrl.errors import DataError, WorkerError
from lucidrl.utils.nsys import is_recorded, worker_name
from lucidrl.utils.nsys_launch import warn_of_no_report


class WorkerGroup:
    """One instance of a worker class per rank.

    A single worker lives in this process: calls are plain method calls and timeouts do not interrupt them. Several
    workers live in processes on this machine or on Ray nodes, with torchrun's environment variables (see
    `init_process_group_from_environment`): arguments and results are copies, output goes to `rank_N.log`, and after any
    failure all workers are killed and the group cannot be used again. Only one thread at a time may call its methods.

    A method may belong to an attribute of the worker: `run_all("checkpoints.begin", path)`.

    Example:
        >>> with WorkerGroup(Counter, args=(10,), cluster=ClusterConfig(num_workers=2)) as group:
        ...     group.run_all("add", 5)
        [15, 15]

    Args:
        worker_class: any class with a `shutdown` method; for several ranks it must be importable by name.
        args: positional constructor arguments; like `kwargs`, the same on every rank.
        cluster: number of ranks, where they run, their threads and timeouts.
        log_dir: folder for `rank_N.log`; by default a temporary one, kept only after a failure.
        own_processes: run even a single worker in a separate process, which can be killed.
        name: first part of the workers' names in profiles, as in `worker-0`; see `lucidrl.utils.nsys`.
        role: noun for a worker in errors and log names, as in `rank 0` and `rank_0.log`.

    Raises:
        WorkerError: here and in calls, if one of several ranks raises, exits or times out. A `LucidError` of a worker
            keeps its type.
    """

    def __init__(
        self,
        worker_class: type[Worker],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        cluster: ClusterConfig | None = None,
        log_dir: Path | None = None,
        own_processes: bool = False,
        name: str = "worker",
        role: str = "rank",
    ):
        cluster = cluster or ClusterConfig()
        self.size = cluster.num_workers
        self._name, self._is_recording = name, False
        self._worker: Worker | None = None
        self._processes: ProcessGroup | None = None
        if self.size == 1 and not cluster.uses_ray and not own_processes:
            warn_of_no_report(worker_name(name, 0))
            self._worker = worker_class(*args, **(kwargs or {}))
        else:
            hosting = Hosting(role, name, log_dir=log_dir, log_name=role.replace(" ", "_"))
            self._processes = ProcessGroup(worker_class, Arguments(args, kwargs or {}), cluster, hosting)
            self._processes.make_workers()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, each on its machine."""
        return self._processes.pids if self._processes is not None else [os.getpid()]

    @property
    def blind_nodes(self) -> Sequence[str]:
        """Nodes that do not see `log_dir`; the driver copies only logs from these nodes, no other files of workers."""
        return self._processes.blind_nodes if self._processes is not None else ()

    def run_all(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call the method on every rank with the same arguments; returns the results in rank order.

        Args:
            timeout_s: `cluster.call_timeout_s` by default.
        """
        if self._worker is not None:
            return [attrgetter(method)(self._worker)(*args, **kwargs)]
        return self._run(method, [Arguments(args, kwargs)] * self.size, timeout_s)

    def run_each(self, method: str, args_by_rank: Sequence[Sequence[Any]]) -> list[Any]:
        """Call the method on every rank with separate arguments; returns the results in rank order.

        Arguments that are the same objects on several ranks are pickled once.
        """
        if len(args_by_rank) != self.size:
            raise DataError(
                f"{method} got arguments for {len(args_by_rank)} ranks, but the group has {self.size}; "
                "pass one tuple of arguments per rank"
            )
        if self._worker is not None:
            return [attrgetter(method)(self._worker)(*args_by_rank[0])]
        return self._run(method, [Arguments(args) for args in args_by_rank], None)

    def check(self) -> None:
        """Liveness check: raise, as the next call would, if a worker has exited."""
        if self._processes is not None:
            self._processes.check()

    def start_gpu_profiling(self) -> None:
        """Start recording in the workers; see `ProcessGroup.start_gpu_profiling`."""
        if self._processes is not None:
            self._processes.start_gpu_profiling()
        elif is_recorded(worker_name(self._name, 0)):
            self.run_all("start_gpu_profiling")
            self._is_recording = True

    def stop_gpu_profiling(self) -> None:
        """Stop recording and write the traces; does nothing if no worker records."""
        if self._processes is not None:
            self._processes.stop_gpu_profiling()
        elif self._is_recording:
            self.run_all("stop_gpu_profiling")
            self._is_recording = False

    def shutdown(self) -> None:
        """Shut all workers down; may be called twice."""
        if self._processes is not None:
            self._processes.shutdown()
        elif self._worker is not None:
            worker, self._worker, self._is_recording = self._worker, None, False
            worker.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _run(self, method: str, calls: Sequence[Arguments], timeout_s: float | None) -> list[Any]:
        if self._processes is None:
            raise WorkerError(f"{method} was called after shutdown; start another worker group")
        return self._processes.run(method, calls, timeout_s)
