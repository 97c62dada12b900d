"""Prefix trees: tokens that rows have in common are stored once.

Rows that start with the same tokens, such as the samples of a prompt or the turns of a conversation, form a tree of
*segments*. A segment is a run of tokens that the same rows contain. Each segment is stored once, in one stream without
padding, and each row is a path from a root to a segment. The tree is found by comparing token ids.

Shapes: R rows, T padded length, S tokens of the stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np
import torch

from lucidrl.distributed.batching import Plan, packed_plan
from lucidrl.distributed.packing import PackedRows, pack_rows

MIN_SAVED_TOKENS = 16
"""A segment that saves fewer tokens is repeated in every branch: an extra call of the attention costs more."""


@dataclass(eq=False)
class Segment:
    """Tokens `start` to `end` of all rows in `rows`."""

    start: int
    """Position of the first token, equal to the number of tokens before the segment."""
    end: int
    rows: list[int]
    """All rows that contain the segment, those with equal tokens side by side."""
    parent: Segment | None = None
    children: list[Segment] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of this segment and of all segments below it."""
        return sum(segment.end - segment.start for segment in _descendants([self]))


def find_segments(input_ids_RT: torch.Tensor, lengths_R: torch.Tensor) -> list[Segment]:
    """Return the root segments of right-padded rows. Rows without tokens are in no segment."""
    ids = np.ascontiguousarray(input_ids_RT.cpu().numpy())
    lengths = lengths_R.tolist()
    # Big-endian bytes sort as the ids do; only equal prefixes must end up side by side.
    keys = [ids[row, :length].astype(">i8").tobytes() for row, length in enumerate(lengths)]
    order = sorted((row for row, length in enumerate(lengths) if length), key=lambda row: (keys[row], row))
    common = [0, *(_common_length(ids[a, : lengths[a]], ids[b, : lengths[b]]) for a, b in pairwise(order))]

    roots: list[Segment] = []
    # (first and last index in `order`, position from which a segment must store tokens, parent)
    pending: list[tuple[int, int, int, Segment | None]] = [(0, len(order), 0, None)]
    while pending:
        first, last, start, parent = pending.pop()
        if first == last:
            continue
        end = min(common[first + 1 : last], default=lengths[order[first]])
        bounds = [first, *(index for index in range(first + 1, last) if common[index] == end), last]
        # Rows that end here come first, and all of them are equal.
        ended = next((index for index in range(first, last) if lengths[order[index]] > end), last)
        parts = [(a, b) for a, b in pairwise(bounds) if b > ended]
        num_branches = len(parts) + (ended > first)
        if num_branches > 1 and (end - start) * (num_branches - 1) < MIN_SAVED_TOKENS:
            pending += [(a, b, start, parent) for a, b in parts]
            parts, last = [], ended
        if first == last:
            continue
        segment = Segment(start, end, order[first:last], parent)
        (roots if parent is None else parent.children).append(segment)
        pending += [(a, b, end, segment) for a, b in parts]
    for segments in (roots, *(segment.children for segment in _descendants(roots))):
        segments.sort(key=lambda segment: min(segment.rows))
    return roots


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _descendants(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Yield the segments and all segments below them, parents first."""
    level = list(segments)
    while level:
        yield from level
        level = [child for segment in level for child in segment.children]


@dataclass(frozen=True, eq=False)
class Siblings:
    """Segments that attention processes in one call.

    They start at the same position, their parents have equally many children, and they are consecutive in the stream.
    """

    segments: tuple[Segment, ...]
    """The children of one parent, then those of the next; or all roots."""
    packed: PackedRows
    """The tokens of the segments, one row each."""

    @property
    def start(self) -> int:
        return self.segments[0].start

    @property
    def parents(self) -> list[Segment]:
        """The parents; empty for roots."""
        parents = [segment.parent for segment in self.segments if segment.parent is not None]
        return list(dict.fromkeys(parents))


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """The stream of a tree's tokens, and where to find the tokens of each row."""

    input_ids: torch.Tensor
    """[1, S]"""
    position_ids: torch.Tensor
    """[1, S] position of each token in its rows."""
    previous: torch.Tensor
    """[S] index of the token before each token; -1 for the first tokens of rows."""
    slots: torch.Tensor
    """[R, T] index of each token in the stream; 0 on padding."""
    is_token: torch.Tensor
    """[R, T] False on padding."""
    siblings: tuple[Siblings, ...]
    """All segments in the order of the stream, parents before children."""

    def unpack(self, values_S: torch.Tensor) -> torch.Tensor:
        """[S, ...] → [R, T, ...] with zeros on padding; gradients of shared tokens are summed over rows."""
        values = values_S.index_select(0, self.slots.flatten()).unflatten(0, self.slots.shape)
        return values.masked_fill(~self.is_token.view(*self.is_token.shape, *(1,) * (values.dim() - 2)), 0)


def share_prefixes(input_ids_RT: torch.Tensor, lengths_R: torch.Tensor) -> PrefixTree | None:
    """Return the prefix tree of right-padded rows; None if rows have nothing to share."""
    roots = find_segments(input_ids_RT, lengths_R)
    num_tokens = sum(root.num_tokens for root in roots)
    if num_tokens == int(lengths_R.sum()):
        return None
    device = input_ids_RT.device
    slots_RT = np.zeros(tuple(input_ids_RT.shape), dtype=np.int64)
    is_token_RT = torch.arange(input_ids_RT.shape[1], device=device) < lengths_R.to(device)[:, None]
    previous = np.arange(-1, num_tokens - 1)
    all_siblings = []
    num_stored = 0
    for segments in _sibling_groups(roots):
        start, longest = segments[0].start, max(segment.end - segment.start for segment in segments)
        own_lengths = torch.tensor([segment.end - segment.start for segment in segments], device=device)
        rows = torch.tensor([segment.rows[0] for segment in segments], device=device)
        all_siblings.append(
            Siblings(tuple(segments), pack_rows(input_ids_RT[rows, start : start + longest], own_lengths))
        )
        for segment in segments:
            length = segment.end - segment.start
            slots_RT[segment.rows, segment.start : segment.end] = np.arange(num_stored, num_stored + length)
            previous[num_stored] = slots_RT[segment.rows[0], segment.start - 1] if segment.start else -1
            num_stored += length
    return PrefixTree(
        input_ids=torch.cat([siblings.packed.input_ids for siblings in all_siblings], dim=1),
        position_ids=torch.cat([siblings.packed.position_ids + siblings.start for siblings in all_siblings], dim=1),
        previous=torch.from_numpy(previous).to(device),
        slots=torch.from_numpy(slots_RT).to(device),
        is_token=is_token_RT,
        siblings=tuple(all_siblings),
    )


def _sibling_groups(roots: list[Segment]) -> Iterator[list[Segment]]:
    """Yield the segments of each `Siblings`, level by level."""
    yield roots
    parents = [root for root in roots if root.children]
    while parents:
        parents.sort(key=_family_shape)
        for _, families in groupby(parents, key=_family_shape):
            yield [child for parent in families for child in parent.children]
        parents = [child for parent in parents for child in parent.children if child.children]


def _family_shape(parent: Segment) -> tuple[int, int]:
    """Families of equal shape are processed together."""
    return parent.end, len(parent.children)


def tree_plan(input_ids_RT: torch.Tensor, lengths_R: torch.Tensor, max_tokens: int) -> Plan | None:
    """Group rows so that rows with common tokens stay together, and a group stores at most `max_tokens` tokens.

    Returns:
        None if rows have nothing to share.

    Raises:
        DataError: if a row alone is over the budget.
    """
    roots = find_segments(input_ids_RT, lengths_R)
    if sum(root.num_tokens for root in roots) == int(lengths_R.sum()):
        return None
    packed_plan(lengths_R, max_tokens)  # names a row that is over the budget
    bins = _bins(roots, 0, max_tokens)
    empty = (lengths_R == 0).nonzero()[:, 0].tolist()
    if bins:
        bins[0].extend(empty)
    plan = [fitting for rows in bins for fitting in _fitting(rows, input_ids_RT, lengths_R, max_tokens)]
    return [sorted(rows) for rows in plan] or [empty]


def _bins(segments: Sequence[Segment], num_before: int, max_tokens: int) -> list[list[int]]:
    """Pack subtrees whose parents have `num_before` tokens into bins of rows; split those that are too large."""
    capacity = max_tokens - num_before
    small = [segment for segment in segments if segment.num_tokens <= capacity]
    plan = packed_plan([segment.num_tokens for segment in small], capacity) if small else []
    bins = [[row for index in group for row in small[index].rows] for group in plan]
    for segment in segments:
        if segment.num_tokens <= capacity:
            continue
        parts = _bins(segment.children, num_before + segment.end - segment.start, max_tokens)
        below = {row for rows in parts for row in rows}
        parts[0].extend(row for row in segment.rows if row not in below)
        bins += parts
    return bins


def _fitting(rows: list[int], input_ids_RT: torch.Tensor, lengths_R: torch.Tensor, max_tokens: int) -> Plan:
    """Halve a group until it fits: with fewer rows, a segment can fall below `MIN_SAVED_TOKENS`."""
    num_tokens = sum(root.num_tokens for root in find_segments(input_ids_RT[rows], lengths_R[rows]))
    if num_tokens <= max_tokens or len(rows) == 1:
        return [rows]
    middle = len(rows) // 2
    halves = rows[:middle], rows[middle:]
    return [part for half in halves for part in _fitting(half, input_ids_RT, lengths_R, max_tokens)]
