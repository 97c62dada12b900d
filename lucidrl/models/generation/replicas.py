"""Generators that do the same work side by side, each in a process of its own that can be replaced.

They do not know each other: one that dies or hangs takes nothing with it but what it was busy with.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lucidrl.distributed.place import Place
from lucidrl.distributed.worker_group import WorkerGroup
from lucidrl.errors import LostWorkerError, LucidError, WorkerError
from lucidrl.utils.watching import wait_watching

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Replica:
    """One of the generators, from its first process to its last.

    Args:
        number: among all of them.
        start_group: starts a process for it, in which `start` makes the generator.
    """

    group: WorkerGroup
    place: Place

    def __init__(self, number: int, start_group: Callable[[int], WorkerGroup]):
        self.number = number
        self.loss: LostWorkerError | None = None
        """How its process was lost, until it has another one."""
        self.version: int | None = None
        """Of the weights that were brought to its process; None if it has those that it was loaded with."""
        self._start_group = start_group

    def start_process(self) -> None:
        """Give it a process, which has no generator yet."""
        self.group = self._start_group(self.number)

    def start(self) -> None:
        """Let the process make the generator, with the weights that the policy's model is loaded with."""
        self.group.make_workers()
        self.place = self.run("report_place")
        self.loss = self.version = None

    def run(self, method: str, *args: Any) -> Any:
        """Call a method of the generator; raises as `WorkerGroup.run_all` does."""
        (answer,) = self.group.run_all(method, *args)
        return answer


class Replicas:
    """All generators of a policy; started at once.

    Args:
        size: how many there are.
        start_group: starts a process for that of a number, in which the generator is made later.
        max_restarts: how many times in a row lost ones are replaced.
    """

    def __init__(self, size: int, start_group: Callable[[int], WorkerGroup], max_restarts: int):
        self.all = [Replica(number, start_group) for number in range(size)]
        self.num_replaced = 0
        """Processes that took the place of a lost one."""
        self._max_restarts = max_restarts
        self._replaced_in_a_row = 0
        self._are_recording = False
        self._have_ended = False
        """By `kill`, also in the middle of calls, which are no losses then."""
        self._with_process: list[Replica] = []
        self._noting = threading.Lock()
        self._start(self.all)
        if lost := [replica.loss for replica in self.all if replica.loss is not None]:
            self.kill()
            raise lost[0]

    def each(
        self,
        work: Callable[[Replica], T],
        replicas: Sequence[Replica] | None = None,
        watch: Callable[[], None] | None = None,
    ) -> list[T]:
        """Do something with all replicas, or some, at the same time, each in a thread.

        Args:
            watch: see `wait_watching`.

        Returns:
            What came of it, without those that were lost in it; `Replica.loss` says which these are.

        Raises:
            Whatever else one of them raises, or `watch`, as soon as it does; all generators are ended then.
        """
        chosen = self.all if replicas is None else replicas
        lost = object()

        def attempt(replica: Replica) -> Any:
            try:
                return work(replica)
            except LostWorkerError as loss:
                if not self._have_ended:
                    self._note(replica, loss)
                return lost

        try:
            if len(chosen) == 1 and watch is None:
                outcomes = [attempt(chosen[0])]
            else:
                outcomes = self._in_threads(attempt, chosen, watch or (lambda: None))
        except BaseException:
            self.kill()
            raise
        return [outcome for outcome in outcomes if outcome is not lost]

    def replace_lost(self) -> None:
        """Start another process for each replica that was lost.

        Raises:
            WorkerError: if that has been done `max_restarts` times since `went_well`, with the last loss as its cause.
        """
        while lost := [replica for replica in self.all if replica.loss is not None]:
            loss = lost[-1].loss
            if self._replaced_in_a_row == self._max_restarts:
                raise WorkerError(
                    f"a generator was lost again after {self._max_restarts} restarts without a whole batch of answers, "
                    f"and policy.generation.max_restarts={self._max_restarts} allows no more: {loss}"
                ) from loss
            self._replaced_in_a_row += 1
            self.num_replaced += len(lost)
            numbers = ", ".join(str(replica.number) for replica in lost)
            _log.warning(
                "replacing generator %s: restart %d of at most %d in a row",
                numbers,
                self._replaced_in_a_row,
                self._max_restarts,
            )
            try:
                self._start(lost)
            except LucidError as error:
                error.add_note(f"this was in place of generator {numbers}, which was lost: {loss}")
                raise

    def went_well(self) -> None:
        """A whole call was answered: losses from now on are others than those before."""
        self._replaced_in_a_row = 0

    def start_gpu_profiling(self) -> None:
        """Let those record that are asked to, and those that take their place."""
        self._are_recording = True
        self.each(lambda replica: replica.group.start_gpu_profiling())

    def stop_gpu_profiling(self) -> None:
        """Let them write what they recorded; harmless if they did not."""
        self._are_recording = False
        self.each(lambda replica: replica.group.stop_gpu_profiling())

    def shutdown(self) -> None:
        """End all generators in order; may be called twice."""
        self.each(lambda replica: replica.group.shutdown(), self._with_process)

    def kill(self) -> None:
        """End them in the middle of whatever they do, the start included; may be called twice."""
        self._have_ended = True
        for replica in self._with_process:
            replica.group.kill()

    def _start(self, replicas: Sequence[Replica]) -> None:
        def start_process(replica: Replica) -> Replica:
            replica.start_process()
            if replica not in self._with_process:
                self._with_process.append(replica)
            return replica

        def start(replica: Replica) -> None:
            replica.start()
            if self._are_recording:
                replica.group.start_gpu_profiling()

        # Processes are started in this thread, where Ctrl-C can end that; `kill` finds all of them in what takes long.
        begun = [begun for replica in replicas for begun in self.each(start_process, [replica])]
        self.each(start, begun)

    def _note(self, replica: Replica, loss: LostWorkerError) -> None:
        with self._noting:
            told = {other.loss.node for other in self.all if other.loss is not None}
            replica.loss = loss
        if loss.node is None or loss.node not in told:  # a lost node is told of once
            _log.warning("a generator was lost: %s", loss)

    def _in_threads(
        self, attempt: Callable[[Replica], Any], chosen: Sequence[Replica], watch: Callable[[], None]
    ) -> list[Any]:
        with ThreadPoolExecutor(max(1, len(chosen)), thread_name_prefix="generator") as threads:
            futures = [threads.submit(attempt, replica) for replica in chosen]
            try:
                wait_watching(futures, watch, until_one_raises=True)
                for future in futures:
                    if future.done():
                        future.result()  # the error, if this is the one that has it
                return [future.result() for future in futures]
            except BaseException:  # Ctrl-C too: the calls that other threads wait for must end before these can
                self.kill()
                raise
