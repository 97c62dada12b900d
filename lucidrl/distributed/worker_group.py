"""`WorkerGroup`: what a driver holds of its workers, wherever they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.launchers.in_process import InProcess
from lucidrl.distributed.launchers.interfaces import WHOLE, Arguments, Launcher, NodeChoice, Part, Worker
from lucidrl.distributed.launchers.local import LocalProcesses
from lucidrl.distributed.launchers.ray import RayProcesses
from lucidrl.errors import DataError
from lucidrl.utils.nsys import is_recorded, worker_name
from lucidrl.utils.nsys_launch import warn_of_no_report

_RECORDING_TIMEOUT_S = 1800.0
"""Of the start of a profiler and of the writing of traces: deadlines that suit the work say nothing about these."""


class WorkerGroup:
    """One instance of a worker class a rank.

    A single one lives in this process: calls are plain method calls, what it raises is raised as it is, and deadlines
    do not interrupt it. Several, or one that asks for it, live in processes of this machine or of a Ray cluster, with
    torchrun's variables in their environment (see `init_process_group_from_environment`): arguments and results are
    copies, what the workers print and log goes to `rank_N.log`, and after any failure all of them are killed and the
    group has ended. One thread at a time may call.

    Example:
        >>> with WorkerGroup(Counter, args=(10,), cluster=ClusterConfig(num_workers=2)) as group:
        ...     group.run_all("add", 5)
        [15, 15]

    Args:
        worker_class: any class with a `shutdown` method; for several ranks it must be importable by name.
        args: of its constructor, as `kwargs`; the same on every rank.
        cluster: number of ranks, where they run, their threads and deadlines.
        log_dir: for `rank_N.log`; by default a temporary folder that is kept only if something goes wrong.
        own_processes: a single worker, too, lives in a process of its own.
        role: what errors call a worker that is a process.
        name: what profiling calls the workers, with their rank behind it; see `lucidrl.utils.nsys`.
        part: which part of a whole the group is, where several groups do the same work; it numbers the ranks in errors,
            logs and profiling, and lets the groups share the cores.
        nodes: of a Ray cluster on which the workers may run; by default all.
        makes_workers: False if only their processes are to be started: `make_workers` is then called before all else,
            and `kill` can end it.

    Raises:
        WorkerError: here and in calls, if one of several ranks raises, dies or misses its deadline. Errors of ours
            that a worker raises (`LucidError`) keep their type.
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
        role: str = "rank",
        name: str = "worker",
        part: Part = WHOLE,
        nodes: NodeChoice | None = None,
        makes_workers: bool = True,
    ):
        cluster = cluster or ClusterConfig()
        self._call_timeout_s = cluster.call_timeout_s
        self._name, self._part = name, part
        arguments = Arguments(args, kwargs or {})
        self._launcher: Launcher
        if cluster.uses_ray:
            self._launcher = RayProcesses(worker_class, arguments, cluster, log_dir, role, name, part, nodes)
        elif cluster.num_workers == 1 and not own_processes:
            warn_of_no_report(worker_name(name, 0))
            self._launcher = InProcess(worker_class, arguments)
        else:
            self._launcher = LocalProcesses(worker_class, arguments, cluster, log_dir, role, name, part)
        if makes_workers:
            self.make_workers()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._launcher.size

    @property
    def blind_nodes(self) -> Sequence[str]:
        """Nodes that do not see `log_dir`: logs are brought from there, but nothing else that workers write."""
        return self._launcher.blind_nodes

    def make_workers(self) -> None:
        """Make the instance of every rank, if the constructor was told not to."""
        self._launcher.make_workers()

    def run_all(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call the method on every rank with the same arguments; the results, by rank.

        Args:
            timeout_s: deadline; `cluster.call_timeout_s` by default.
        """
        return self._run(method, [Arguments(args, kwargs)] * self.size, timeout_s)

    def run_each(self, method: str, args_by_rank: Sequence[Sequence[Any]], timeout_s: float | None = None) -> list[Any]:
        """Call the method on every rank with its own arguments; the results, by rank.

        Ranks whose arguments are the same objects share one copy on the way.
        """
        if len(args_by_rank) != self.size:
            raise DataError(
                f"{method} was given arguments for {len(args_by_rank)} ranks, but there are {self.size}; "
                "give one tuple of arguments a rank"
            )
        return self._run(method, [Arguments(args) for args in args_by_rank], timeout_s)

    def check(self) -> None:
        """Raise, as the next call would, if a worker has died; for whoever waits long for something else."""
        self._launcher.check()

    def start_gpu_profiling(self) -> None:
        """Tell the workers to record, by their methods of this name.

        If the group ends meanwhile, however it does, they have a moment to write what they recorded.
        """
        if not any(is_recorded(worker_name(self._name, self._part.first + rank)) for rank in range(self.size)):
            return
        self._launcher.is_recording = True
        self.run_all("start_gpu_profiling", timeout_s=max(self._call_timeout_s, _RECORDING_TIMEOUT_S))

    def stop_gpu_profiling(self) -> None:
        """Tell them that it is enough; harmless if they do not record, or have ended."""
        if self._launcher.is_recording:
            self.run_all("stop_gpu_profiling", timeout_s=max(self._call_timeout_s, _RECORDING_TIMEOUT_S))
            self._launcher.is_recording = False

    def shutdown(self) -> None:
        """Shut every worker down and end its process; may be called twice."""
        self._launcher.shutdown()

    def kill(self) -> None:
        """End the workers' processes in the middle of whatever they do.

        Unlike all else this may be done while another thread is in a call, which fails then.
        """
        self._launcher.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _run(self, method: str, calls: Sequence[Arguments], timeout_s: float | None) -> list[Any]:
        return self._launcher.run(method, calls, self._call_timeout_s if timeout_s is None else timeout_s)
