"""How a policy's weights get to its generators: through shared memory to those beside it, by broadcast to the others.

A generator that is lost on the way is left out. What the policy cannot send because of that does not end it: its
workers return the problem, as generators do, and the weights can be brought again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lucidrl.distributed.weight_buckets import TensorInfo, fitting_bucket_bytes, plan_buckets
from lucidrl.distributed.weight_group import TIMEOUT_S
from lucidrl.distributed.workers.place import LOOPBACK, Place
from lucidrl.distributed.workers.pool import PoolWorker, WorkerPool
from lucidrl.errors import ConfigError, LucidError, RefitError
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.policy.policy import Policy

_BYTES_PER_MB = 1 << 20
_LOSS_S = 5.0
"""How much longer than a generator the policy may take: if it still waits for one that hangs, that is to be lost, and
not the policy."""


@dataclass
class GeneratorState:
    """What the driver knows of the process of a generator."""

    place: Place
    version: int | None = None
    """Of the weights that a refit brought to it; None if it has those that it was loaded with."""


class WeightDelivery:
    """From the workers of a policy to its generators.

    Args:
        states: of the generators, by number.
        timeout_s: timeout of a call of a generator.
    """

    def __init__(
        self,
        policy: Policy,
        pool: WorkerPool,
        states: Mapping[int, GeneratorState],
        config: GenerationConfig,
        timeout_s: float,
    ):
        self._policy, self._places = policy.group, policy.places
        self._pool, self._states, self._config = pool, states, config
        self._timeout_s = timeout_s + _LOSS_S
        # Generators and policy give up waiting for one that hangs or is gone before they are themselves too late.
        self._patience_s = min(TIMEOUT_S, timeout_s / 2)
        self._members: list[tuple[int, int]] = []
        """Processes of generators that joined the policy's refit group: number of the generator and of its start."""

    def check_devices(self) -> None:
        """Refuse generators that are not where the configured way ends.

        Raises:
            ConfigError: if weights are to be shared, with a device that the policy does not have.
        """
        devices = [place.device for place in self._places]
        others = [(number, state.place.device) for number, state in self._states.items()]
        others = [(number, device) for number, device in others if device not in devices]
        if self._config.refit == "ipc" and others:
            number, device = others[0]
            raise ConfigError(
                f"policy.generation.refit=ipc shares the memory of a device, but generator {number} is on {device} and "
                f"the policy on {', '.join(devices)}; set refit=auto"
            )

    def bring(self, version: int, receivers: Sequence[PoolWorker]) -> list[PoolWorker]:
        """Bring the policy's current weights to some generators, which compute with them from now on.

        Returns:
            Those that have them. If it is not all, at least one was lost.

        Raises:
            RefitError: if they do not get there though nobody was lost.
            WorkerError: if a worker of the policy dies. Generators that live have a whole version in any case.
        """
        self._policy.run_all("export.set_header", version, self._config.verify_refit)
        near = [worker for worker in receivers if self.is_near(worker)]
        far = [worker for worker in receivers if worker not in near]
        ready = [*self._by_ipc(version, near), *self._by_collective(far)]

        def commit(worker: PoolWorker) -> None:
            worker.run("commit_refit", version)
            self._states[worker.number].version = version

        self._pool.each(commit, ready)
        return _kept(ready)

    def is_near(self, worker: PoolWorker) -> bool:
        """Whether weights reach it through shared memory."""
        if self._config.refit == "auto":
            return sys.platform == "linux" and self._place_of(worker).device in [place.device for place in self._places]
        return self._config.refit == "ipc"

    def _place_of(self, worker: PoolWorker) -> Place:
        return self._states[worker.number].place

    def _by_ipc(self, version: int, receivers: Sequence[PoolWorker]) -> list[PoolWorker]:
        """The policy packs a bucket while the generators take the one before; who has all of them.

        On a GPU it packs into two pieces of memory in turn. So before it is asked for the next bucket but one, the
        generators must have said that they are done with this one.
        """
        free_bytes = self._pool.each(lambda worker: worker.run("begin_refit", version), receivers)
        if not free_bytes:
            return []
        prepared = self._policy.run_all("prepare_weights_for_ipc")
        buckets = buckets_of_names(prepared[0][0], self._config, min(*free_bytes, *(free for _, free in prepared)))
        taken: Future[None] | None = None
        with self._beside() as generators:
            for names in buckets:
                parts = self._policy.run_all("get_weights_ipc_handles", names)
                if taken is not None:
                    taken.result()
                handles = {device: handle for part in parts for device, handle in part.items()}
                taken = generators.submit(self._take, receivers, handles)
            if taken is not None:
                taken.result()
        return _kept(receivers)

    def _take(self, receivers: Sequence[PoolWorker], handles: dict[str, Any]) -> None:
        problems = self._pool.each(lambda worker: worker.run("take_weights", handles), _kept(receivers))
        if found := _first(problems):
            raise RefitError(found)

    def _by_collective(self, receivers: Sequence[PoolWorker]) -> list[PoolWorker]:
        """The generators receive while the policy sends; who has it all. They meet before, unless they have."""
        if not receivers or (_processes(receivers) != self._members and not self._meet(receivers)):
            return []
        is_done = self._at_once(
            lambda: self._pool.each(lambda worker: worker.run("receive_weights"), receivers),
            lambda: self._policy.run_all("export.try_broadcast", timeout_s=self._timeout_s),
            receivers,
        )
        return list(receivers) if is_done else []

    def _meet(self, receivers: Sequence[PoolWorker]) -> bool:
        """Form the group of these; whether it could be done."""
        forms = self._policy.run_all("prepare_info_for_collective")[0]
        self._pool.each(lambda worker: worker.run("prepare_collective", forms), receivers)
        if len(_kept(receivers)) < len(receivers):  # the others would wait for those until the deadline
            return False
        host = self._places[0]
        ip = LOOPBACK if all(self._place_of(worker).node == host.node for worker in receivers) else host.ip
        port, world_size = self._policy.run_all("export.offer_port", ip)[0], 1 + len(receivers)
        ranks = {worker.number: rank for rank, worker in enumerate(receivers, start=1)}

        def join(worker: PoolWorker) -> str | None:
            return worker.run("join_collective", ip, port, ranks[worker.number], world_size, self._patience_s)

        def meet() -> list[str | None]:
            told = (ip, port, world_size, self._patience_s)
            return self._policy.run_all("export.try_join", *told, timeout_s=self._timeout_s)

        have_met = self._at_once(lambda: self._pool.each(join, receivers), meet, receivers)
        self._members = _processes(receivers) if have_met else []
        return have_met

    def _at_once(
        self,
        of_generators: Callable[[], list[str | None]],
        of_policy: Callable[[], list[str | None]],
        receivers: Sequence[PoolWorker],
    ) -> bool:
        """Make both calls, which return problems, at the same time; whether there were none.

        If not, the group is of no use any more.

        Raises:
            RefitError: with the problems, if no receiver was lost. One may be the cause of another: all are told.
        """
        with self._beside() as executor:
            answer = executor.submit(of_generators)
            try:
                of_sender = _first(of_policy())
            except LucidError as error:
                failure = answer.exception() or _first(answer.result())
                if failure is not None:
                    error.add_note(f"meanwhile in the generators: {failure}")
                raise
            of_receivers = _first(answer.result())
        are_all_here = len(_kept(receivers)) == len(receivers)
        if of_sender is None and of_receivers is None and are_all_here:
            return True
        self._members = []
        if are_all_here:
            told = [f"the policy says: {of_sender}"] if of_sender is not None else []
            told += [f"a generator says: {of_receivers}"] if of_receivers is not None else []
            raise RefitError("; ".join(told))
        return False

    @contextmanager
    def _beside(self) -> Iterator[ThreadPoolExecutor]:
        """A thread for calls of the generators, left when these have ended; Ctrl-C ends them with their generators."""
        with ThreadPoolExecutor(1, thread_name_prefix="refit") as executor:
            try:
                yield executor
            except KeyboardInterrupt:
                self._pool.kill()
                raise


def buckets_of_names(sizes: Sequence[tuple[str, int]], config: GenerationConfig, free_bytes: float) -> list[list[str]]:
    """Names that travel together, in order: as many as the config and half the free memory allow, but at least one.

    Raises:
        RefitError: if the largest weight alone does not fit twice.
    """
    infos = [TensorInfo(name, (size_bytes,), torch.uint8) for name, size_bytes in sizes]
    bucket_bytes = fitting_bucket_bytes(infos, config.refit_bucket_mb * _BYTES_PER_MB, free_bytes)
    return [[info.name for info in bucket.tensors] for bucket in plan_buckets(infos, bucket_bytes)]


def _kept(workers: Sequence[PoolWorker]) -> list[PoolWorker]:
    """Those that were not lost."""
    return [worker for worker in workers if worker.loss is None]


def _processes(workers: Sequence[PoolWorker]) -> list[tuple[int, int]]:
    return [(worker.number, worker.num_starts) for worker in workers]


def _first(problems: Sequence[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)
