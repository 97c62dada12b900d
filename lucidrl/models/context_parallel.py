"""Context parallelism: ranks split the tokens of every row and exchange keys and values in attention only.

Each rank runs the whole model on two chunks of each row. One collective per layer gathers the keys and values of all
ranks, and each rank sorts them by position. A chunk attends only to keys up to its own last position.

Shapes: B rows, T tokens of a row, N ranks, C = T / 2N tokens of a chunk, Hq/Hkv query/key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from lucidrl.distributed.process_group import sum_over
from lucidrl.errors import ConfigError, DataError
from lucidrl.models.attention import AttentionCall, attend_from_end
from lucidrl.profiling.spans import span
from lucidrl.profiling.worker_times import COMMUNICATION

ROTATE_METHODS = (None, "allgather")


class ContextParallel:
    """How rows are split over the ranks of `group`.

    A row is cut into 2N equal chunks. Rank r holds chunks r and 2N - 1 - r, so that all ranks have the same number of
    (query, key) pairs.
    """

    def __init__(self, group: ProcessGroup):
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    @property
    def multiple(self) -> int:
        """Rows must have a multiple of this many tokens."""
        return 2 * self.size

    @property
    def chunks(self) -> tuple[int, int]:
        """Indices of this rank's two chunks, the earlier chunk of the row first."""
        return self.rank, self.multiple - 1 - self.rank

    def positions(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """[T / N] positions of this rank's tokens in rows of `length` tokens."""
        if length % self.multiple:
            raise DataError(
                f"rows of {length} tokens do not split evenly over {self.size} context-parallel ranks; "
                f"pad them to a multiple of {self.multiple}"
            )
        tokens = length // self.multiple
        first, second = (torch.arange(chunk * tokens, (chunk + 1) * tokens, device=device) for chunk in self.chunks)
        return torch.cat((first, second))

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Compute the attention of this rank's two chunks [B, H, 2C, D] to the whole rows; see `AttentionLayout`.

        Forward and backward pass call collectives: every rank must run both, even if the rank's tokens have no loss.
        """
        key, value = self._whole_rows(call.key, call.value)
        tokens = call.query.shape[2] // 2
        outputs = []
        for chunk, query in zip(self.chunks, call.query.chunk(2, dim=2), strict=True):
            end = (chunk + 1) * tokens
            outputs.append(attend_from_end(replace(call, query=query, key=key[:, :, :end], value=value[:, :, :end])))
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` over ranks; the backward pass returns the gradient unchanged to every rank.

        Each rank passes full rows with the values of the rank's tokens and 0 elsewhere, and computes the same loss from
        the sum. So each rank already has the complete gradient of its tokens; summing it over ranks would count it N
        times. Parameter gradients are summed over ranks later, as in data parallelism.
        """
        return _SumRanks.apply(values, self.group)

    def _whole_rows(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, Hkv, 2C, D] on this rank → [B, Hkv, T, D] of all ranks, in the order of the row."""
        gathered = _GatherRanks.apply(torch.cat((key, value), dim=-1), self.group)
        early, late = gathered.chunk(2, dim=3)
        both = torch.cat((*early.unbind(), *reversed(late.unbind())), dim=2)
        return both.split((key.shape[-1], value.shape[-1]), dim=-1)


class _GatherRanks(torch.autograd.Function):
    """Stacks the tensors `part` of all ranks; the gradient of each is summed over all ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = part.new_empty(group.size(), *part.shape)
        with span(COMMUNICATION):
            dist.all_gather(list(parts.unbind()), part.contiguous(), group=group)
        return parts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = torch.empty_like(grad[0])
        with span(COMMUNICATION):
            dist.reduce_scatter(total, list(grad.contiguous().unbind()), group=ctx.group)
        return total, None


class _SumRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        return sum_over(values, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


@contextmanager
def create_context_parallel_ctx(
    cp_mesh: DeviceMesh,
    cp_buffers: Sequence[torch.Tensor],
    cp_seq_dims: Sequence[int],
    cp_no_restore_buffers: Set[torch.Tensor],
    cp_rotate_method: str | None = None,
) -> Iterator[None]:
    """Context manager: inside it, each buffer holds only this rank's tokens, in the order of
    `ContextParallel.positions`.

    It is for custom training loops; policy workers split rows in `LogprobModel`. On exit, even after an exception, each
    buffer gets its original memory back, and writes to the shard are lost.

    Args:
        cp_mesh: the context-parallel axis of the mesh.
        cp_buffers: tensors with the tokens of whole rows; changed in place.
        cp_seq_dims: the token dim of each buffer.
        cp_no_restore_buffers: buffers that may keep the shard on exit.
        cp_rotate_method: how keys and values are exchanged; only "allgather" is supported.
    """
    if cp_rotate_method not in ROTATE_METHODS:
        raise ConfigError(f"cp_rotate_method={cp_rotate_method!r} is not supported; leave it out, or use 'allgather'")
    if len(cp_buffers) != len(cp_seq_dims):
        raise ConfigError(f"{len(cp_buffers)} cp_buffers have {len(cp_seq_dims)} cp_seq_dims; pass one per buffer")
    parallel = ContextParallel(cp_mesh.get_group())
    # Make all shards first: an invalid length must leave every buffer unchanged.
    shards = [
        buffer.detach().index_select(dim, parallel.positions(buffer.shape[dim], buffer.device))
        for buffer, dim in zip(cp_buffers, cp_seq_dims, strict=True)
    ]
    whole = [(buffer, buffer.detach()) for buffer in cp_buffers if buffer not in cp_no_restore_buffers]
    with torch.no_grad():
        for buffer, shard in zip(cp_buffers, shards, strict=True):
            buffer.set_(shard)  # type: ignore[call-overload]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, memory in whole:
                buffer.set_(memory)  # type: ignore[call-overload]


@contextmanager
def train_context(cp_context: AbstractContextManager[None] | None = None) -> Iterator[None]:
    """Enter the context-parallel context, if any, with attention kernels that support it.

    It is for custom training loops, like `create_context_parallel_ctx`. On CUDA, attention uses the flash or the
    memory-efficient kernel, and plain matrix products if neither supports a case, such as grouped heads in float32.
    """
    if cp_context is None:
        yield
        return
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with cp_context, sdpa_kernel(kernels, set_priority=True):
        yield
