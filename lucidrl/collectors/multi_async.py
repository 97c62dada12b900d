"""MultiAsyncCollector: workers collect whole batches on their own, and never wait for each other."""

from __future__ import annotations

from lucidrl.collectors.batch_orders import AsyncOrder
from lucidrl.collectors.multi import MultiCollector


class MultiAsyncCollector(MultiCollector):
    """Each batch is one worker's, of whichever has one first.

    All workers are always busy with their next batch, also while the consumer works on one. So the weights that made a
    batch may be older than the newest; ("collector", "policy_version") says which they were.

        collector = MultiAsyncCollector([make_env] * 4, policy, frames_per_batch=1000, total_frames=1_000_000)
        for batch in collector:
            train(batch)
            collector.update_policy_weights_()
        collector.shutdown()

    See `MultiCollector` for the arguments.
    """

    _order_class = AsyncOrder
