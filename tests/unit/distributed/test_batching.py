"""Plans put each row into one group within the budget; packing and its inverse lose nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lucidrl.distributed.batching import (
    dynamic_plan,
    dynamic_shard_plans,
    even_parts,
    fixed_plan,
    grow_plan,
    inverse_permutation,
    packed_plan,
    round_up,
    shard_plan,
)
from lucidrl.distributed.packing import pack_rows
from lucidrl.errors import DataError

BUDGET = 64
lengths_within_budget = st.lists(st.integers(0, BUDGET), max_size=60)
# The machine that runs the tests may be busy.
unhurried = settings(deadline=None, max_examples=60)


def rows_of(plan):
    return [row for group in plan for row in group]


def padded_tokens(group, lengths, multiple=1):
    return len(group) * round_up(max([1, *(lengths[row] for row in group)]), multiple)


def partitions(rows):
    """All ways to put rows into groups."""
    if not rows:
        yield []
        return
    first, rest = rows[0], rows[1:]
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for index in range(len(smaller)):
            yield [*smaller[:index], [first, *smaller[index]], *smaller[index + 1 :]]


@unhurried
@given(num_rows=st.integers(0, 50), rows_per_batch=st.integers(1, 20))
def test_fixed_plan_keeps_order_and_only_the_last_group_is_short(num_rows, rows_per_batch):
    plan = fixed_plan(num_rows, rows_per_batch)
    assert rows_of(plan) == list(range(num_rows))
    assert all(len(group) == rows_per_batch for group in plan[:-1])
    assert all(plan)


@unhurried
@given(lengths=lengths_within_budget, multiple=st.sampled_from([1, 4, 16]))
def test_dynamic_plan_takes_each_row_once_within_budget(lengths, multiple):
    plan = dynamic_plan(lengths, BUDGET, multiple)
    assert sorted(rows_of(plan)) == list(range(len(lengths)))
    assert all(padded_tokens(group, lengths, multiple) <= BUDGET for group in plan)


@unhurried
@given(lengths=st.lists(st.integers(0, 12), max_size=6))
def test_no_other_plan_has_fewer_groups_or_as_few_with_less_padding(lengths):
    def cost(plan):
        return len(plan), sum(padded_tokens(group, lengths) for group in plan)

    allowed = [
        plan
        for plan in partitions(list(range(len(lengths))))
        if all(padded_tokens(group, lengths) <= 14 for group in plan)
    ]
    assert cost(dynamic_plan(lengths, 14)) == min(map(cost, allowed))


def test_dynamic_plan_puts_the_longest_rows_first_and_similar_rows_together():
    assert dynamic_plan([2, 30, 3, 29, 2], max_tokens=60) == [[1, 3], [0, 2, 4]]


def test_dynamic_plan_accepts_a_tensor_and_no_rows():
    assert dynamic_plan(torch.tensor([3, 4]), max_tokens=8) == [[0, 1]]
    assert dynamic_plan([], max_tokens=8) == []


@unhurried
@given(lengths=lengths_within_budget)
def test_packed_plan_takes_each_row_once_within_budget(lengths):
    plan = packed_plan(lengths, BUDGET)
    assert sorted(rows_of(plan)) == list(range(len(lengths)))
    assert all(group and sum(lengths[row] for row in group) <= BUDGET for group in plan)


@unhurried
@given(lengths=lengths_within_budget)
def test_packed_plan_is_first_fit_decreasing(lengths):
    bins: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        fitting = (group for group in bins if sum(lengths[r] for r in group) + lengths[row] <= BUDGET)
        group = next(fitting, None)
        if group is None:
            bins.append([row])
        else:
            group.append(row)
    assert packed_plan(lengths, BUDGET) == [sorted(group) for group in bins]


def test_packed_plan_of_many_rows_is_nearly_full():
    lengths = torch.randint(1, 1000, (20_000,), generator=torch.Generator().manual_seed(0))
    plan = packed_plan(lengths, max_tokens=4096)
    assert int(lengths.sum()) / (len(plan) * 4096) > 0.99


@pytest.mark.parametrize("make_plan", [dynamic_plan, packed_plan])
def test_a_row_over_the_budget_is_named_with_length_budget_and_remedy(make_plan):
    with pytest.raises(DataError, match=r"row 1 has 9 tokens.* budget of 8 .*raise the budget to at least 11"):
        make_plan([3, 9, 11], 8)


def test_a_row_that_only_rounding_puts_over_the_budget_says_so():
    with pytest.raises(DataError, match=r"12 tokens \(rounded up to a multiple of 4"):
        dynamic_plan([9], max_tokens=10, length_multiple=4)


@pytest.mark.parametrize("make_plan", [dynamic_plan, packed_plan])
def test_a_budget_below_one_is_refused(make_plan):
    with pytest.raises(DataError, match="at least 1"):
        make_plan([1], max_tokens=0)


def test_a_negative_length_is_refused():
    with pytest.raises(DataError, match="row 1 has length -1"):
        packed_plan([1, -1], 8)


@unhurried
@given(num_rows=st.integers(0, 40), num_parts=st.integers(1, 9))
def test_even_parts_cover_all_rows_and_differ_by_at_most_one(num_rows, num_parts):
    parts = even_parts(num_rows, num_parts)
    assert [row for start, end in parts for row in range(start, end)] == list(range(num_rows))
    sizes = [end - start for start, end in parts]
    assert len(sizes) == num_parts
    assert max(sizes) - min(sizes) <= 1


@unhurried
@given(plan=lengths_within_budget.map(lambda lengths: packed_plan(lengths, BUDGET)), data=st.data())
def test_a_grown_plan_has_the_requested_number_of_groups_and_only_splits(plan, data):
    num_groups = data.draw(st.integers(len(plan), len(rows_of(plan))))
    grown = grow_plan(plan, num_groups)
    assert len(grown) == num_groups
    assert all(grown)
    assert rows_of(grown) == rows_of(plan)


def test_a_plan_cannot_grow_beyond_one_row_a_group():
    with pytest.raises(DataError, match="2 rows cannot be split into 3"):
        grow_plan([[0, 1]], 3)


@unhurried
@given(lengths=st.lists(st.integers(0, BUDGET), max_size=48), shards=st.integers(1, 4), batches=st.integers(1, 4))
def test_shards_get_equally_many_groups_and_none_spans_two_global_batches(lengths, shards, batches):
    lengths = lengths[: len(lengths) // shards * shards]
    batch_size = shards * batches
    global_batches = shard_plan(len(lengths), shards, batch_size)
    plans = dynamic_shard_plans(lengths, global_batches, BUDGET)
    assert len(plans) == shards
    assert len({len(plan) for plan in plans}) == 1
    for plan in plans:
        assert sorted(rows_of(plan)) == list(range(len(lengths) // shards))
        assert all(len({row // batches for row in group}) == 1 for group in plan)


@unhurried
@given(st.permutations(range(12)))
def test_the_inverse_permutation_restores_the_order(order):
    shuffled = [order[i] * 10 for i in range(12)]
    assert [shuffled[i] for i in inverse_permutation(order)] == [i * 10 for i in range(12)]


@pytest.mark.parametrize("order", [[0, 0], [1, 2], [-1, 0]])
def test_what_is_not_a_permutation_has_no_inverse(order):
    with pytest.raises(DataError, match="repeated or out of range; pass a permutation of"):
        inverse_permutation(order)


def test_packed_rows_lie_end_to_end_and_positions_restart():
    packed = pack_rows(torch.tensor([[5, 6, 0], [7, 0, 0], [0, 0, 0], [8, 9, 10]]), torch.tensor([2, 1, 0, 3]))
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 9, 10]]
    assert packed.position_ids.tolist() == [[0, 1, 0, 0, 1, 2]]
    assert packed.cu_seqlens.tolist() == [0, 2, 3, 3, 6]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.flat_index.tolist() == [0, 1, 3, 9, 10, 11]
    assert (packed.max_length, packed.num_rows, packed.padded_length) == (3, 4, 3)


@unhurried
@given(lengths=st.lists(st.integers(0, 7), max_size=8), trailing=st.sampled_from([(), (2,), (2, 3)]))
def test_unpacking_what_was_packed_restores_rows_with_zeros_on_padding(lengths, trailing):
    values = torch.randn(len(lengths), 7, *trailing)
    lengths_R = torch.tensor(lengths, dtype=torch.int64)
    packed = pack_rows(torch.ones(len(lengths), 7, dtype=torch.int64), lengths_R)
    inside = (torch.arange(7) < lengths_R[:, None]).view(len(lengths), 7, *(1 for _ in trailing))
    assert torch.equal(packed.unpack(packed.pack(values)), values * inside)


def test_gradients_flow_through_packing_and_unpacking():
    packed = pack_rows(torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 1]))
    values = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(packed.unpack, values)
    grid = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    packed.pack(grid).sum().backward()
    assert grid.grad is not None
    assert grid.grad.tolist() == [[1, 1, 1], [1, 0, 0]]


def test_no_rows_can_be_packed():
    packed = pack_rows(torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert packed.cu_seqlens.tolist() == [0]
    assert packed.unpack(torch.zeros(0)).shape == (0, 4)


def test_packing_refuses_lengths_and_shapes_that_do_not_fit():
    with pytest.raises(DataError, match=r"length 4 does not fit .* width 3"):
        pack_rows(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([4]))
    packed = pack_rows(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([2]))
    with pytest.raises(DataError, match="without the leading batch dim"):
        packed.unpack(torch.zeros(1, 2))
    with pytest.raises(DataError, match=r"pass a tensor of \[1, 3"):
        packed.pack(torch.zeros(1, 2))
