"""Plans of micro-batches: which rows form each micro-batch.

A plan is a list of groups, a group is a list of row indices, and every row is in exactly one group. Plans are
deterministic: ranks with the same lengths compute the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from lucidrl.errors import DataError

Plan = list[list[int]]


def fixed_plan(num_rows: int, rows_per_batch: int) -> Plan:
    """Consecutive groups of `rows_per_batch` rows; the last group may be shorter."""
    _require_positive("rows_per_batch", rows_per_batch)
    return [list(range(start, min(start + rows_per_batch, num_rows))) for start in range(0, num_rows, rows_per_batch)]


def dynamic_plan(lengths: Sequence[int] | torch.Tensor, max_tokens: int, length_multiple: int = 1) -> Plan:
    """Group rows of similar length so that each group has at most `max_tokens` tokens: rows x padded length.

    The plan has the fewest groups and, among such plans, the least padding. The group with the longest rows comes
    first, so that a batch too large for memory fails at once.

    Args:
        lengths: tokens per row. An empty row counts as one token, because a forward pass needs one.
        max_tokens: budget per group, padding included.
        length_multiple: the padded length of a group is rounded up to a multiple of this.

    Raises:
        DataError: if a row alone is over the budget.
    """
    padded_lengths = _padded_lengths(_checked_lengths(lengths), max_tokens, length_multiple)
    by_length = sorted(range(len(padded_lengths)), key=lambda row: (padded_lengths[row], row))
    bounds = _cheapest_partition([padded_lengths[row] for row in by_length], max_tokens)
    return [sorted(by_length[start:end]) for start, end in reversed(bounds)]


def packed_plan(lengths: Sequence[int] | torch.Tensor, max_tokens: int) -> Plan:
    """Group rows so that the sum of lengths in each group fits into `max_tokens` (first fit, longest row first).

    Args:
        lengths: tokens per row.
        max_tokens: budget per group.

    Raises:
        DataError: if a row alone is over the budget.
    """
    lengths = _checked_lengths(lengths)
    _check_budget(lengths, max_tokens)
    free_tokens = np.full(len(lengths), max_tokens)
    groups: Plan = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        # The first group with enough free tokens, or a new group.
        index = int(np.argmax(free_tokens[: len(groups) + 1] >= lengths[row]))
        if index == len(groups):
            groups.append([])
        groups[index].append(row)
        free_tokens[index] -= lengths[row]
    return [sorted(group) for group in groups]


def even_parts(num_rows: int, num_parts: int) -> list[tuple[int, int]]:
    """(start, end) of consecutive parts whose sizes differ by at most one row, the larger ones first."""
    _require_positive("num_parts", num_parts)
    size, longer = divmod(num_rows, num_parts)
    return list(pairwise(part * size + min(part, longer) for part in range(num_parts + 1)))


def shard_plan(num_rows: int, shards: int, batch_size: int | None = None, allow_uneven: bool = False) -> list[Plan]:
    """For each global batch of `batch_size` rows (None: one batch of all rows), the consecutive rows of each shard.

    The last global batch may be shorter. If there are no rows, the result is one empty global batch.

    Raises:
        DataError: if a global batch does not split evenly, unless `allow_uneven`.
    """
    _require_positive("shards", shards)
    batch_size = max(num_rows, 1) if batch_size is None else batch_size
    _require_positive("batch_size", batch_size)
    global_batches = []
    for start in range(0, max(num_rows, 1), batch_size):
        rows = range(start, min(start + batch_size, num_rows))
        if len(rows) % shards and not allow_uneven:
            raise DataError(
                f"a global batch of {len(rows)} rows does not split evenly over {shards} shards; "
                f"make it a multiple of {shards}, or allow uneven shards"
            )
        global_batches.append([list(rows[first:last]) for first, last in even_parts(len(rows), shards)])
    return global_batches


def grow_plan(plan: Plan, num_groups: int) -> Plan:
    """Split the largest groups in halves until there are `num_groups`; all groups stay within their budget.

    All ranks must make the same number of collective calls, so each rank grows its plan to the size of the largest.
    """
    num_rows = sum(len(group) for group in plan)
    if num_rows < num_groups:
        raise DataError(
            f"{num_rows} rows cannot be split into {num_groups} micro-batches, as many as another shard has; "
            f"give every shard the same number of rows"
        )
    groups = [list(group) for group in plan]
    while len(groups) < num_groups:
        largest = max(range(len(groups)), key=lambda index: len(groups[index]))
        middle = len(groups[largest]) // 2
        groups[largest : largest + 1] = [groups[largest][:middle], groups[largest][middle:]]
    return groups


def dynamic_shard_plans(
    lengths: Sequence[int] | torch.Tensor, global_batches: Sequence[Plan], max_tokens: int, length_multiple: int = 1
) -> list[Plan]:
    """Plan the micro-batches of every shard of an even `shard_plan`; row indices count within the shard.

    No group spans two global batches, and in each global batch all shards have the same number of groups.
    """
    lengths = _checked_lengths(lengths)
    # dynamic_plan checks the lengths too, but this error names the row by its index in the whole batch.
    _padded_lengths(lengths, max_tokens, length_multiple)
    shard_groups: list[Plan] = [[] for _ in global_batches[0]]
    num_planned = 0
    for parts in global_batches:
        plans = [dynamic_plan([lengths[row] for row in part], max_tokens, length_multiple) for part in parts]
        num_groups = max(len(plan) for plan in plans)
        for groups, plan in zip(shard_groups, plans, strict=True):
            groups += [[num_planned + row for row in group] for group in grow_plan(plan, num_groups)]
        num_planned += len(parts[0])
    return shard_groups


def inverse_permutation(order: Sequence[int] | torch.Tensor) -> list[int]:
    """The order that undoes `order`: if `b = [a[i] for i in order]`, then `a = [b[i] for i in inverse]`."""
    order = as_list(order)
    inverse = [-1] * len(order)
    for position, row in enumerate(order):
        if not 0 <= row < len(order) or inverse[row] >= 0:
            raise DataError(
                f"order[{position}] is {row}, which is repeated or out of range; pass a permutation of "
                f"0..{len(order) - 1}"
            )
        inverse[row] = position
    return inverse


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


def as_list(values: Sequence[int] | torch.Tensor) -> list[int]:
    """Row indices or lengths as plain integers."""
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


def _cheapest_partition(widths: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """Cut ascending widths into (start, end) runs: as few runs as possible and, among those, fewest padded tokens.

    Dynamic programming over prefixes. Runs of sorted rows are optimal: moving the shorter rows of two groups into one
    of them never makes either group wider.
    """
    num_rows = len(widths)
    # One more run outweighs any amount of padding.
    run_cost = num_rows * widths[-1] + 1 if widths else 0
    starts = torch.arange(num_rows)
    cost = torch.zeros(num_rows + 1, dtype=torch.int64)
    best_start = [0] * (num_rows + 1)
    for end in range(1, num_rows + 1):
        width = widths[end - 1]
        first = max(0, end - max_tokens // width)
        costs = cost[first:end] + (end - starts[first:end]) * width
        cheapest = int(costs.argmin())
        cost[end] = costs[cheapest] + run_cost
        best_start[end] = first + cheapest
    bounds = []
    end = num_rows
    while end > 0:
        bounds.append((best_start[end], end))
        end = best_start[end]
    return bounds[::-1]


def _padded_lengths(lengths: Sequence[int], max_tokens: int, length_multiple: int) -> list[int]:
    _require_positive("length_multiple", length_multiple)
    padded_lengths = [round_up(max(length, 1), length_multiple) for length in lengths]
    _check_budget(padded_lengths, max_tokens, length_multiple)
    return padded_lengths


def _check_budget(lengths: Sequence[int], max_tokens: int, rounded_to: int = 1) -> None:
    _require_positive("max_tokens", max_tokens)
    for row, length in enumerate(lengths):
        if length > max_tokens:
            rounding = f" (rounded up to a multiple of {rounded_to})" if rounded_to > 1 else ""
            raise DataError(
                f"row {row} has {length} tokens{rounding}, more than the budget of {max_tokens} tokens per "
                f"micro-batch; raise the budget to at least {max(lengths)}, or shorten the row"
            )


def _checked_lengths(lengths: Sequence[int] | torch.Tensor) -> list[int]:
    lengths = as_list(lengths)
    for row, length in enumerate(lengths):
        if length < 0:
            raise DataError(f"row {row} has length {length}; lengths are numbers of tokens, 0 or more")
    return lengths


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise DataError(f"{name}={value} must be at least 1")
