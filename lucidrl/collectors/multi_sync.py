"""MultiSyncCollector: all workers collect their share of each batch at the same time."""

from __future__ import annotations

import math

import torch
from tensordict import TensorDictBase

from lucidrl.collectors.multi import MultiCollector
from lucidrl.collectors.worker_main import Batch
from lucidrl.envs.tensordicts import tensordict_of
from lucidrl.errors import ConfigError, DataError


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

    def rollout(self, num_frames: int | None = None) -> TensorDictBase:
        """A batch of `num_frames`, by default `frames_per_batch`, as it was collected."""
        shares = self._shares(self._num_or_default(num_frames))
        for index, share in shares.items():
            self._request(index, share, self.num_frames)
        batches = dict(self._next_under_way() for _ in shares)
        joined = self._joined([batches[index] for index in shares])
        self.num_frames += joined.numel()
        return joined

    def _most_frames_of_a_worker(self) -> int:
        if self.frames_per_batch < self.num_workers:
            raise ConfigError(
                f"frames_per_batch={self.frames_per_batch} leaves some of {self.num_workers} workers without a frame; "
                "give at least one for each"
            )
        return math.ceil(self.frames_per_batch / self.num_workers)

    def _num_envs_that_step_together(self) -> int:
        return self.num_workers * math.prod(self._env_batch_size) if self._env_batch_size else 1

    def _next_batch(self) -> TensorDictBase | None:
        num_frames = self._num_wanted(self.num_frames)
        return self.rollout(num_frames) if num_frames else None

    def _shares(self, num_frames: int) -> dict[int, int]:
        """Frames by worker, for those that have any."""
        if self._env_batch_size:
            num_steps = math.ceil(num_frames / self._num_envs_that_step_together())
            return dict.fromkeys(range(self.num_workers), num_steps * math.prod(self._env_batch_size))
        least, rest = divmod(num_frames, self.num_workers)
        shares = {index: least + (index < rest) for index in range(self.num_workers)}
        return {index: share for index, share in shares.items() if share}

    def _joined(self, batches: list[Batch]) -> TensorDictBase:
        for index, batch in enumerate(batches):
            if differing := batch.entries.keys() ^ batches[0].entries.keys():
                raise DataError(
                    f"the batches of workers 0 and {index} differ in {', '.join(map(str, differing))}; let policy and "
                    "hook give the same entries in every worker"
                )
        entries = {key: torch.cat([batch.entries[key] for batch in batches]) for key in batches[0].entries}
        _, *rest = batches[0].batch_size
        num_rows = sum(batch.batch_size[0] for batch in batches)
        return tensordict_of(entries, (num_rows, *rest), self._storing_device)
