"""Env processes that are started, asked and ended together.

Whatever goes wrong with one of them, all are ended: what the others hold is of no use without it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from multiprocessing import util

from lucidrl.distributed.workers.interfaces import StartMethod
from lucidrl.envs.creator import EnvCreator
from lucidrl.envs.process_main import spin_time_s
from lucidrl.envs.process_memory import EnvRows, rows_like, share
from lucidrl.envs.processes import EnvProcess, wait_any
from lucidrl.envs.stacked import EnvSpecs, StackedEnv
from lucidrl.errors import EnvironmentFailure

_CLOSE_GRACE_S = 0.5
"""To close their envs; who takes longer is killed."""


class EnvProcessSet:
    """Processes that have made their envs, each a block of neighbours, as equal in size as can be.

    Args:
        creators: one for each env.

    Raises:
        EnvironmentFailure: if an env or a process fails in its start; errors of ours that a factory raises keep their
            type. All processes have ended then.
    """

    def __init__(
        self,
        creators: Sequence[EnvCreator],
        num_processes: int,
        *,
        start_method: StartMethod,
        start_timeout_s: float,
        step_timeout_s: float,
    ):
        self.members: list[EnvProcess] = []
        self._ended: str | None = None
        # Runs when nobody has this set any more, and at exit before multiprocessing waits for processes to end, also
        # in processes of multiprocessing, where `atexit` does not.
        self._end_members = util.Finalize(self, _end, (self.members,), exitpriority=0)
        bounds = [len(creators) * number // num_processes for number in range(num_processes + 1)]
        try:
            for first, stop in itertools.pairwise(bounds):
                process = EnvProcess(
                    creators[first:stop],
                    first,
                    len(creators),
                    start_method=start_method,
                    start_timeout_s=start_timeout_s,
                    step_timeout_s=step_timeout_s,
                    spin_s=spin_time_s(num_processes),
                )
                self.members.append(process)
            _finish(self.members)
        except BaseException:
            self.kill("did not start")
            raise

    @property
    def specs(self) -> list[EnvSpecs]:
        """Of all envs."""
        return [specs for process in self.members for specs in process.specs]

    def share_memory(self, env: StackedEnv) -> EnvRows:
        """Arrays for all envs, of which `env` has the specs; from now on they can be asked to step."""
        rows = share(rows_like(env, env.num_envs), [process.connection for process in self.members])
        for process in self.members:
            process.share(rows)
        return rows

    def run(self, start: Callable[[EnvProcess], None], members: Sequence[EnvProcess] | None = None) -> None:
        """Start the same in all processes, or in some, and wait until they have done it.

        Raises:
            EnvironmentFailure: if one fails, or all have ended before.
        """
        if self._ended:
            raise EnvironmentFailure(f"the env processes have ended: {self._ended}; make another ParallelEnv")
        members = self.members if members is None else members
        try:
            for process in members:
                start(process)
            _finish(members)
        except EnvironmentFailure as failure:
            self.kill(str(failure))
            raise
        except BaseException:  # Ctrl-C for instance; the processes are in the middle of something
            self.kill("the driver was interrupted while they were at work")
            raise

    def kill(self, why: str) -> None:
        """End all processes now."""
        for process in self.members:
            process.kill()
        self._close(why)

    def close(self) -> None:
        """Let the processes close their envs; those that take too long are killed. May be called twice."""
        self._close("they were closed")

    def _close(self, why: str) -> None:
        self._ended = self._ended or why
        self._end_members()


def _finish(members: Sequence[EnvProcess]) -> None:
    pending = list(members)
    while pending:
        for process in wait_any(pending):
            process.finish()
            pending.remove(process)


def _end(members: list[EnvProcess]) -> None:
    for process in members:
        process.end()
    until = time.monotonic() + _CLOSE_GRACE_S
    for process in members:
        process.join(max(0.0, until - time.monotonic()))
    for process in members:
        process.kill()
    for process in members:
        process.reap()
