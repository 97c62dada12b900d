"""The workers of a collector, wherever they run: asked together or one by one, ended together.

Every wait has a deadline and notices at once that a worker is gone. Whatever goes wrong with one of them, all are
ended: what the others hold is of no use to a collector that cannot go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import cloudpickle

from lucidrl.collectors.parts import Weights
from lucidrl.collectors.worker_host import Arrivals, Worker, WorkerHost, WorkerPlan
from lucidrl.collectors.worker_main import Batch, Call, Collect, Command, Seed
from lucidrl.distributed.child_main import Raised, RemoteTraceback
from lucidrl.distributed.launchers.rank_main import Returned
from lucidrl.distributed.launchers.rank_process import Died
from lucidrl.envs.stacked import EnvSpecs
from lucidrl.errors import LucidError, WorkerError

_log = logging.getLogger(__name__)

ROLLOUT = "a rollout"
"""The phase in which a batch is collected."""
START = "the start"
_POLL_S = 0.2
_SHUTDOWN_DEADLINE_S = 1.0
_TRACE_DEADLINE_S = 10.0
"""To end the rollout and write the trace, for a worker that records."""


class WorkerSet:
    """Workers that have started. Batches are for one thread; calls may come from any.

    Args:
        host: where they run; closed with them.

    Raises:
        WorkerError: here and in all calls, if a worker raises, dies or misses its deadline. Errors of ours that a
            worker raises (`LucidError`) keep their type. All workers have ended then.
    """

    def __init__(self, host: WorkerHost, plan: WorkerPlan):
        self.size = plan.num_workers
        self._host = host
        self._timeout_s = plan.timeout_s
        self._ended: str | None = None
        self._calling = threading.Lock()
        self._due: dict[int, float] = {}  # by worker: deadline of the batch that it was asked for
        self._workers: list[Worker] = []
        self.recording: dict[int, int] = {}
        """Workers that have a trace to write before they end, and get the time for it; with the number of those that
        each has written before."""
        try:
            for index in range(self.size):
                self._workers.append(host.start(index, plan))
            specs = self._gather(START, plan.start_timeout_s)
            self.specs: list[EnvSpecs] = [cloudpickle.loads(each) for each in specs]
            """Of the workers' envs."""
        except BaseException:
            self._kill("did not start")
            raise

    @property
    def pids(self) -> list[int]:
        """Of the workers' processes, on whichever machine."""
        return [worker.pid for worker in self._workers]

    def publish(self, weights: Weights, version: int) -> None:
        """What every worker takes, whole, when it begins its next batch."""
        self._host.publish(weights, version)

    def call(self, phase: str, commands: Sequence[Call | Seed]) -> list[Any]:
        """Give every worker its command; what came of them, by worker. Waits for rollouts that are under way."""
        with self._calling, self._in_whole(phase):
            self._check_alive(phase)
            for index, command in enumerate(commands):
                self._send(index, command, phase)
            return self._gather(phase, self._timeout_s)

    def request(self, index: int, command: Collect) -> None:
        """Ask a worker for a batch, without waiting for it."""
        self._check_alive(ROLLOUT)
        with self._in_whole(ROLLOUT):
            self._send(index, command, ROLLOUT)
        self._due[index] = time.monotonic() + self._timeout_s

    def next_batch(self) -> tuple[int, Batch]:
        """The batch that comes first of those that were asked for, and who it is from."""
        self._check_alive(ROLLOUT)
        with self._in_whole(ROLLOUT):
            index, batch = self._next(self._host.batches, self._due, ROLLOUT, self._timeout_s)
        del self._due[index]
        return index, batch

    def shutdown(self) -> None:
        """Let the workers close their envs; those that take too long are killed. May be called twice."""
        if self._ended:
            return
        self._ended = "was shut down"
        try:
            late = self._end(range(self.size), _SHUTDOWN_DEADLINE_S)
            # Those that record go on meanwhile, and have the rest of their time after that.
            late = [index for index in late if index not in self.recording]
        finally:
            self._kill(self._ended)
        if late:
            _log.warning("collector workers %s were busy for more than %g s and killed", late, _SHUTDOWN_DEADLINE_S)

    @contextmanager
    def _in_whole(self, phase: str) -> Iterator[None]:
        """Ctrl-C for instance leaves the workers in the middle of something, which nobody can go on from."""
        try:
            yield
        except BaseException:
            self._kill(f"was interrupted in {phase}")
            raise

    def _gather(self, phase: str, timeout_s: float) -> list[Any]:
        due = dict.fromkeys(range(self.size), time.monotonic() + timeout_s)
        results: dict[int, Any] = {}
        while due:
            index, result = self._next(self._host.replies, due, phase, timeout_s)
            results[index] = result
            del due[index]
        return [results[index] for index in range(self.size)]

    def _next(self, arrivals: Arrivals, due: Mapping[int, float], phase: str, timeout_s: float) -> tuple[int, Any]:
        """What the next of those workers returned that have something due."""
        while (late := self._late(arrivals, due)) == [] and not arrivals.here:
            self._wait(arrivals, due)
        if late:
            self._fail(self._lateness(late, phase, timeout_s), phase)
        index, outcome = arrivals.here.popleft()
        if not isinstance(outcome, Returned):
            self._fail(self._failure(index, outcome, phase), phase)
        return index, outcome.value

    def _late(self, arrivals: Arrivals, due: Mapping[int, float]) -> list[int]:
        """Workers whose deadline has passed, though nothing is here from them."""
        arrivals.take_in(0)
        now, came = time.monotonic(), {index for index, _ in arrivals.here}
        return [index for index in due if self._deadline(index, due) <= now and index not in came]

    def _wait(self, arrivals: Arrivals, due: Mapping[int, float]) -> None:
        """Wait for a moment until something arrives or is late."""
        next_deadline = min(self._deadline(index, due) for index in due)
        arrivals.take_in(min(_POLL_S, next_deadline - time.monotonic()))
        if not arrivals.here:
            # A process that a dead worker started may keep its connections open.
            for index in due:
                if self._workers[index].has_ended:
                    arrivals.here.append((index, Died()))

    def _deadline(self, index: int, due: Mapping[int, float]) -> float:
        return max(due[index], self._workers[index].excused_until)

    def _failure(self, index: int, outcome: Raised | Died, phase: str) -> LucidError:
        """The error to raise for a worker that did not return."""
        worker = self._workers[index]
        name = " ".join(filter(None, (f"worker {index} of {self.size}", worker.where())))
        if isinstance(outcome, Died):
            failure = WorkerError(f"{name} {worker.how_it_ended()} in {phase}; all workers were ended")
            failure.__cause__ = worker.cause_of_end
            return failure
        error = outcome.lucid_error
        if error is None:
            error = WorkerError(f"{name} failed in {phase}: {outcome.summary}; all workers were ended")
        else:
            error.add_note(f"raised by {name} in {phase}")
        error.__cause__ = RemoteTraceback(outcome.trace)
        return error

    def _lateness(self, late: Sequence[int], phase: str, timeout_s: float) -> WorkerError:
        names = f"worker{'s' if len(late) > 1 else ''} " + ", ".join(map(str, sorted(late)))
        setting = "start_timeout_s" if phase == START else "timeout_s"
        places = [f"worker {index} {place}" for index in sorted(late) if (place := self._workers[index].where())]
        return WorkerError(
            f"{names} of {self.size} did not finish {phase} within {timeout_s:g} s; all workers were ended. If it "
            f"needs longer, raise {setting}" + (f" ({'; '.join(places)})" if places else "")
        )

    def _fail(self, failure: LucidError, phase: str) -> NoReturn:
        self._check_alive(phase)  # another thread may have told the cause
        self._kill(f"failed in {phase}")
        raise failure

    def _send(self, index: int, command: Command, phase: str) -> None:
        try:
            self._workers[index].send(command)
        except BlockingIOError:
            self._fail(self._lateness([index], phase, self._timeout_s), phase)
        except OSError:
            self._fail(self._failure(index, Died(), phase), phase)

    def _check_alive(self, phase: str) -> None:
        if self._ended:
            raise WorkerError(f"{phase} cannot begin: the collector {self._ended}; make another one")

    def _kill(self, ended: str) -> None:
        self._ended = self._ended or ended
        try:
            if lost := self._end(sorted(self.recording), _TRACE_DEADLINE_S):
                _log.warning(
                    "collector workers %s were busy for more than %g s and killed; their traces are lost",
                    lost,
                    _TRACE_DEADLINE_S,
                )
        finally:
            self.recording.clear()
            for worker in self._workers:
                worker.kill()
            for worker in self._workers:
                worker.reap()
            self._host.close()

    def _end(self, indices: Sequence[int], timeout_s: float) -> list[int]:
        """Let workers end in order; those that have not by then."""
        for index in indices:
            self._workers[index].end()
        until = time.monotonic() + timeout_s
        return [index for index in indices if self._workers[index].join(max(0.0, until - time.monotonic())) is None]
