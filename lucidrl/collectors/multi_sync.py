"""MultiSyncCollector: all workers collect their share of each batch at the same time."""

from __future__ import annotations

from tensordict import TensorDictBase

from lucidrl.collectors.batch_orders import SyncOrder
from lucidrl.collectors.multi import MultiCollector


class MultiSyncCollector(MultiCollector):
    """Each batch is what all workers collect at the same time, one after the other along its first dim.

    For single envs that is time, and their shares of `frames_per_batch` differ by one frame at most; for batches of
    envs it is the first of their batch dims, and all take the same number of steps.

        collector = MultiSyncCollector([make_env] * 4, policy, frames_per_batch=4000, total_frames=1_000_000)
        for batch in collector:
            train(batch)
            collector.update_policy_weights_()
        collector.shutdown()

    See `MultiCollector` for the arguments.
    """

    _order_class = SyncOrder
    _order: SyncOrder

    def rollout(self, num_frames: int | None = None) -> TensorDictBase:
        """A batch of `num_frames`, by default `frames_per_batch`, as it was collected."""
        batch = self._order.rollout(self._num_or_default(num_frames), self.num_frames)
        self.num_frames += batch.numel()
        return batch
