"""MultiSyncCollector: all workers collect their share of each batch at the same time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from tensordict import TensorDictBase

from lucidrl.collectors.multi import BatchOrder, MultiCollector
from lucidrl.collectors.worker import Batch
from lucidrl.collectors.workers import CollectorWorkers
from lucidrl.envs.creator import EnvFactory
from lucidrl.errors import ConfigError, DataError

CatResults = Literal["stack", 0, -1]
"""How the workers' shares of a batch are joined."""


class SyncOrder(BatchOrder):
    """All workers collect a share of each batch at the same time. See `MultiSyncCollector` for `cat_results`."""

    def __init__(self, cat_results: CatResults = "stack"):
        if cat_results not in ("stack", 0, -1):
            raise ConfigError(
                f"cat_results={cat_results!r} is not known; give 'stack' for a worker axis, 0 to join "
                "the workers' shares along the first dim, or -1 to join them along time"
            )
        self._cat_results = cat_results

    def frames_of_worker(self, frames_per_batch: int, num_workers: int) -> int:
        if frames_per_batch < num_workers:
            raise ConfigError(
                f"frames_per_batch={frames_per_batch} leaves some of {num_workers} workers without a frame; "
                "give at least one per worker"
            )
        return math.ceil(frames_per_batch / num_workers)

    def envs_per_step(self, workers: CollectorWorkers) -> int:
        env_batch_size = workers.specs[0].batch_size
        has_equal_shares = self._cat_results == "stack" or env_batch_size
        return workers.size * math.prod(env_batch_size) if has_equal_shares else 1

    def next_batch(self, workers: CollectorWorkers, num_frames: int, num_wanted: Callable[[int], int]) -> Batch | None:
        return self.rollout(workers, wanted, num_frames) if (wanted := num_wanted(num_frames)) else None

    def rollout(self, workers: CollectorWorkers, num_frames: int, num_frames_before: int) -> Batch:
        """A batch of `num_frames`."""
        shares = self._shares(workers, num_frames)
        for index, share in shares.items():
            workers.request(index, share, num_frames_before)
        batches = dict(workers.next_batch() for _ in shares)
        return self._joined([batches[index] for index in shares])

    def _shares(self, workers: CollectorWorkers, num_frames: int) -> dict[int, int]:
        """Frames of each worker, without those that have none."""
        num_frames = -(-num_frames // self.envs_per_step(workers)) * self.envs_per_step(workers)
        least, rest = divmod(num_frames, workers.size)
        shares = {index: least + (index < rest) for index in range(workers.size)}
        return {index: share for index, share in shares.items() if share}

    def _joined(self, batches: list[Batch]) -> Batch:
        for index, batch in enumerate(batches):
            if differing := batch.entries.keys() ^ batches[0].entries.keys():
                raise DataError(
                    f"the batches of workers 0 and {index} differ in {', '.join(map(str, differing))}; let policy and "
                    "hook return the same entries in every worker"
                )
        batch_size = list(batches[0].batch_size)
        if self._cat_results == "stack":
            join, batch_size = torch.stack, [len(batches), *batch_size]
        else:
            dim = self._cat_results % len(batch_size)
            if dim == len(batch_size) - 1:  # time
                for batch in batches:
                    _mark_end(batch)
            join, batch_size[dim] = partial(torch.cat, dim=dim), sum(batch.batch_size[dim] for batch in batches)
        entries = {key: join([batch.entries[key] for batch in batches]) for key in batches[0].entries}
        return Batch(entries, tuple(batch_size))


class MultiSyncCollector(MultiCollector):
    """Each batch has a share of every worker, collected at the same time with the same weights.

        collector = MultiSyncCollector([make_env] * 4, policy, frames_per_batch=4000, total_frames=1_000_000)
        for batch in collector:  # [4, 1000]
            train(batch)
            collector.update_policy_weights_()
        collector.shutdown()

    Args:
        cat_results: "stack" gives batches [workers, *env batch, time] with equally many frames per worker:
            `frames_per_batch` and `total_frames` are rounded up. 0 joins the workers' shares along the first dim, which
            is time for single envs; there, shares differ by one frame at most. -1 joins them along time. Joined along
            time, the last frame of each share is marked as truncated, so that advantages do not mix two workers; the
            trajectory continues in the next batch.
        create_env_fn, policy, arguments: as for `MultiCollector`.
    """

    _order: SyncOrder

    def __init__(
        self,
        create_env_fn: EnvFactory | Sequence[EnvFactory],
        policy: Any = None,
        *,
        cat_results: CatResults = "stack",
        **arguments: Any,
    ):
        super().__init__(create_env_fn, policy, SyncOrder(cat_results), **arguments)

    def rollout(self, num_frames: int | None = None) -> TensorDictBase:
        """A batch of `num_frames`, by default `frames_per_batch`, as collected."""
        return self._stored(self._order.rollout(self.workers, self._num_or_default(num_frames), self.num_frames))


def _mark_end(batch: Batch) -> None:
    """Mark the last frames as truncated unless done: the next frame is of another worker."""
    done, truncated = batch.entries["next", "done"], batch.entries["next", "truncated"]
    truncated[..., -1, :] |= ~done[..., -1, :]
    done[..., -1, :] = True
