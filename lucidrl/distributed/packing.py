"""Sequence packing: concatenate right-padded rows into one sequence without padding, and back.

Shapes: R rows, T padded length, S tokens of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lucidrl.errors import DataError


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Concatenated rows, with the metadata that attention needs to keep them apart."""

    input_ids: torch.Tensor
    """[1, S] the tokens of row 0, then those of row 1, and so on, without padding."""
    position_ids: torch.Tensor
    """[1, S] position of each token in its own row, from 0."""
    cu_seqlens: torch.Tensor
    """[R + 1] int32; row r is at cu_seqlens[r]:cu_seqlens[r + 1]."""
    max_length: int
    """Tokens in the longest row."""
    flat_index: torch.Tensor
    """[S] int64; index of each token in the flattened [R * T] padded grid."""
    num_rows: int
    """R."""
    padded_length: int
    """T."""

    @property
    def _is_full(self) -> bool:
        """Whether there is no padding: packed and padded values are the same."""
        return len(self.flat_index) == self.num_rows * self.padded_length

    def pack(self, values_RT: torch.Tensor) -> torch.Tensor:
        """[R, T, ...] → [S, ...]: drop the values on padding."""
        if values_RT.shape[:2] != (self.num_rows, self.padded_length):
            raise DataError(
                f"values of shape {list(values_RT.shape)} do not match the packed rows; "
                f"pass a tensor of [{self.num_rows}, {self.padded_length}, ...]"
            )
        values = values_RT.flatten(0, 1)
        return values if self._is_full else gather_rows(values, self.flat_index)

    def unpack(self, values_S: torch.Tensor) -> torch.Tensor:
        """[S, ...] → [R, T, ...] with zeros on padding; gradients flow back to `values_S`.

        Without padding the result shares the memory of `values_S`.
        """
        if values_S.shape[:1] != self.flat_index.shape:
            raise DataError(
                f"values of shape {list(values_S.shape)} do not match the packed sequence; "
                f"pass a tensor of [{len(self.flat_index)}, ...], without the leading batch dim of a model's output"
            )
        if self._is_full:
            return values_S.reshape(self.num_rows, self.padded_length, *values_S.shape[1:])
        grid = values_S.new_zeros(self.num_rows * self.padded_length, *values_S.shape[1:])
        grid = grid.index_copy(0, self.flat_index, values_S)
        return grid.view(self.num_rows, self.padded_length, *values_S.shape[1:])


def pack_rows(input_ids_RT: torch.Tensor, lengths_R: torch.Tensor) -> PackedRows:
    """Concatenate right-padded rows."""
    num_rows, padded_length = input_ids_RT.shape
    lengths_R = lengths_R.to(input_ids_RT.device)
    max_length = int(lengths_R.max()) if num_rows else 0
    if max_length > padded_length:
        raise DataError(
            f"a row of length {max_length} does not fit input_ids of width {padded_length}; "
            f"lengths may not exceed the padded length"
        )
    within_row_RT = torch.arange(padded_length, device=lengths_R.device) < lengths_R[:, None]
    row_S, position_S = within_row_RT.nonzero(as_tuple=True)
    flat_index = row_S * padded_length + position_S
    cu_seqlens = torch.nn.functional.pad(lengths_R.cumsum(0), (1, 0)).to(torch.int32)
    return PackedRows(
        input_ids=input_ids_RT.flatten().index_select(0, flat_index)[None],
        position_ids=position_S[None],
        cu_seqlens=cu_seqlens,
        max_length=max_length,
        flat_index=flat_index,
        num_rows=num_rows,
        padded_length=padded_length,
    )


def gather_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`rows[index]` for unique indices: the backward pass copies instead of accumulating."""
    return _Gather.apply(rows, index)  # pyright: ignore[reportReturnType]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_rows, *grad.shape[1:]).index_copy_(0, index, grad), None
