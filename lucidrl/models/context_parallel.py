"""Context parallelism: the tokens of every row are split over ranks, and only attention looks across.

Each rank runs the whole model on its own tokens, with the positions these have in the row. A layer's keys and values
are gathered from all ranks in one collective and put in the row's order. The tokens of a rank are two chunks, and a
chunk sees nothing behind itself, so that attention is computed over what stands before the end of the chunk only.

Shapes: B rows, T tokens of a row, N ranks, C = T / 2N tokens of a chunk, Hq/Hkv query/key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from lucidrl.distributed.collectives import sum_over
from lucidrl.errors import ConfigError, DataError
from lucidrl.models.attention import AttentionCall, AttentionLayout, capped_attention, causal_mask, repeated_heads

ROTATE_METHODS = (None, "allgather")


class ContextParallel:
    """How rows are split over the ranks of `group`.

    A row is cut into 2N equal chunks, and rank r holds chunks r and 2N - 1 - r: one that sees little and one that sees
    much, so that every rank has the same number of (query, key) pairs to work on.
    """

    def __init__(self, group: ProcessGroup):
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    @property
    def multiple(self) -> int:
        """Rows must be padded to a multiple of it."""
        return 2 * self.size

    @property
    def chunks(self) -> tuple[int, int]:
        """This rank's chunks of a row, in order."""
        return self.rank, self.multiple - 1 - self.rank

    def chunk_length(self, length: int) -> int:
        """C for rows of `length` tokens."""
        if length % self.multiple:
            raise DataError(
                f"rows of {length} tokens do not split evenly over {self.size} context-parallel ranks; "
                f"pad them to a multiple of {self.multiple}"
            )
        return length // self.multiple

    def positions(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """[T / N] positions, in a row of `length` tokens, of those that this rank holds."""
        tokens = self.chunk_length(length)
        first, second = (torch.arange(chunk * tokens, (chunk + 1) * tokens, device=device) for chunk in self.chunks)
        return torch.cat((first, second))

    def layout(self, length: int) -> AttentionLayout:
        """Attention for rows of `length` tokens, of which the model is given those at `positions(length)`.

        Forward and backward call collectives: every rank of the group has to go through both, also one whose tokens
        do not count in the loss (their gradient is 0, but it has to arrive).
        """
        return _SplitRows(self, length)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` of all ranks, whose gradient goes back to every rank unchanged.

        Each rank has computed the values of its own tokens, in a tensor of full rows that holds 0 elsewhere; the sum is
        complete on every rank, and every rank computes the same loss from it. The gradient that a rank sends back
        reaches its own tokens only, and is complete for them: adding up over ranks here would count it N times. The
        gradients of parameters are then each rank's share, to be summed over ranks like those of data parallelism.
        """
        return _SumRanks.apply(values, self.group)


class _SplitRows:
    """The layout of rows [B, T] of which this rank's queries, keys and values are two chunks, [B, H, 2C, D]."""

    def __init__(self, parallel: ContextParallel, length: int):
        self.parallel = parallel
        self.tokens = parallel.chunk_length(length)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        assert call.query.shape[2] == 2 * self.tokens, "the model was given other tokens than those of this layout"
        key, value = self._whole_rows(call.key, call.value)
        outputs = []
        for chunk, query in zip(self.parallel.chunks, call.query.chunk(2, dim=2), strict=True):
            end = (chunk + 1) * self.tokens
            start = 0 if call.window is None else max(0, end - self.tokens - call.window + 1)
            visible = slice(start, end)
            outputs.append(
                _attend_from_end(replace(call, query=query, key=key[:, :, visible], value=value[:, :, visible]))
            )
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def _whole_rows(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, Hkv, 2C, D] of this rank → [B, Hkv, T, D] of all, in the order of the row."""
        gathered = _GatherRanks.apply(torch.cat((key, value), dim=-1), self.parallel.group)
        early, late = gathered.chunk(2, dim=3)
        both = torch.cat((*early.unbind(), *reversed(late.unbind())), dim=2)
        return both.split((key.shape[-1], value.shape[-1]), dim=-1)


def _attend_from_end(call: AttentionCall) -> torch.Tensor:
    """Causal attention of queries that are the last of the positions of the keys."""
    num_queries, num_keys = call.query.shape[2], call.key.shape[2]
    options: dict[str, Any] = {"dropout_p": call.dropout, "scale": call.scaling}
    if call.softcap is not None:
        return capped_attention(call)
    if call.window is not None and call.window < num_keys:
        # No fused kernel takes both a mask and grouped heads on CUDA.
        mask = causal_mask(num_queries, num_keys, call.window, call.query.device)
        return F.scaled_dot_product_attention(call.query, *repeated_heads(call), attn_mask=mask, **options)
    mask = causal_lower_right(num_queries, num_keys)  # on CUDA the kernel knows it and needs no tensor
    is_grouped = call.query.shape[1] != call.key.shape[1]
    return F.scaled_dot_product_attention(
        call.query, call.key, call.value, attn_mask=mask, enable_gqa=is_grouped, **options
    )


class _GatherRanks(torch.autograd.Function):
    """`part` of every rank, stacked; each rank's gradient is the sum of what all ranks' uses of its part give."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = part.new_empty(group.size(), *part.shape)
        dist.all_gather(list(parts.unbind()), part.contiguous(), group=group)
        return parts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = torch.empty_like(grad[0])
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
    """Inside, each buffer holds this rank's tokens only, in the order of `ContextParallel.positions`.

    For training loops of your own: policy workers split rows inside of `LogprobModel` and need no such context.

    Afterwards, also after an exception, a buffer has its own memory back, as it was on entry: what was written into the
    shard is gone with it.

    Args:
        cp_mesh: the context-parallel axis of the mesh.
        cp_buffers: tensors with the tokens of whole rows; they are changed in place.
        cp_seq_dims: for each buffer, the dim of its tokens.
        cp_no_restore_buffers: those of the buffers that may stay as they are inside.
        cp_rotate_method: how keys and values travel; there is one way, "allgather".
    """
    if cp_rotate_method not in ROTATE_METHODS:
        raise ConfigError(
            f"cp_rotate_method={cp_rotate_method!r} is not known; keys and values are gathered from all ranks at once: "
            "leave it out, or give 'allgather'"
        )
    if len(cp_buffers) != len(cp_seq_dims):
        raise ConfigError(f"{len(cp_buffers)} cp_buffers have {len(cp_seq_dims)} cp_seq_dims; give one for each")
    parallel = ContextParallel(cp_mesh.get_group())
    # All shards are made before any buffer is touched: a length that is refused leaves every buffer as it was.
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
    """Enter the context-parallel context, if any, with the attention kernels that support it.

    For training loops of your own, as `create_context_parallel_ctx`; policy workers leave the choice to torch.

    On CUDA these are the flash and the memory-efficient kernel, then plain matrix products for what neither knows (for
    instance grouped heads in float32); on CPU there is no choice to make.
    """
    if cp_context is None:
        yield
        return
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with cp_context, sdpa_kernel(kernels, set_priority=True):
        yield
