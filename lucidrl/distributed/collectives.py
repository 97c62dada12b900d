"""Collectives over a process group; without a group there is a single rank and nothing to exchange."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

T = TypeVar("T")


def sum_over(values: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """The sum of `values` over all ranks, as a new tensor."""
    if group is None:
        return values
    total = values.clone()
    dist.all_reduce(total, group=group)
    return total


def largest_over(value: int, group: ProcessGroup | None) -> int:
    """The largest `value` of all ranks."""
    if group is None:
        return value
    largest = torch.tensor(value, device=_device(group))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return int(largest)


def gather_over(value: T, group: ProcessGroup | None) -> list[T]:
    """`value` of every rank, in rank order. For small objects: it is pickled."""
    if group is None:
        return [value]
    values: list[T | None] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value] # all are filled


def _device(group: ProcessGroup) -> torch.device:
    return torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
