"""MultiAsyncCollector: workers collect whole batches on their own, and never wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lucidrl.collectors.batch_orders import AsyncOrder
from lucidrl.collectors.multi import MultiCollector
from lucidrl.envs.creator import EnvFactory


class MultiAsyncCollector(MultiCollector):
    """Each batch is one worker's, of whichever has one first.

    All workers are always busy with their next batch, even while the consumer works on one. So the weights that made a
    batch may be older than the newest; ("collector", "policy_version") says which they were.

        collector = MultiAsyncCollector([make_env] * 4, policy, frames_per_batch=1000, total_frames=1_000_000)
        for batch in collector:
            train(batch)
            collector.update_policy_weights_()
        collector.shutdown()

    See `MultiCollector` for the arguments.
    """

    def __init__(self, create_env_fn: EnvFactory | Sequence[EnvFactory], policy: Any = None, **arguments: Any):
        super().__init__(create_env_fn, policy, AsyncOrder(), **arguments)
