"""The ranks of one machine as processes of this one: started, talked to, asked how they are, ended.

Nothing is decided here; what an answer, a death or a silence means is for the driver of all ranks to say.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from lucidrl.distributed.launchers.interfaces import RankLabel, RankReport
from lucidrl.distributed.launchers.messages import Message
from lucidrl.distributed.launchers.rank_environment import host_store
from lucidrl.distributed.launchers.rank_log import wait_for_growth
from lucidrl.distributed.launchers.rank_main import RankSettings
from lucidrl.distributed.launchers.rank_process import Died, RankProcess

_POLL_S = 0.2


class RankSet:
    """Started at once.

    Args:
        settings: of each rank.
        listener: where they meet, if this process is to host the store for that; it lives as long as they do.
    """

    def __init__(self, settings: Sequence[RankSettings], listener: socket.socket | None = None):
        self.labels = [
            RankLabel(one.rank, one.role, one.log_path, one.part, wrapper=next(iter(one.wrapper), ""))
            for one in settings
        ]
        self._ranks: dict[int, RankProcess] = {}
        self._answers: queue.SimpleQueue[tuple[int, Message | None]] = queue.SimpleQueue()
        self._waiting: set[int] = set()
        try:
            for one in settings:
                self._ranks[one.rank] = RankProcess(one)
            # After them: they import torch meanwhile, as this process may have to.
            self._store = host_store(listener) if listener is not None else None
        except BaseException:
            self.kill()
            raise

    def send(self, messages: Mapping[int, Message]) -> None:
        def exchange(number: int, message: Message) -> None:
            self._answers.put((number, self._ranks[number].exchange(message)))

        self._waiting = set(messages)
        # The threads only wait, for sockets that a stuck rank neither fills nor drains; `kill` ends them all.
        for number, message in messages.items():
            name = self._ranks[number].name
            threading.Thread(target=exchange, args=(number, message), name=name, daemon=True).start()

    def poll(self, timeout_s: float) -> list[tuple[int, Message | Died]]:
        until = time.monotonic() + timeout_s
        while True:
            remaining_s = max(0.0, until - time.monotonic())
            found: list[tuple[int, Message | None]]
            try:
                found = [self._answers.get(timeout=min(remaining_s, _POLL_S))]
            except queue.Empty:
                # A process that a dead rank started may keep its connection open.
                dead = [number for number in self._waiting if self._ranks[number].has_ended]
                found = [(number, None) for number in dead[:1]]
            if found or not remaining_s:
                break
        while not self._answers.empty():
            found.append(self._answers.get())
        self._waiting -= {number for number, _ in found}
        return [(number, message or Died(self._ranks[number].how_it_ended())) for number, message in found]

    def dead(self) -> dict[int, Died]:
        return {number: Died(rank.how_it_ended()) for number, rank in self._ranks.items() if rank.has_ended}

    def meet(self, pids: Sequence[int]) -> None:
        for rank, pid in zip(self._ranks.values(), pids, strict=True):
            rank.meet(pid)

    def report(self, numbers: Sequence[int], with_stacks: bool) -> dict[int, RankReport]:
        ranks = [self._ranks[number] for number in numbers]
        tails = [rank.log.tail() for rank in ranks]  # before the ranks write where they are
        if not (with_stacks and numbers):
            return {number: RankReport(tail) for number, tail in zip(numbers, tails, strict=True)}
        sizes = [(rank.log, rank.ask_for_stack()) for rank in ranks]
        wait_for_growth(sizes)
        stacks = [log.stack_from(size_bytes) for log, size_bytes in sizes]
        return {number: RankReport(*found) for number, *found in zip(numbers, tails, stacks, strict=True)}

    def let_end(self, timeout_s: float) -> dict[int, int | None]:
        for rank in self._ranks.values():
            rank.end()
        until = time.monotonic() + timeout_s
        return {number: rank.join(max(0.0, until - time.monotonic())) for number, rank in self._ranks.items()}

    def kill(self) -> None:
        for rank in self._ranks.values():
            rank.kill()
        for rank in self._ranks.values():
            rank.reap()
        self._store = None
