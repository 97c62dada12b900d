"""`BatchedDataDict`: named columns with the same rows, which can be sliced, sharded and concatenated.

A column is a tensor whose dim 0 is rows, or a list with one entry per row. Only token columns have a time dimension, so
only they are padded and truncated.

A batch derived from another one shares memory with it wherever torch does: a slice is a view.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypedDict, TypeVar

import torch

from lucidrl.distributed.batching import (
    Plan,
    as_list,
    dynamic_shard_plans,
    even_parts,
    fixed_plan,
    inverse_permutation,
    round_up,
    shard_plan,
)
from lucidrl.distributed.columns import ColumnKind, check_columns, compact, concatenate, describe, kind_of, map_tensors
from lucidrl.errors import DataError

T = TypeVar("T")


class DynamicBatchingArgs(TypedDict):
    """Settings of `shard_by_batch_size` for micro-batches by tokens instead of rows."""

    max_tokens_per_microbatch: int
    """Token budget per micro-batch, padding included."""
    sequence_length_round: int
    """Padded lengths are rounded up to a multiple of this."""
    input_key: str
    """The token column that the lengths belong to."""
    input_lengths_key: str
    """The column with the length of each row."""


@dataclass(frozen=True)
class _MicroBatchPlan:
    groups: Plan
    """Row indices of each micro-batch, in ascending order."""
    lengths_key: str
    length_multiple: int

    def between(self, start: int, end: int) -> Self | None:
        """The plan of rows start:end; None if `start` or `end` splits a group."""
        inside = [group for group in self.groups if start <= group[0] and group[-1] < end]
        if sum(len(group) for group in inside) != end - start:
            return None
        shifted = [[row - start for row in group] for group in inside]
        return type(self)(shifted, self.lengths_key, self.length_multiple)


class BatchedDataDict(MutableMapping[str, Any], Generic[T]):
    """A mapping from names to columns with equal numbers of rows; the type parameter documents the fields.

    Example:
        >>> batch = BatchedDataDict({"input_ids": torch.zeros(4, 7), "pixels": torch.zeros(4, 3, 8, 8)},
        ...                         kinds={"pixels": ColumnKind.ROW})
        >>> first, second = batch.shard_by_batch_size(shards=2)

    Args:
        data: the columns.
        kinds: kinds of columns, where they differ from the default; a name may be declared before its column is set.

    Raises:
        DataError: if columns differ in their number of rows, token columns in their length, or a column does not match
            its kind. Setting and updating columns raise it too, and then change nothing.
    """

    def __init__(self, data: Mapping[str, Any] | None = None, kinds: Mapping[str, ColumnKind] | None = None):
        self._columns: dict[str, Any] = {}
        inherited = data._kinds if isinstance(data, BatchedDataDict) else {}
        self._kinds: dict[str, ColumnKind] = inherited | {
            name: ColumnKind(kind) for name, kind in (kinds or {}).items()
        }
        self._plan: _MicroBatchPlan | None = None
        self.update(dict(data or {}))

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, float] | None = None
    ) -> Self:
        """Concatenate batches; token columns are right-padded to the longest.

        Args:
            batches: at least one; all with the same columns.
            pad_value_dict: padding value by token column, 0 by default.
        """
        if not batches:
            raise DataError("there are no batches to concatenate; from_batches needs at least one")
        parts = [batch if isinstance(batch, BatchedDataDict) else cls(batch) for batch in batches]
        for index, part in enumerate(parts):
            if different := parts[0].keys() ^ part.keys():
                raise DataError(
                    f"batch 0 and batch {index} differ in the columns {', '.join(sorted(different))}; "
                    f"batches need the same columns to be concatenated"
                )
        pad_values = pad_value_dict or {}
        kinds = {name: kind for part in parts for name, kind in part._kinds.items()}
        columns = {
            name: concatenate(name, [(part.kind(name), part[name]) for part in parts], pad_values.get(name, 0))
            for name in parts[0]
        }
        return cls(columns, kinds)

    # The mapping.

    def __getitem__(self, key: str) -> Any:
        try:
            return self._columns[key]
        except KeyError:
            close = difflib.get_close_matches(str(key), self._columns, n=3)
            hint = f"nearest: {', '.join(close)}" if close else f"there are: {', '.join(self._columns) or 'none'}"
            raise KeyError(f"no column {key!r}; {hint}") from None

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def __delitem__(self, key: str) -> None:
        self[key]  # a missing key raises the same error as reading
        del self._columns[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """Number of columns, as for any mapping; `size` is the number of rows."""
        return len(self._columns)

    def __contains__(self, key: object) -> bool:
        return key in self._columns

    def __repr__(self) -> str:
        columns = (f"{name}: {describe(value)} {self.kind(name)}" for name, value in self._columns.items())
        return f"{type(self).__name__}({', '.join(columns)})"

    def update(  # type: ignore[override] # one signature instead of the base's overloads, the same calls
        self, other: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), /, **columns: Any
    ) -> None:
        """Set several columns at once, which may change the number of rows; copies the column kinds of `other`."""
        kinds = self._kinds | (other._kinds if isinstance(other, BatchedDataDict) else {})
        merged = self._columns | dict(other) | columns
        check_columns(merged, kinds)
        num_rows_before = self.size
        self._columns, self._kinds = merged, kinds
        if self.size != num_rows_before:
            self._plan = None

    def kind(self, key: str) -> ColumnKind:
        """The declared kind of a column, or the default for its type."""
        return kind_of(self[key], self._kinds.get(key))

    def get_dict(self) -> dict[str, Any]:
        """The columns as a new plain dict."""
        return dict(self._columns)

    def copy(self) -> Self:
        """A copy with new columns, lists and kinds; tensors are shared."""
        columns = {k: list(v) if isinstance(v, list) else v for k, v in self._columns.items()}
        return self._with(columns, self._plan)

    __copy__ = copy

    def to(self, device: torch.device | str) -> Self:
        """Move all tensors to `device`, those of ragged columns included."""
        return self._with(self._map_tensors(lambda tensor: tensor.to(device)), self._plan)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle views without the rest of their storage, so that a slice stays small."""
        return {"_columns": self._map_tensors(compact), "_kinds": self._kinds, "_plan": self._plan}

    def _map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        return {name: map_tensors(function, value, self.kind(name)) for name, value in self._columns.items()}

    # Rows.

    @property
    def size(self) -> int:
        """Number of rows."""
        return next((len(value) for value in self._columns.values()), 0)

    def slice(self, start: int, end: int) -> Self:
        """Rows start:end; values beyond the number of rows are clamped to it."""
        if not 0 <= start <= end:
            raise DataError(f"slice({start}, {end}) of {self.size} rows is not a range; use 0 <= start <= end")
        start, end = min(start, self.size), min(end, self.size)
        plan = self._plan.between(start, end) if self._plan else None
        return self._with({name: value[start:end] for name, value in self._columns.items()}, plan)

    def get_batch(self, batch_idx: int, batch_size: int) -> Self:
        """Batch `batch_idx`, counted from 0, of consecutive batches of `batch_size` rows; the last may be shorter."""
        num_batches = len(fixed_plan(self.size, batch_size))
        if not 0 <= batch_idx < num_batches:
            raise DataError(
                f"there is no batch {batch_idx}: {self.size} rows make {num_batches} batches of {batch_size}; "
                "batch_idx counts from 0"
            )
        return self.slice(batch_idx * batch_size, (batch_idx + 1) * batch_size)

    def chunk(self, rank: int, chunks: int) -> Self:
        """Chunk `rank` of `chunks` consecutive chunks, whose sizes differ by at most one row."""
        if not 0 <= rank < chunks:
            raise DataError(f"chunk {rank} of {chunks} does not exist; ranks are from 0 to chunks - 1")
        start, end = even_parts(self.size, chunks)[rank]
        return self.slice(start, end)

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """The rows at `indices`, in this order; a row selected twice refers to the same list entries."""
        if isinstance(indices, torch.Tensor) and indices.dtype == torch.bool:
            raise DataError("indices are a bool mask, but row indices are needed; use mask.nonzero().flatten()")
        rows = as_list(indices)
        if rows and not 0 <= min(rows) <= max(rows) < self.size:
            raise DataError(
                f"indices {min(rows)}..{max(rows)} are out of range for {self.size} rows; use 0 to size - 1"
            )
        index = torch.tensor(rows, dtype=torch.int64)
        columns = {
            name: value.index_select(0, index.to(value.device))
            if isinstance(value, torch.Tensor)
            else [value[row] for row in rows]
            for name, value in self._columns.items()
        }
        return self._with(columns)

    def reorder_data(self, indices: Sequence[int] | torch.Tensor) -> None:
        """Reorder the rows in place: row i becomes the old row `indices[i]`.

        `inverse_permutation(indices)` are the indices that undo it.
        """
        rows = inverse_permutation(inverse_permutation(indices))
        if len(rows) != self.size:
            raise DataError(f"indices has {len(rows)} entries, but the batch has {self.size} rows; list each row once")
        self._columns = self.select_indices(rows)._columns
        self._plan = None

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Repeat each row `num_repeats` times; the repeated rows share no mutable entries."""
        repeated = self.select_indices([row for row in range(self.size) for _ in range(num_repeats)])
        for name, value in repeated.items():
            if isinstance(value, list):
                repeated._columns[name] = [copy.deepcopy(entry) for entry in value]
        return repeated

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
    ) -> list[Self]:
        """Split the rows over data-parallel ranks: each shard gets consecutive rows of every global batch.

        Args:
            shards: number of ranks.
            batch_size: rows per global batch (the last one may be shorter); None for one batch of all rows.
            allow_uneven_shards: whether shards may differ by one row in a global batch.
            dynamic_batching_args: plan micro-batches by tokens, for `make_microbatch_iterator_with_dynamic_shapes`.
                No micro-batch spans two global batches, and all shards have equally many per global batch.
        """
        if allow_uneven_shards and dynamic_batching_args:
            raise DataError("uneven shards cannot have equal numbers of dynamic micro-batches; set only one of the two")
        global_batches = shard_plan(self.size, shards, batch_size, allow_uneven_shards)
        result = [
            self.select_indices([row for parts in global_batches for row in parts[shard]]) for shard in range(shards)
        ]
        if args := dynamic_batching_args:
            multiple = args["sequence_length_round"]
            plans = dynamic_shard_plans(
                self._lengths_of(args), global_batches, args["max_tokens_per_microbatch"], multiple
            )
            for shard, plan in zip(result, plans, strict=True):
                shard._plan = _MicroBatchPlan(plan, args["input_lengths_key"], multiple)
        return result

    def _lengths_of(self, args: DynamicBatchingArgs) -> list[int]:
        lengths, width = as_list(self[args["input_lengths_key"]]), self[args["input_key"]].shape[1]
        for row, length in enumerate(lengths):
            if length > width:
                raise DataError(
                    f"row {row} has {args['input_lengths_key']}={length}, but {args['input_key']} has length {width}; "
                    f"lengths may not exceed the padded length"
                )
        return lengths

    # Micro-batches and time.

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[Self]:
        """Consecutive micro-batches of `microbatch_size` rows; the last one may be shorter."""
        for group in fixed_plan(self.size, microbatch_size):
            yield self.slice(group[0], group[-1] + 1)

    def make_microbatch_iterator_with_dynamic_shapes(self) -> Iterator[Self]:
        """The micro-batches that `shard_by_batch_size` planned, each truncated to its longest row."""
        if self._plan is None:
            raise DataError(
                "this batch has no plan of dynamic micro-batches; use a shard of shard_by_batch_size(..., "
                "dynamic_batching_args=...) or one global batch of such a shard, and do not reorder the rows"
            )
        return self.microbatches(self._plan.groups, self._plan.lengths_key, self._plan.length_multiple)

    def microbatches(self, plan: Plan, lengths_key: str = "input_lengths", length_multiple: int = 1) -> Iterator[Self]:
        """One micro-batch per group of the plan; token columns are truncated to the group's longest row, at least 1.

        Args:
            plan: groups of row indices, for instance from `dynamic_plan`.
            lengths_key: the column with the length of each row.
            length_multiple: truncated lengths are rounded up to a multiple of this, if the columns are long enough.
        """
        lengths = as_list(self[lengths_key])  # once: each read of a value on an accelerator synchronizes
        for group in plan:
            microbatch = self.select_indices(group)
            microbatch.truncate_tensors(1, round_up(max([1, *(lengths[row] for row in group)]), length_multiple))
            yield microbatch

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Truncate token columns to `truncated_len` along time, in place; `dim` must be 1, the time dimension."""
        if dim != 1 or truncated_len < 0:
            raise DataError(
                f"truncate_tensors({dim}, {truncated_len}) does not truncate time; use dim 1 and a length of at least 0"
            )
        self._columns = {
            name: value[:, :truncated_len] if self.kind(name) is ColumnKind.TOKEN else value
            for name, value in self._columns.items()
        }

    def _with(self, columns: dict[str, Any], plan: _MicroBatchPlan | None = None) -> Self:
        """A batch of valid columns with the same kinds; does not check them again."""
        batch = type(self)(kinds=self._kinds)
        batch._columns, batch._plan = columns, plan
        return batch
