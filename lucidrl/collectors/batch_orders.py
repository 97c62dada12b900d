"""Which workers a collector asks for the frames of its next batch, and when: the same wherever they run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from tensordict import TensorDictBase

from lucidrl.collectors.worker import Batch
from lucidrl.collectors.workers import CollectorWorkers
from lucidrl.envs.tensordicts import tensordict_of
from lucidrl.errors import ConfigError, DataError

CatResults = Literal["stack", 0, -1]
"""How the workers' shares of a batch are put together."""


class Requests:
    """Batches that workers were asked for and that were not taken yet."""

    def __init__(self, workers: CollectorWorkers):
        self.num_workers = workers.size
        self.env_batch_size = workers.specs[0].batch_size
        self._workers = workers
        self._num_frames: dict[int, int] = {}  # by worker

    def __contains__(self, index: int) -> bool:
        return index in self._num_frames

    @property
    def num_frames(self) -> int:
        """Of all together."""
        return sum(self._num_frames.values())

    def ask(self, index: int, num_frames: int, num_frames_before: int) -> None:
        """Ask a worker for a batch; `num_frames_before` it, the policy may have to act at random."""
        self._workers.request(index, num_frames, num_frames_before)
        self._num_frames[index] = num_frames

    def next(self) -> tuple[int, Batch]:
        """The batch that comes first of those that were asked for, and the worker it is from."""
        index, batch = self._workers.next_batch()
        del self._num_frames[index]
        return index, batch

    def drop(self) -> None:
        """Wait for all that is under way, and forget it."""
        while self._num_frames:
            self.next()


class BatchOrder(ABC):
    """Makes batches of what workers collect."""

    _requests: Requests
    _storing_device: torch.device | None

    def begin(self, requests: Requests, storing_device: torch.device | None) -> None:
        """Use workers that have started, and put batches on this device."""
        self._requests, self._storing_device = requests, storing_device

    @abstractmethod
    def frames_of_worker(self, frames_per_batch: int, num_workers: int) -> int:
        """Most frames of one worker in a batch; known before the workers start."""

    @property
    @abstractmethod
    def num_envs_that_step_together(self) -> int:
        """Batches have a multiple of so many frames."""

    @abstractmethod
    def next_batch(self, num_frames: int, num_wanted: Callable[[int], int]) -> TensorDictBase | None:
        """The next batch; None when there are no more.

        Args:
            num_frames: collected so far.
            num_wanted: how many the next batch is to have if so many were asked for before; 0 at the end.
        """


class SyncOrder(BatchOrder):
    """Each batch is what all workers collect at the same time.

    Args:
        cat_results: "stack" gives batches a worker axis, before all others; 0 joins the workers' shares along the
            first dim, -1 along time. Where they are joined along time, the last frame of each share is marked as
            truncated.
    """

    def __init__(self, cat_results: CatResults = "stack"):
        if cat_results not in ("stack", 0, -1):
            raise ConfigError(
                f"cat_results={cat_results!r} is not a way to put the workers' shares together; give 'stack' for a "
                "worker axis, 0 to join them along the first dim, or -1 to join them along time"
            )
        self._cat_results = cat_results

    def frames_of_worker(self, frames_per_batch: int, num_workers: int) -> int:
        if frames_per_batch < num_workers:
            raise ConfigError(
                f"frames_per_batch={frames_per_batch} leaves some of {num_workers} workers without a frame; "
                "give at least one for each"
            )
        return math.ceil(frames_per_batch / num_workers)

    @property
    def num_envs_that_step_together(self) -> int:
        return self._requests.num_workers * math.prod(self._requests.env_batch_size) if self._has_equal_shares else 1

    @property
    def _has_equal_shares(self) -> bool:
        return self._cat_results == "stack" or bool(self._requests.env_batch_size)

    def next_batch(self, num_frames: int, num_wanted: Callable[[int], int]) -> TensorDictBase | None:
        return self.rollout(wanted, num_frames) if (wanted := num_wanted(num_frames)) else None

    def rollout(self, num_frames: int, num_frames_before: int) -> TensorDictBase:
        """A batch of `num_frames`."""
        shares = self._shares(num_frames)
        for index, share in shares.items():
            self._requests.ask(index, share, num_frames_before)
        batches = dict(self._requests.next() for _ in shares)
        return self._joined([batches[index] for index in shares])

    def _shares(self, num_frames: int) -> dict[int, int]:
        """Frames by worker, for those that have any."""
        num_workers, env_batch_size = self._requests.num_workers, self._requests.env_batch_size
        if self._has_equal_shares:
            num_steps = math.ceil(num_frames / self.num_envs_that_step_together)
            return dict.fromkeys(range(num_workers), num_steps * math.prod(env_batch_size))
        least, rest = divmod(num_frames, num_workers)
        shares = {index: least + (index < rest) for index in range(num_workers)}
        return {index: share for index, share in shares.items() if share}

    def _joined(self, batches: list[Batch]) -> TensorDictBase:
        for index, batch in enumerate(batches):
            if differing := batch.entries.keys() ^ batches[0].entries.keys():
                raise DataError(
                    f"the batches of workers 0 and {index} differ in {', '.join(map(str, differing))}; let policy and "
                    "hook give the same entries in every worker"
                )
        num_dims = len(batches[0].batch_size)
        if self._cat_results == "stack":
            entries = {key: torch.stack([batch.entries[key] for batch in batches]) for key in batches[0].entries}
            return tensordict_of(entries, (len(batches), *batches[0].batch_size), self._storing_device)
        dim = self._cat_results % num_dims
        if dim == num_dims - 1:  # time
            for batch in batches:
                _mark_end(batch)
        entries = {key: torch.cat([batch.entries[key] for batch in batches], dim) for key in batches[0].entries}
        batch_size = list(batches[0].batch_size)
        batch_size[dim] = sum(batch.batch_size[dim] for batch in batches)
        return tensordict_of(entries, batch_size, self._storing_device)


class AsyncOrder(BatchOrder):
    """Each batch is one worker's, of whichever has one first; all are always busy with their next one."""

    def frames_of_worker(self, frames_per_batch: int, num_workers: int) -> int:
        return frames_per_batch

    @property
    def num_envs_that_step_together(self) -> int:
        return math.prod(self._requests.env_batch_size)

    def next_batch(self, num_frames: int, num_wanted: Callable[[int], int]) -> TensorDictBase | None:
        requests = self._requests
        for index in range(requests.num_workers):
            if index not in requests:
                self._ask(index, num_frames, num_wanted)
        if not requests.num_frames:
            return None
        index, batch = requests.next()
        self._ask(index, num_frames + math.prod(batch.batch_size), num_wanted)
        return tensordict_of(batch.entries, batch.batch_size, self._storing_device)

    def _ask(self, index: int, num_frames: int, num_wanted: Callable[[int], int]) -> None:
        """Ask a worker for its next batch, as long as frames are wanted beyond those that are under way."""
        num_before = num_frames + self._requests.num_frames
        if wanted := num_wanted(num_before):
            num_steps = math.ceil(wanted / self.num_envs_that_step_together)
            self._requests.ask(index, num_steps * self.num_envs_that_step_together, num_before)


def _mark_end(batch: Batch) -> None:
    """Mark the last frames as truncated, unless their episodes end there: the next frame is of another worker."""
    done, truncated = batch.entries["next", "done"], batch.entries["next", "truncated"]
    truncated[..., -1, :] |= ~done[..., -1, :]
    done[..., -1, :] = True
