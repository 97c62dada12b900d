"""Errors that all ranks raise alike, so that none waits for another that has given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.distributed import ProcessGroup

from lucidrl.distributed.collectives import gather_over
from lucidrl.errors import LucidError

T = TypeVar("T")


def agreed(work: Callable[[], T], group: ProcessGroup | None) -> T:
    """What `work` returns on this rank; if it fails on any, every rank raises the error of the first that failed.

    To be called on all ranks of the group; `work` must not talk to other ranks.
    """
    result: list[T] = []
    error: Exception | None = None
    try:
        result.append(work())
    except (LucidError, OSError, ValueError) as caught:
        error = caught
    for other in gather_over(error, group):
        if other is not None:
            raise other
    return result[0]
