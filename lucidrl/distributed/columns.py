"""Columns of a batch: their kinds, validation and concatenation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch

from lucidrl.errors import DataError


class ColumnKind(StrEnum):
    """How a column relates to rows and time."""

    TOKEN = "token"
    """A right-padded tensor with time at dim 1; the default for tensors of two or more dims."""
    ROW = "row"
    """A tensor or list with one entry per row and no time dimension; the default for 1-d tensors and lists."""
    RAGGED = "ragged"
    """A list of tensors of different lengths; must be declared."""


def kind_of(value: Any, declared: ColumnKind | None) -> ColumnKind:
    """The declared kind, or the default for the value's type if none is declared."""
    if declared is not None:
        return declared
    return ColumnKind.TOKEN if isinstance(value, torch.Tensor) and value.dim() >= 2 else ColumnKind.ROW


def check_columns(columns: Mapping[str, Any], kinds: Mapping[str, ColumnKind]) -> None:
    """Raise DataError unless columns match their kinds, have equally many rows, and have equal lengths in time."""
    first_name = first_token_name = None
    for name, value in columns.items():
        kind = kind_of(value, kinds.get(name))
        _check_kind(name, value, kind)
        first_name = first_name or name
        if len(value) != len(columns[first_name]):
            raise DataError(
                f"column {name!r} has {len(value)} rows, {first_name!r} has {len(columns[first_name])}; "
                f"all columns of a batch need the same number of rows"
            )
        if kind is not ColumnKind.TOKEN:
            continue
        first_token_name = first_token_name or name
        length = columns[first_token_name].shape[1]
        if value.shape[1] != length:
            raise DataError(
                f"token column {name!r} has length {value.shape[1]}, {first_token_name!r} has {length}; pad both to "
                f"one length, or declare a column without a time dimension with kinds={{name: ColumnKind.ROW}}"
            )


def _check_kind(name: str, value: Any, kind: ColumnKind) -> None:
    if not isinstance(value, list) and not (isinstance(value, torch.Tensor) and value.dim() >= 1):
        raise DataError(f"column {name!r} is {describe(value)}; pass a tensor or list with one entry per row")
    if kind is ColumnKind.TOKEN and not (isinstance(value, torch.Tensor) and value.dim() >= 2):
        raise DataError(
            f"column {name!r} is declared token, but is {describe(value)}; pass a tensor of [rows, time, ...]"
        )
    if kind is ColumnKind.RAGGED and not (
        isinstance(value, list) and all(isinstance(entry, torch.Tensor) and entry.dim() >= 1 for entry in value)
    ):
        raise DataError(
            f"column {name!r} is declared ragged, but is {describe(value)}; pass a list of tensors, one per row"
        )


def concatenate(name: str, parts: Sequence[tuple[ColumnKind, Any]], pad_value: float) -> Any:
    """Concatenate the rows of one column of several batches; token columns are right-padded to the longest."""
    kind, first = parts[0]
    values = [value for _, value in parts]
    if any(other is not kind or type(value) is not type(first) for other, value in parts):
        described = ", ".join(f"{other} {describe(value)}" for other, value in parts)
        raise DataError(f"column {name!r} differs between batches: {described}; use the same type and kind in all")
    if isinstance(first, list):
        return [entry for value in values for entry in value]
    if kind is ColumnKind.TOKEN:
        length = max(value.shape[1] for value in values)
        values = [_pad_time(value, length, pad_value) for value in values]
    if len({value.shape[1:] for value in values}) > 1:
        described = ", ".join(describe(value) for value in values)
        raise DataError(
            f"column {name!r} cannot be concatenated from {described}; shapes may differ only in rows and time"
        )
    return torch.cat(values)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any, kind: ColumnKind) -> Any:
    """Apply `function` to the tensor, or to each tensor of a ragged column; other lists stay as they are."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return [function(tensor) for tensor in value] if kind is ColumnKind.RAGGED else value


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor that is a view of a larger storage, because pickle would save the whole storage."""
    size_bytes = tensor.numel() * tensor.element_size()
    return tensor.clone() if tensor.untyped_storage().nbytes() > size_bytes else tensor


def _pad_time(value: torch.Tensor, length: int, pad_value: float) -> torch.Tensor:
    if value.shape[1] == length:
        return value
    padding = value.new_full((value.shape[0], length - value.shape[1], *value.shape[2:]), pad_value)
    return torch.cat([value, padding], dim=1)


def describe(value: Any) -> str:
    """Type and shape in a few characters, such as `int64[4, 7]` or `list[4]`."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"list[{len(value)}]" if isinstance(value, list) else f"a {type(value).__name__}"
