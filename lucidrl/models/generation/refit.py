"""Refit: copy a policy's weights to its generators, through shared memory on the same device, else by broadcast.

A refit continues without generators that are lost meanwhile. If a transfer fails, policy and generators return the
problem as text, because a raised error would end their processes; so the refit can be repeated.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from lucidrl.distributed.weight_buckets import TensorInfo, fitting_bucket_bytes, plan_buckets
from lucidrl.distributed.weight_group import TIMEOUT_S
from lucidrl.distributed.workers.place import LOOPBACK, Place
from lucidrl.distributed.workers.pool import PoolWorker, WorkerPool
from lucidrl.errors import ConfigError, LostWorkerError, LucidError, RefitError
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.refit_guard import RefitGuard
from lucidrl.models.policy.policy import Policy

_BYTES_PER_MB, _BYTES_PER_GB = 1 << 20, 10**9
_POLICY_GRACE_S = 5.0
"""Added to the policy's timeout: if the policy waits for a generator that hangs, the generator times out first."""


@dataclass
class GeneratorState:
    """The driver's record of a generator process."""

    places: Sequence[Place]
    """Of each of its ranks; all are on one node."""
    version: int | None = None
    """Version of the last refit; None before the first refit."""


class Refit:
    """Copies weights from the ranks of a policy to generators.

    Args:
        states: states of the generators, by number.
        timeout_s: timeout of a generator's call.
        guard: compares the generators with the policy after the refit.
    """

    def __init__(
        self,
        policy: Policy,
        pool: WorkerPool,
        states: Mapping[int, GeneratorState],
        config: GenerationConfig,
        timeout_s: float,
        guard: RefitGuard,
    ):
        self._policy, self._places = policy.group, policy.places
        self._pool, self._states, self._config, self._guard = pool, states, config, guard
        self._policy_timeout_s = timeout_s + _POLICY_GRACE_S
        # If one member of the group hangs, the others stop waiting before their own calls time out.
        self._group_timeout_s = min(TIMEOUT_S, timeout_s / 2)
        self.gb_per_s: float | None = None
        """Size of the weights / duration of the last refit without the guard; None before the first refit."""
        self._size_bytes = 0
        self._members: list[tuple[int, int]] = []
        """Generators in the policy's weight group: (number, number of starts)."""

    def run(self, version: int, receivers: Sequence[PoolWorker]) -> list[PoolWorker]:
        """Copy the policy's current weights to the receivers, which use them from their next call on.

        Returns:
            Receivers without the new weights. If there are any, at least one of them was lost.

        Raises:
            RefitError: a transfer failed although no generator was lost, or the guard found a gross mismatch.
            WorkerError: a rank of the policy exited. Each running generator still has complete weights of one version.
        """
        started = time.perf_counter()
        self._policy.run_all("export.set_header", version, self._config.verify_refit)
        near = [worker for worker in receivers if self.shares_memory(worker)]
        far = [worker for worker in receivers if worker not in near]
        try:
            ready = [*self._by_ipc(version, near), *self._by_collective(far)]
        except LucidError:
            raise
        except BaseException:  # such as Ctrl-C: end the running calls
            self._pool.kill()
            raise

        def commit(worker: PoolWorker) -> None:
            worker.run("commit_refit", version)
            self._states[worker.number].version = version

        self._pool.each(commit, ready)
        if ready:
            self.gb_per_s = self._size_bytes / _BYTES_PER_GB / (time.perf_counter() - started)
        self._guard.check(version, _alive(ready))
        done = _alive(ready)
        return [worker for worker in receivers if worker not in done]

    def shares_memory(self, worker: PoolWorker) -> bool:
        """Return whether a generator gets the weights through shared memory."""
        if self._config.refit == "auto":
            of_policy = {place.device for place in self._places}
            return sys.platform == "linux" and of_policy.issuperset(self._devices(worker))
        return self._config.refit == "ipc"

    def _devices(self, worker: PoolWorker) -> list[str]:
        return [place.device for place in self._states[worker.number].places]

    def _by_ipc(self, version: int, receivers: Sequence[PoolWorker]) -> list[PoolWorker]:
        """Let generators read a bucket while the policy packs the next; return the generators that have all buckets.

        On a GPU the policy alternates between two buffers: it packs a bucket only after all generators have read the
        bucket before the previous one.
        """
        free_bytes = self._pool.each(lambda worker: worker.run("begin_refit", version), receivers)
        if not free_bytes:
            return []
        prepared = self._policy.run_all("prepare_weights_for_ipc")
        self._size_bytes = sum(size_bytes for _, size_bytes in prepared[0][0])
        buckets = buckets_of_names(prepared[0][0], self._config, min(*free_bytes, *(free for _, free in prepared)))
        calls: list[Future[str | None]] = []
        for names in buckets:
            parts = self._policy.run_all("get_weights_ipc_handles", names)
            self._check(calls)
            handles = {device: handle for part in parts for device, handle in part.items()}
            calls = [self._pool.submit(worker.number, "take_weights", handles) for worker in _alive(receivers)]
        self._check(calls)
        return _alive(receivers)

    def _by_collective(self, receivers: Sequence[PoolWorker]) -> list[PoolWorker]:
        """Broadcast the weights, in a new group if the receivers changed; return the receivers with all weights."""
        if not receivers or (_processes(receivers) != self._members and not self._form_group(receivers)):
            return []
        calls = [self._pool.submit(worker.number, "receive_weights") for worker in receivers]
        return list(receivers) if self._succeeds(receivers, calls, "export.try_broadcast") else []

    def _form_group(self, receivers: Sequence[PoolWorker]) -> bool:
        """Connect the policy and all receivers; False if a receiver was lost."""
        forms = self._policy.run_all("prepare_info_for_collective")[0]
        self._size_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in forms.values())
        self._pool.each(lambda worker: worker.run("prepare_collective", forms), receivers)
        if len(_alive(receivers)) < len(receivers):  # the others would wait for the lost one until their timeout
            return False
        host = self._places[0]
        places = [self._states[worker.number].places for worker in receivers]
        ip = LOOPBACK if all(ranks[0].node == host.node for ranks in places) else host.ip
        *first_ranks, world_size = accumulate(map(len, places), initial=1)
        port = self._policy.run_all("export.offer_port", ip)[0]
        calls = [
            self._pool.submit(worker.number, "join_collective", ip, port, rank, world_size, self._group_timeout_s)
            for rank, worker in zip(first_ranks, receivers, strict=True)
        ]
        is_formed = self._succeeds(receivers, calls, "export.try_join", ip, port, world_size, self._group_timeout_s)
        self._members = _processes(receivers) if is_formed else []
        return is_formed

    def _succeeds(
        self, receivers: Sequence[PoolWorker], calls: Sequence[Future[str | None]], method: str, *args: Any
    ) -> bool:
        """Call `method` of the policy while `calls` of the receivers run; return False if a receiver was lost.

        Raises:
            RefitError: the policy or a receiver reports a problem, and no receiver was lost; names all problems.
        """
        try:
            of_policy = next(filter(None, self._policy.run_all(method, *args, timeout_s=self._policy_timeout_s)), None)
        except LucidError as error:
            try:
                problem = self._problem(calls)
            except LucidError as failure:
                problem = str(failure)
            if problem:
                error.add_note(f"a generator reported meanwhile: {problem}")
            raise
        of_generators = self._problem(calls)
        are_all_alive = len(_alive(receivers)) == len(receivers)
        if of_policy is None and of_generators is None and are_all_alive:
            return True
        self._members = []
        if are_all_alive:
            sides = {"the policy": of_policy, "a generator": of_generators}
            raise RefitError("; ".join(f"{side} reports: {problem}" for side, problem in sides.items() if problem))
        return False

    def _problem(self, calls: Iterable[Future[str | None]]) -> str | None:
        """Wait for all calls of generators; return a problem, if any. Calls of lost generators are skipped.

        Raises:
            LucidError: a generator raised; all generators are killed.
        """
        problem = None
        for call in as_completed(calls):
            error = call.exception()
            if error is None:
                problem = call.result() or problem
            elif not isinstance(error, LostWorkerError):
                self._pool.kill()
                raise error
        return problem

    def _check(self, calls: Iterable[Future[str | None]]) -> None:
        if problem := self._problem(calls):
            raise RefitError(problem)


def check_device(config: GenerationConfig, number: int, device: str, policy_places: Sequence[Place]) -> None:
    """Refuse `refit=ipc` for a generator on a device that the policy does not use."""
    devices = [place.device for place in policy_places]
    if config.refit == "ipc" and device not in devices:
        raise ConfigError(
            f"policy.generation.refit=ipc shares the memory of a device, but generator {number} is on {device} and the "
            f"policy on {', '.join(devices)}; set policy.generation.refit=auto"
        )


def buckets_of_names(sizes: Sequence[tuple[str, int]], config: GenerationConfig, free_bytes: float) -> list[list[str]]:
    """Group the names of weights, in order, into buckets of at least one weight, so that two buckets fit into memory.

    Raises:
        RefitError: the largest weight does not fit into memory twice.
    """
    infos = [TensorInfo(name, (size_bytes,), torch.uint8) for name, size_bytes in sizes]
    bucket_bytes = fitting_bucket_bytes(infos, config.refit_bucket_mb * _BYTES_PER_MB, free_bytes)
    return [[info.name for info in bucket.tensors] for bucket in plan_buckets(infos, bucket_bytes)]


def _alive(workers: Sequence[PoolWorker]) -> list[PoolWorker]:
    return [worker for worker in workers if worker.loss is None]


def _processes(workers: Sequence[PoolWorker]) -> list[tuple[int, int]]:
    return [(worker.number, worker.num_starts) for worker in workers]
