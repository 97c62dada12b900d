"""A prefix tree stores every token of every row, and common tokens once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lucidrl.distributed import prefix_tree
from lucidrl.distributed.prefix_tree import share_prefixes, tree_plan
from lucidrl.errors import DataError

PROMPT = list(range(20, 40))


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded rows; padding holds a token that rows also contain."""
    lengths = torch.tensor([len(row) for row in rows])
    width = max(1, int(lengths.max()) + 2)
    return torch.tensor([row + [3] * (width - len(row)) for row in rows]), lengths


def num_stored(rows: list[list[int]]) -> int:
    tree = share_prefixes(*padded(rows))
    return sum(map(len, rows)) if tree is None else tree.input_ids.shape[1]


@pytest.fixture
def share_everything(monkeypatch):
    monkeypatch.setattr(prefix_tree, "MIN_SAVED_TOKENS", 1)


@st.composite
def branching_rows(draw) -> list[list[int]]:
    """Rows of a random tree of depth 5 at most, with equal rows, rows that are prefixes of others, and empty rows."""
    rows: list[list[int]] = [[]]
    for _ in range(draw(st.integers(0, 5))):
        parent = draw(st.lists(st.sampled_from(rows), min_size=1, max_size=4))
        rows += [row + draw(st.lists(st.integers(2, 5), max_size=6)) for row in parent]
    return draw(st.permutations(draw(st.lists(st.sampled_from(rows), min_size=1, max_size=12))))


@settings(max_examples=200, deadline=None)
@given(rows=branching_rows(), min_saved=st.sampled_from([1, 5, 16]))
def test_every_token_of_every_row_is_in_the_stream_after_its_predecessor(rows, min_saved):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "MIN_SAVED_TOKENS", min_saved)
        tree = share_prefixes(*padded(rows))
    distinct_prefixes = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    total = sum(map(len, rows))
    if tree is None:
        assert min_saved > 1 or len(distinct_prefixes) == total
        return
    assert len(distinct_prefixes) <= tree.input_ids.shape[1] < total
    if min_saved == 1:
        assert tree.input_ids.shape[1] == len(distinct_prefixes)
    for row, slots in zip(rows, tree.slots.tolist(), strict=True):
        path = slots[: len(row)]
        assert tree.input_ids[0, path].tolist() == row
        assert tree.position_ids[0, path].tolist() == list(range(len(row)))
        assert tree.previous[path].tolist() == [-1, *path][: len(row)]
    assert tree.is_token.sum() == total


def test_one_changed_token_of_a_shared_prompt_is_no_longer_shared():
    rows = [[*PROMPT, answer] for answer in (5, 6, 7, 8)]
    assert num_stored(rows) == len(PROMPT) + 4
    rows[2][0] += 1
    assert num_stored(rows) == 2 * len(PROMPT) + 4
    rows = [[*PROMPT, answer] for answer in (5, 6, 7, 8)]
    rows[2][-1] += 100
    rows[3][18] += 1
    assert num_stored(rows) == 18 + 3 * 3 + 3  # too few tokens are left that three rows have in common


def test_equal_padding_is_not_shared(share_everything):
    assert num_stored([[7, 8], [7], [7, 9, 3]]) == 4  # padding is 3
    assert num_stored([[7, 3, 5], [7]]) == 3


def test_rows_without_common_tokens_and_single_rows_have_no_tree():
    assert share_prefixes(*padded([[2, 3], [3, 3]])) is None
    assert share_prefixes(*padded([PROMPT])) is None
    assert share_prefixes(*padded([[], []])) is None


def test_segments_that_save_little_are_repeated():
    assert num_stored([[2, 3, 4], [2, 3, 5]]) == 6  # an extra call of the attention for 2 tokens is slower


def test_gradients_of_shared_tokens_are_sums_over_rows(share_everything):
    tree = share_prefixes(*padded([[5, 6], [5, 6], [5, 7]]))
    stream = torch.arange(3.0, requires_grad=True)
    unpacked = tree.unpack(stream)
    assert unpacked[~tree.is_token].eq(0).all()
    (unpacked * torch.tensor([[1.0], [10.0], [100.0]])).sum().backward()
    gradients = {int(token): float(gradient) for token, gradient in zip(tree.input_ids[0], stream.grad, strict=True)}
    assert gradients == {5: 111.0, 6: 11.0, 7: 100.0}


def group(prompt: int, samples: int, new: int) -> list[list[int]]:
    return [[*range(prompt, prompt + 20), *[sample + 2] * new] for sample in range(samples)]


def test_groups_stay_together_and_count_shared_tokens_once():
    rows = [row for prompt in (100, 200, 300) for row in group(prompt, samples=4, new=5)]
    plan = tree_plan(*padded(rows), max_tokens=80)  # a group stores 20 + 4 x 5 tokens
    assert sorted(map(sorted, plan)) == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_group_over_the_budget_is_split_and_equal_rows_stay_together():
    rows = [*group(100, samples=6, new=10), group(100, samples=1, new=10)[0], []]
    plan = tree_plan(*padded(rows), max_tokens=40)
    assert sorted(row for part in plan for row in part) == list(range(len(rows)))
    assert all(num_stored([rows[row] for row in part]) <= 40 for part in plan)
    assert len(plan) == 3
    assert any({0, 6} <= set(part) for part in plan)


@settings(max_examples=100, deadline=None)
@given(rows=branching_rows(), spare=st.integers(0, 20), min_saved=st.sampled_from([1, 5, 16]))
def test_plans_have_every_row_once_and_keep_the_budget(rows, spare, min_saved):
    max_tokens = max(1, *map(len, rows), 1) + spare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "MIN_SAVED_TOKENS", min_saved)
        plan = tree_plan(*padded(rows), max_tokens)
        if plan is None:
            assert share_prefixes(*padded(rows)) is None
            return
        assert sorted(row for part in plan for row in part) == list(range(len(rows)))
        assert all(num_stored([rows[row] for row in part]) <= max_tokens for part in plan)


def test_leftovers_of_groups_over_the_budget_are_merged():
    rows = [row for prompt in range(100, 900, 100) for row in group(prompt, samples=8, new=10)]
    plan = tree_plan(*padded(rows), max_tokens=90)  # a group stores 20 + 8 x 10 tokens
    assert len(plan) == 8 + 3  # 7 samples of each group, and three of the others at a time


def test_rows_of_a_micro_batch_have_a_limited_number_of_tokens():
    """Attention copies the keys and values of a prompt for every sample."""
    rows = [[*range(100, 180), sample + 2] for sample in range(64)]
    plan = tree_plan(*padded(rows), max_tokens=150)
    assert max(sum(len(rows[row]) for row in part) for part in plan) <= 8 * 150
    assert len(plan) == 5


def test_long_conversations_with_replies_that_leave_the_history_share_it():
    history = list(range(100, 100 + 39 * 100))
    rows = [[*history[: 100 * turn], *[turn + 2] * 100] for turn in range(1, 39)]
    plan = tree_plan(*padded(rows), max_tokens=4096)
    assert len(plan) <= 11
    assert sum(num_stored([rows[row] for row in part]) for part in plan) < 0.5 * sum(map(len, rows))


def test_a_row_over_the_budget_is_named():
    rows = [[*PROMPT, 5], [*PROMPT, 6], [*PROMPT, *[7] * 30]]
    with pytest.raises(DataError, match="row 2 has 50 tokens, more than the budget of 40"):
        tree_plan(*padded(rows), max_tokens=40)


@pytest.mark.slow
def test_a_long_chain_of_prefixes_is_no_deep_recursion(share_everything):
    rows = [[5] * length for length in range(1, 3000)]
    assert num_stored(rows) == 2999
    comb = [[*[5] * length, 6] for length in range(1, 1500)]
    assert num_stored(comb) == 2 * 1499
    assert len(tree_plan(*padded(comb), max_tokens=1501)) > 1


def test_a_row_that_ends_is_no_branch(share_everything):
    [batch] = share_prefixes(*padded([[5] * length for length in range(1, 20)])).batches
    assert len(batch.segments) == 1
