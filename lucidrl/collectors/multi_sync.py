"""MultiSyncCollector: all workers collect their share of each batch at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase

from lucidrl.collectors.batch_orders import CatResults, SyncOrder
from lucidrl.collectors.multi import MultiCollector
from lucidrl.envs.creator import EnvFactory


class MultiSyncCollector(MultiCollector):
    """Each batch is what all workers collect at the same time, with the same weights.

        collector = MultiSyncCollector([make_env] * 4, policy, frames_per_batch=4000, total_frames=1_000_000)
        for batch in collector:  # [4, 1000]
            train(batch)
            collector.update_policy_weights_()
        collector.shutdown()

    Args:
        create_env_fn, policy: as for `MultiCollector`.
        cat_results: "stack" gives batches [workers, *batch of the env, time], with equally many frames of each worker:
            `frames_per_batch` and `total_frames` are rounded up to a multiple of the workers. 0 joins the workers'
            shares along the first dim: the first batch dim of the env or, for single envs, time, where shares differ by
            one frame at most. -1 joins them along time. Where they are joined along time, the last frame of each share
            is marked as truncated, so that nothing that looks ahead in time, such as advantages, mixes two workers; the
            trajectory goes on in the next batch.
        arguments: as for `MultiCollector`.
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
        """A batch of `num_frames`, by default `frames_per_batch`, as it was collected."""
        batch = self._order.rollout(self._num_or_default(num_frames), self.num_frames)
        self.num_frames += batch.numel()
        return batch
