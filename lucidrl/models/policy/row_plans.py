"""How rows are cut into global batches and micro-batches, as a policy's config says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed import ProcessGroup

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.batching import Plan, dynamic_plan, fixed_plan, inverse_permutation, packed_plan
from lucidrl.distributed.collectives import gather_over
from lucidrl.errors import DataError
from lucidrl.models.policy.config import PolicyConfig

_SCORED_COLUMNS = ("input_ids", "input_lengths")
_TRAINED_COLUMNS = (*_SCORED_COLUMNS, "sample_mask", "token_mask")


class RowPlans:
    """Which rows of a rank run together.

    Args:
        dp_group: the ranks that work on different rows.
    """

    def __init__(self, config: PolicyConfig, dp_group: ProcessGroup | None):
        self._config = config
        self._dp_group = dp_group
        self.are_packed = config.sequence_packing.enabled
        """Rows of a micro-batch lie end to end instead of padded."""
        dynamic = config.dynamic_batching
        self.sequence_length_round = dynamic.sequence_length_round if dynamic.enabled else 1
        """Padded lengths are multiples of this."""

    def global_batches(self, data: BatchedDataDict[Any], gbs: int | None) -> list[BatchedDataDict[Any]]:
        """This rank's share of each global batch.

        Args:
            gbs: rows of one, over all ranks; by default as configured, or all rows.

        Raises:
            DataError: if a column is missing, a length is impossible, or the rows do not split.
        """
        _check_rows(data, _TRAINED_COLUMNS, "train")
        sizes = gather_over(data.size, self._dp_group)
        rows = gbs or self._config.train_global_batch_size or sum(sizes)
        number = sum(sizes) // rows if rows else 0
        if number == 0 or sum(sizes) % rows:
            raise DataError(
                f"{sum(sizes)} rows do not split into global batches of {rows}; "
                "make the number of rows a multiple of train_global_batch_size"
            )
        if any(size % number for size in sizes):
            raise DataError(
                f"shards of {sizes} rows do not split into {number} global batches; "
                "give every rank the same share of each (see shard_by_batch_size)"
            )
        share = data.size // number
        return [data.slice(start, start + share) for start in range(0, share * number, share or 1)] or [data] * number

    def for_training(self, data: BatchedDataDict[Any], mbs: int | None) -> Plan:
        """Micro-batches of one global batch: of `mbs` rows if that is given, otherwise as configured."""
        config = self._config
        packed, dynamic = config.sequence_packing.train_mb_tokens, config.dynamic_batching.train_mb_tokens
        return self._plan(data, mbs, config.train_micro_batch_size, packed, dynamic)

    def for_scoring(self, data: BatchedDataDict[Any], mbs: int | None) -> tuple[Plan, list[int]]:
        """The same for scoring, and the permutation that puts the results back in order.

        Raises:
            DataError: if a column is missing, or a length is impossible.
        """
        _check_rows(data, _SCORED_COLUMNS, "get_logprobs")
        config = self._config
        packed, dynamic = config.sequence_packing.logprob_mb_tokens, config.dynamic_batching.logprob_mb_tokens
        plan = self._plan(data, mbs, config.logprob_batch_size, packed, dynamic)
        return plan, inverse_permutation([row for group in plan for row in group])

    def _plan(
        self, data: BatchedDataDict[Any], mbs: int | None, num_rows: int, packed_tokens: int, dynamic_tokens: int
    ) -> Plan:
        if mbs is not None:
            return fixed_plan(data.size, mbs)
        lengths = data["input_lengths"].tolist()
        if self.are_packed:
            return packed_plan(lengths, packed_tokens)
        if self._config.dynamic_batching.enabled:
            return dynamic_plan(lengths, dynamic_tokens, length_multiple=self.sequence_length_round)
        return fixed_plan(data.size, num_rows)


def _check_rows(data: BatchedDataDict[Any], needed: Sequence[str], method: str) -> None:
    """Refuse a batch that `method` cannot work on."""
    if missing := [name for name in needed if name not in data]:
        raise DataError(
            f"the batch has no {', '.join(missing)}; {method} needs {', '.join(needed)}: add what is missing"
        )
    width = data["input_ids"].shape[1]
    for row, length in enumerate(data["input_lengths"].tolist()):
        if not 0 <= length <= width:
            raise DataError(
                f"row {row} has input_lengths={length}, but its input_ids have room for {width} tokens; "
                f"give the number of its tokens, from 0 to {width}, or wider input_ids"
            )
