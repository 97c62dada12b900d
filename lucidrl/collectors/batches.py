"""Batches that workers send to the driver, and how it joins them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from lucidrl.envs.arrays import Key
from lucidrl.errors import DataError

CatResults = Literal["stack", 0, -1]
"""How the workers' shares of a batch are joined; see `MultiSyncCollector`."""


@dataclass(frozen=True)
class Batch:
    """A batch in host memory."""

    entries: dict[Key, torch.Tensor]
    batch_size: tuple[int, ...]

    @property
    def num_frames(self) -> int:
        return math.prod(self.batch_size)


def joined(batches: Sequence[Batch], cat_results: CatResults) -> Batch:
    """One batch of the shares of all workers."""
    for index, batch in enumerate(batches):
        if differing := batch.entries.keys() ^ batches[0].entries.keys():
            raise DataError(
                f"the batches of workers 0 and {index} differ in {', '.join(map(str, differing))}; let policy and hook "
                "return the same entries in every worker"
            )
    batch_size = list(batches[0].batch_size)
    if cat_results == "stack":
        join, batch_size = torch.stack, [len(batches), *batch_size]
    else:
        dim = cat_results % len(batch_size)
        if dim == len(batch_size) - 1:  # time
            for batch in batches:
                _mark_end(batch)
        join, batch_size[dim] = partial(torch.cat, dim=dim), sum(batch.batch_size[dim] for batch in batches)
    entries = {key: join([batch.entries[key] for batch in batches]) for key in batches[0].entries}
    return Batch(entries, tuple(batch_size))


def _mark_end(batch: Batch) -> None:
    """Mark the last frames as truncated unless done: the next frame is of another worker."""
    done, truncated = batch.entries["next", "done"], batch.entries["next", "truncated"]
    truncated[..., -1, :] |= ~done[..., -1, :]
    done[..., -1, :] = True
