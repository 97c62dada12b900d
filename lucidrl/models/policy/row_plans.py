"""Splits rows into global batches and micro-batches, as configured."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.batching import (
    Plan,
    dynamic_plan,
    fixed_plan,
    inverse_permutation,
    packed_plan,
    round_up,
)
from lucidrl.distributed.columns import ColumnKind
from lucidrl.distributed.prefix_tree import num_stored_tokens, tree_plan
from lucidrl.distributed.process_group import RankMesh, gather_over, largest_over
from lucidrl.errors import DataError
from lucidrl.losses.interfaces import PAIR_IDS
from lucidrl.models.policy.config import PolicyConfig

_logger = logging.getLogger(__name__)
_SCORED_COLUMNS = ("input_ids", "input_lengths")
_TRAINED_COLUMNS = (*_SCORED_COLUMNS, "sample_mask", "token_mask")


@dataclass(frozen=True)
class RowPlan:
    """The rows of each micro-batch."""

    groups: Plan
    are_packed: bool
    """Rows of a micro-batch are concatenated instead of padded."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass."""

    rows: BatchedDataDict[Any]
    is_packed: bool
    is_real: bool
    """False for a placeholder, which keeps this rank in lock-step with the other ranks."""
    is_last: bool


class RowPlans:
    """Plans global batches and micro-batches of one rank."""

    def __init__(self, config: PolicyConfig, mesh: RankMesh):
        self._config, self._mesh = config, mesh
        self.share_prefixes = config.share_prefixes
        """Tokens that rows of a micro-batch have in common are computed once."""
        parallel = config.dtensor_cfg
        if self.share_prefixes and (mesh.layout.cp > 1 or (mesh.layout.tp > 1 and parallel.sequence_parallel)):
            self.share_prefixes = False
            if mesh.rank == 0:
                _logger.info(
                    "policy.share_prefixes has no effect with context or sequence parallelism, which splits rows over "
                    "ranks; every row is computed alone"
                )
        packing, dynamic = config.sequence_packing, config.dynamic_batching
        self._packs = packing.enabled
        self._budget = packing if packing.enabled else dynamic
        self._length_multiple = dynamic.sequence_length_round if dynamic.enabled else 1

    def global_batches(self, data: BatchedDataDict[Any], gbs: int | None) -> list[BatchedDataDict[Any]]:
        """Return this rank's rows of each global batch.

        Args:
            gbs: rows per global batch, over all ranks; by default `train_global_batch_size`, or all rows.

        Raises:
            DataError: a column is missing, a length is invalid, or the rows do not split evenly.
        """
        _check_rows(data, _TRAINED_COLUMNS, "train")
        sizes = gather_over(data.size, self._mesh.dp_group)
        rows = gbs or self._config.train_global_batch_size or sum(sizes)
        number = sum(sizes) // rows if rows else 0
        if number == 0 or sum(sizes) % rows:
            raise DataError(
                f"{sum(sizes)} rows do not split into global batches of {rows}; "
                "make the number of rows a multiple of train_global_batch_size"
            )
        if any(size % number for size in sizes):
            raise DataError(
                f"ranks with {sizes} rows cannot form {number} global batches, because a rank must have equally many "
                f"rows in every global batch; give each rank a multiple of {number} rows (see shard_by_batch_size)"
            )
        share = data.size // number
        return [data.slice(start, start + share) for start in range(0, share * number, share or 1)] or [data] * number

    def for_training(self, data: BatchedDataDict[Any], mbs: int | None) -> RowPlan:
        """Plan the micro-batches of one global batch; `mbs` (rows per micro-batch) overrides the config."""
        return self._plan(data, mbs, self._config.train_micro_batch_size, self._budget.train_mb_tokens)

    def for_scoring(self, data: BatchedDataDict[Any], mbs: int | None) -> tuple[RowPlan, list[int]]:
        """Plan micro-batches for scoring; also return the permutation that restores row order.

        Raises:
            DataError: if a column is missing or a length is invalid.
        """
        _check_rows(data, _SCORED_COLUMNS, "get_logprobs")
        plan = self._plan(data, mbs, self._config.logprob_batch_size, self._budget.logprob_mb_tokens)
        return plan, inverse_permutation([row for group in plan.groups for row in group])

    def micro_batches(self, data: BatchedDataDict[Any], plan: RowPlan) -> Iterator[MicroBatch]:
        """Yield the planned micro-batches, then placeholders until all ranks have equally many micro-batches.

        Ranks gather weights from each other, so all must make the same number of forward passes.
        """
        rounds, number = largest_over(len(plan.groups), self._mesh.world), 0
        planned = data.microbatches(plan.groups, length_multiple=self._length_multiple)
        for number, rows in enumerate(planned, start=1):
            yield MicroBatch(rows, plan.are_packed, is_real=True, is_last=number == rounds)
        for missing in range(number + 1, rounds + 1):
            yield MicroBatch(_empty_row(data), plan.are_packed, is_real=False, is_last=missing == rounds)

    def _plan(self, data: BatchedDataDict[Any], mbs: int | None, num_rows: int, num_tokens: int) -> RowPlan:
        if PAIR_IDS in data:
            return self._plan_of_pairs(data, num_rows if mbs is None else mbs, None if mbs is not None else num_tokens)
        if mbs is not None or not self._budget.enabled:
            return RowPlan(fixed_plan(data.size, num_rows if mbs is None else mbs), self._packs)
        if self.share_prefixes:
            groups = tree_plan(data["input_ids"], data["input_lengths"], num_tokens)
            if groups is not None:
                return RowPlan(groups, are_packed=True)
        lengths = data["input_lengths"].tolist()
        if self._packs:
            return RowPlan(packed_plan(lengths, num_tokens), are_packed=True)
        return RowPlan(dynamic_plan(lengths, num_tokens, length_multiple=self._length_multiple), are_packed=False)

    def _plan_of_pairs(self, data: BatchedDataDict[Any], num_rows: int, num_tokens: int | None) -> RowPlan:
        """Plan micro-batches that contain both rows of every pair.

        Args:
            num_rows: most rows per micro-batch, if there is no token budget; a pair is never split.
        """
        pairs = paired_rows(data)
        most, lengths = max(map(len, pairs), default=1), data["input_lengths"].tolist()
        are_packed = self._packs
        if num_tokens is None or not self._budget.enabled:
            plan = fixed_plan(len(pairs), max(1, num_rows // most))
        else:
            sizes = [sum(lengths[row] for row in pair) for pair in pairs]
            stored = sizes
            if self.share_prefixes:
                stored = [num_stored_tokens(pair, data["input_ids"], data["input_lengths"]) for pair in pairs]
            if self._packs or stored != sizes:
                are_packed = True
                _check_pairs(stored, num_tokens)
                plan = packed_plan(stored, num_tokens)
            else:
                longest = [max(lengths[row] for row in pair) for pair in pairs]
                padded = [most * round_up(length, self._length_multiple) for length in longest]
                _check_pairs(padded, num_tokens)
                plan = dynamic_plan(longest, num_tokens // most, length_multiple=self._length_multiple)
        return RowPlan([[row for index in group for row in pairs[index]] for group in plan], are_packed)


def paired_rows(data: BatchedDataDict[Any]) -> Plan:
    """Return the rows of each pair, the neighbouring rows with equal `PAIR_IDS`."""
    ids = enumerate(data[PAIR_IDS].tolist())
    return [[row for row, _ in pair] for _, pair in groupby(ids, key=lambda row_and_id: row_and_id[1])]


def _check_pairs(sizes: Sequence[int], num_tokens: int) -> None:
    for number, size in enumerate(sizes):
        if size > num_tokens:
            raise DataError(
                f"pair {number} has {size} tokens, more than the budget of {num_tokens} tokens per micro-batch, which "
                f"must hold both rows of a pair; raise the budget to at least {max(sizes)}, or shorten the pair"
            )


def _check_rows(data: BatchedDataDict[Any], needed: Sequence[str], method: str) -> None:
    """Raise DataError for a batch that `method` cannot use."""
    if missing := [name for name in needed if name not in data]:
        raise DataError(
            f"the batch has no {', '.join(missing)}; {method} needs {', '.join(needed)}: add the missing columns"
        )
    width = data["input_ids"].shape[1]
    for row, length in enumerate(data["input_lengths"].tolist()):
        if not 0 <= length <= width:
            raise DataError(
                f"row {row} has input_lengths={length}, but its input_ids hold {width} tokens; "
                f"set input_lengths to the number of tokens in the row, from 0 to {width}, or widen input_ids"
            )


def _empty_row(like: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """Return one fully masked row of one token, with the columns of `like`."""
    columns: dict[str, Any] = {}
    for name in like:
        value, is_token = like[name], like.kind(name) is ColumnKind.TOKEN
        if isinstance(value, torch.Tensor):
            columns[name] = value.new_zeros(1, *((1, *value.shape[2:]) if is_token else value.shape[1:]))
        else:
            columns[name] = [None]
    columns["input_lengths"] = like["input_lengths"].new_ones(1)
    return BatchedDataDict(columns, kinds={name: like.kind(name) for name in like})
