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

MOST_COPIES = 8
"""Most tokens of the rows of a micro-batch, as a multiple of its token budget."""


@dataclass(eq=False)
class Segment:
    """Tokens `start` to `end` of the rows in `rows`; some rows may end before."""

    start: int
    """Position of the first token, equal to the number of tokens before the segment."""
    end: int
    rows: list[int]
    """All rows with tokens of the segment; the last one has all of them."""
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
    # A row that ends needs no branch: it is the beginning of the next row.
    diverging = [index for index in range(1, len(order)) if common[index] < lengths[order[index - 1]]]

    roots: list[Segment] = []
    # (first and last index in `order`, those at which rows diverge, position of the first token to store, parent)
    pending: list[tuple[int, int, list[int], int, Segment | None]] = []
    if order:
        pending.append((0, len(order), diverging, 0, None))
    while pending:
        first, last, diverging, start, parent = pending.pop()
        end = min((common[index] for index in diverging), default=lengths[order[last - 1]])
        splits = [index for index in diverging if common[index] == end]
        is_worth_it = not splits or (end - start) * len(splits) >= MIN_SAVED_TOKENS
        if is_worth_it:
            segment = Segment(start, end, order[first:last], parent)
            (roots if parent is None else parent.children).append(segment)
            first = next((index for index in range(first, last) if lengths[order[index]] > end), last)
            start, parent = end, segment
        if splits:
            for part_first, part_last in pairwise([first, *splits, last]):
                inside = [index for index in diverging if part_first < index < part_last]
                pending.append((part_first, part_last, inside, start, parent))
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
class SegmentBatch:
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
    batches: tuple[SegmentBatch, ...]
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
    batches = []
    num_stored = 0
    for segments in _batches(roots):
        start, longest = segments[0].start, max(segment.end - segment.start for segment in segments)
        own_lengths = torch.tensor([segment.end - segment.start for segment in segments], device=device)
        rows = torch.tensor([segment.rows[-1] for segment in segments], device=device)
        batches.append(
            SegmentBatch(tuple(segments), pack_rows(input_ids_RT[rows, start : start + longest], own_lengths))
        )
        for segment in segments:
            length = segment.end - segment.start
            slots_RT[segment.rows, segment.start : segment.end] = np.arange(num_stored, num_stored + length)
            previous[num_stored] = slots_RT[segment.rows[-1], segment.start - 1] if segment.start else -1
            num_stored += length
    return PrefixTree(
        input_ids=torch.cat([batch.packed.input_ids for batch in batches], dim=1),
        position_ids=torch.cat([batch.packed.position_ids + batch.start for batch in batches], dim=1),
        previous=torch.from_numpy(previous).to(device),
        slots=torch.from_numpy(slots_RT).to(device) * is_token_RT,
        is_token=is_token_RT,
        batches=tuple(batches),
    )


def _batches(roots: list[Segment]) -> Iterator[list[Segment]]:
    """Yield the segments of each `SegmentBatch`, level by level."""
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

    Attention copies the keys and values of shared tokens for every row, so the rows of a group have at most
    `MOST_COPIES` * `max_tokens` tokens in all.

    Returns:
        None if rows have nothing to share.

    Raises:
        DataError: if a row alone is over the budget.
    """
    roots = find_segments(input_ids_RT, lengths_R)
    if sum(root.num_tokens for root in roots) == int(lengths_R.sum()):
        return None
    lengths = lengths_R.tolist()
    packed_plan(lengths, max_tokens)  # names a row that is over the budget
    groups = [
        fitting
        for root in roots
        for group in _consecutive_groups(root, lengths, max_tokens)
        for fitting in _fitting(group, input_ids_RT, lengths_R, max_tokens)
    ]
    groups[0] += [row for row, length in enumerate(lengths) if not length]
    # Merge groups as if they were rows; a group of many tokens counts as more than it stores.
    sizes = [
        max(num_stored_tokens(group, input_ids_RT, lengths_R), -(-sum(lengths[row] for row in group) // MOST_COPIES))
        for group in groups
    ]
    plan = packed_plan(sizes, max_tokens)
    return [sorted(row for index in part for row in groups[index]) for part in plan]


def _consecutive_groups(root: Segment, lengths: Sequence[int], max_tokens: int) -> Plan:
    """Split the rows of a tree, in the order of the tree, into groups that store at most `max_tokens` tokens."""
    last_segment: dict[int, Segment] = {}  # of each row
    for segment in _descendants([root]):
        last_segment.update(dict.fromkeys(segment.rows, segment))
    groups: Plan = []
    stored: set[Segment] = set()
    num_stored = num_copied = max_tokens + 1  # the first row begins a group
    for row in root.rows:
        path = [last_segment[row]]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        new = sum(segment.end - segment.start for segment in path if segment not in stored)
        if num_stored + new > max_tokens or num_copied + lengths[row] > MOST_COPIES * max_tokens:
            groups.append([])
            stored, num_stored, num_copied = set(), 0, 0
            new = path[0].end
        groups[-1].append(row)
        stored.update(path)
        num_stored += new
        num_copied += lengths[row]
    return groups


def _fitting(rows: list[int], input_ids_RT: torch.Tensor, lengths_R: torch.Tensor, max_tokens: int) -> Plan:
    """Halve a group until it fits: with fewer rows, a segment can fall below `MIN_SAVED_TOKENS`."""
    if len(rows) == 1 or num_stored_tokens(rows, input_ids_RT, lengths_R) <= max_tokens:
        return [rows]
    middle = len(rows) // 2
    halves = rows[:middle], rows[middle:]
    return [part for half in halves for part in _fitting(half, input_ids_RT, lengths_R, max_tokens)]


def num_stored_tokens(rows: list[int], input_ids_RT: torch.Tensor, lengths_R: torch.Tensor) -> int:
    """Return how many tokens a micro-batch of these rows stores."""
    return sum(root.num_tokens for root in find_segments(input_ids_RT[rows], lengths_R[rows]))
