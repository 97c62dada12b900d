"""MultiAsyncCollector: workers collect whole batches on their own, and never wait for each other."""

from __future__ import annotations

import math

from tensordict import TensorDictBase

from lucidrl.collectors.multi import MultiCollector
from lucidrl.envs.tensordicts import tensordict_of


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

    def _next_batch(self) -> TensorDictBase | None:
        for index in range(self.num_workers):
            if index not in self._under_way:
                self._ask(index)
        if not self._under_way:
            return None
        index, batch = self._next_under_way()
        self.num_frames += math.prod(batch.batch_size)
        self._ask(index)
        return tensordict_of(batch.entries, batch.batch_size, self._storing_device)

    def _most_frames_of_a_worker(self) -> int:
        return self.frames_per_batch

    def _num_envs_that_step_together(self) -> int:
        return math.prod(self._env_batch_size)

    def _ask(self, index: int) -> None:
        """Ask a worker for its next batch, as long as frames are wanted beyond those that are under way."""
        num_before = self.num_frames + sum(self._under_way.values())
        if num_wanted := self._num_wanted(num_before):
            num_steps = math.ceil(num_wanted / math.prod(self._env_batch_size))
            self._request(index, num_steps * math.prod(self._env_batch_size), num_before)
