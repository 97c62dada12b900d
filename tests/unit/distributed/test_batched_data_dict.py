"""Batches keep rows together, and kinds decide what is padded and cut."""

from __future__ import annotations

import copy
import pickle
from typing import Any, TypedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lucidrl.distributed.batched_data_dict import BatchedDataDict, ColumnKind, DynamicBatchingArgs
from lucidrl.distributed.batching import dynamic_plan, inverse_permutation
from lucidrl.errors import DataError

KINDS = {"pixels": ColumnKind.ROW, "frames": ColumnKind.RAGGED}


def make_batch(lengths=(3, 5, 1, 2), width=6, first_id=0) -> BatchedDataDict[Any]:
    """One column of each kind; every value names its row."""
    ids = torch.arange(first_id, first_id + len(lengths))
    return BatchedDataDict(
        {
            "input_ids": ids[:, None].expand(-1, width).clone(),
            "input_lengths": torch.tensor(lengths, dtype=torch.int64),
            "pixels": ids[:, None, None].expand(-1, 9, 2).clone(),
            "frames": [torch.full((i % 3 + 1,), i) for i in ids.tolist()],
            "row": ids.tolist(),
        },
        kinds=KINDS,
    )


def assert_rows(batch, rows):
    """Every column holds these rows, and the kinds are those of `make_batch`."""
    assert batch["row"] == rows
    assert batch["input_ids"].shape[0] == batch["input_lengths"].shape[0] == batch.size == len(rows)
    assert (batch["input_ids"] == torch.tensor(rows, dtype=torch.int64)[:, None]).all()
    assert batch["pixels"][:, 0, 0].tolist() == rows
    assert batch["pixels"].shape[1:] == (9, 2)
    assert [int(frame[0]) for frame in batch["frames"]] == rows
    assert {name: batch.kind(name) for name in KINDS} == KINDS


def dynamic_args(max_tokens, multiple=1) -> DynamicBatchingArgs:
    return {
        "max_tokens_per_microbatch": max_tokens,
        "sequence_length_round": multiple,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }


# The mapping.


def test_default_kinds_follow_the_type():
    batch = BatchedDataDict({"a": torch.zeros(2, 3), "b": torch.zeros(2), "c": ["x", "y"]})
    assert [batch.kind(name) for name in batch] == [ColumnKind.TOKEN, ColumnKind.ROW, ColumnKind.ROW]


def test_it_is_a_mapping_of_columns():
    batch = make_batch()
    assert list(batch.keys()) == ["input_ids", "input_lengths", "pixels", "frames", "row"]
    assert len(batch) == 5
    assert "row" in batch
    assert batch.get("rows") is None
    assert batch.pop("row") == [0, 1, 2, 3]
    assert "row" not in batch
    plain = batch.get_dict()
    plain.clear()
    assert len(batch) == 4


def test_a_missing_key_names_the_nearest():
    with pytest.raises(KeyError, match="no column 'input_id'; nearest: input_ids"):
        make_batch()["input_id"]
    with pytest.raises(KeyError, match="no column 'zzz'; there are: input_ids, "):
        del make_batch()["zzz"]


def test_different_numbers_of_rows_are_refused_with_both_names_and_sizes():
    with pytest.raises(DataError, match="'b' has 3 rows, 'a' has 2"):
        BatchedDataDict({"a": torch.zeros(2), "b": ["x", "y", "z"]})
    batch = make_batch()
    with pytest.raises(DataError, match="'reward' has 3 rows, 'input_ids' has 4"):
        batch["reward"] = torch.zeros(3)
    assert "reward" not in batch


def test_different_token_lengths_are_refused_unless_declared_without_time():
    with pytest.raises(DataError, match=r"token column 'b' has length 4, 'a' has 3; .* kinds={name: ColumnKind\.ROW}"):
        BatchedDataDict({"a": torch.zeros(2, 3), "b": torch.zeros(2, 4)})
    BatchedDataDict({"a": torch.zeros(2, 3), "b": torch.zeros(2, 4)}, kinds={"b": ColumnKind.ROW})


@pytest.mark.parametrize(
    ("value", "kind", "found"),
    [
        (torch.tensor(1.0), ColumnKind.ROW, "float32"),
        ("ab", ColumnKind.ROW, "a str"),
        (torch.zeros(2), ColumnKind.TOKEN, "declared token"),
        (torch.zeros(2, 2), ColumnKind.RAGGED, "declared ragged"),
        ([1, 2], ColumnKind.RAGGED, "declared ragged"),
    ],
)
def test_a_value_that_is_not_of_its_kind_is_refused(value, kind, found):
    with pytest.raises(DataError, match=f"column 'a' .*{found}"):
        BatchedDataDict({"a": value}, kinds={"a": kind})


def test_update_changes_all_or_nothing_and_takes_kinds_along():
    batch = BatchedDataDict({"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)})
    with pytest.raises(DataError):
        batch.update(a=torch.zeros(2, 5))
    assert batch["a"].shape == (2, 3)
    batch.update({"a": torch.zeros(2, 5), "b": torch.zeros(2, 5)})
    batch.update(BatchedDataDict({"c": torch.zeros(2, 9)}, kinds={"c": ColumnKind.ROW}))
    assert batch["b"].shape == (2, 5)
    assert batch.kind("c") is ColumnKind.ROW


def test_a_kind_can_be_declared_before_its_column_is_set():
    batch = BatchedDataDict({"a": torch.zeros(2, 3)}, kinds={"pixels": ColumnKind.ROW})
    batch["pixels"] = torch.zeros(2, 8, 8)
    assert batch.kind("pixels") is ColumnKind.ROW


def test_a_copy_changes_independently():
    batch = make_batch()
    for duplicate in (batch.copy(), copy.copy(batch), BatchedDataDict(batch)):
        duplicate.reorder_data([3, 2, 1, 0])
        duplicate.truncate_tensors(1, 2)
        duplicate["more"] = torch.zeros(4)
    batch.copy()["row"].append("not a row")
    assert_rows(batch, [0, 1, 2, 3])
    assert batch["input_ids"].shape[1] == 6
    assert "more" not in batch


def test_pickling_restores_columns_and_kinds():
    class LocalSpec(TypedDict):
        """Cannot be pickled itself, being local."""

    batch = BatchedDataDict[LocalSpec](make_batch())
    assert_rows(pickle.loads(pickle.dumps(batch)), [0, 1, 2, 3])


def test_a_pickled_slice_does_not_carry_the_whole_batch():
    columns = {"a": torch.zeros(1000, 100), "b": list(torch.zeros(1000, 100))}
    batch = BatchedDataDict(columns, kinds={"b": ColumnKind.RAGGED})
    assert len(pickle.dumps(batch.slice(0, 2))) < 10_000


def test_to_moves_ragged_tensors_too_and_leaves_the_source():
    batch = make_batch()
    moved = batch.to("meta")
    assert moved["input_ids"].is_meta
    assert all(frame.is_meta for frame in moved["frames"])
    assert moved.kind("pixels") is ColumnKind.ROW
    assert_rows(batch, [0, 1, 2, 3])


def test_repr_names_columns_with_shape_and_kind():
    assert repr(BatchedDataDict({"a": torch.zeros(2, 3), "b": [1, 2]})) == (
        "BatchedDataDict(a: float32[2, 3] token, b: list[2] row)"
    )


# Rows.


def test_slices_and_batches_hold_the_requested_rows_and_the_last_may_be_short():
    batch = make_batch()
    assert_rows(batch.slice(1, 3), [1, 2])
    assert_rows(batch.get_batch(0, 3), [0, 1, 2])
    assert_rows(batch.get_batch(1, 3), [3])
    assert [part["row"] for part in batch.make_microbatch_iterator(3)] == [[0, 1, 2], [3]]
    assert [part["row"] for part in (batch.chunk(rank, 3) for rank in range(3))] == [[0, 1], [2], [3]]


@pytest.mark.parametrize(
    "call",
    [
        lambda batch: batch.slice(3, 1),
        lambda batch: batch.get_batch(2, 3),
        lambda batch: batch.chunk(2, 2),
        lambda batch: batch.select_indices([0, 4]),
        lambda batch: batch.select_indices([-1]),
        lambda batch: batch.select_indices(torch.tensor([True, False, True, False])),
        lambda batch: batch.reorder_data([0, 1, 2]),
        lambda batch: batch.reorder_data([0, 1, 2, 2]),
        lambda batch: batch.truncate_tensors(0, 2),
        lambda batch: list(batch.make_microbatch_iterator(0)),
        lambda batch: batch.make_microbatch_iterator_with_dynamic_shapes(),
    ],
)
def test_what_cannot_be_meant_is_refused(call):
    with pytest.raises(DataError):
        call(make_batch())


def test_selected_rows_have_the_order_of_the_indices():
    assert_rows(make_batch().select_indices(torch.tensor([2, 0, 2])), [2, 0, 2])


@settings(deadline=None)
@given(st.permutations(range(4)))
def test_reordering_and_its_inverse_restore_the_batch(order):
    batch = make_batch()
    batch.reorder_data(order)
    assert_rows(batch, list(order))
    batch.reorder_data(inverse_permutation(order))
    assert_rows(batch, [0, 1, 2, 3])


def test_repeated_rows_are_adjacent_and_share_nothing():
    batch = BatchedDataDict({"row": torch.arange(2), "messages": [["hello"], ["bye"]]})
    repeated = batch.repeat_interleave(2)
    repeated["messages"][0].append("again")
    assert repeated["row"].tolist() == [0, 0, 1, 1]
    assert repeated["messages"] == [["hello", "again"], ["hello"], ["bye"], ["bye"]]
    assert batch["messages"] == [["hello"], ["bye"]]
    assert_rows(make_batch().repeat_interleave(2), [0, 0, 1, 1, 2, 2, 3, 3])


def test_batches_are_put_together_with_only_token_columns_padded():
    first, second = make_batch(lengths=(3, 2), width=3), make_batch(lengths=(5,), width=5, first_id=2)
    joined = BatchedDataDict.from_batches([first, second], pad_value_dict={"input_ids": -7})
    assert joined["input_ids"].tolist() == [[0, 0, 0, -7, -7], [1, 1, 1, -7, -7], [2, 2, 2, 2, 2]]
    joined.truncate_tensors(1, 3)
    assert_rows(joined, [0, 1, 2])


def test_padding_is_zero_by_default_and_keeps_dtype_and_trailing_dims():
    joined = BatchedDataDict.from_batches([{"a": torch.ones(1, 1, 2).bool()}, {"a": torch.ones(1, 2, 2).bool()}])
    assert joined["a"].tolist() == [[[True, True], [False, False]], [[True, True], [True, True]]]


def test_batches_that_do_not_match_are_refused():
    with pytest.raises(DataError, match="batch 0 and batch 1 differ in the columns a, b"):
        BatchedDataDict.from_batches([{"a": [1]}, {"b": [1]}])
    with pytest.raises(DataError, match="'a' differs between batches"):
        BatchedDataDict.from_batches([{"a": [1]}, {"a": torch.zeros(1)}])
    with pytest.raises(DataError, match=r"'a' cannot be concatenated from float32\[1, 2, 3\], float32\[1, 2, 4\]"):
        BatchedDataDict.from_batches([{"a": torch.zeros(1, 2, 3)}, {"a": torch.zeros(1, 2, 4)}])
    with pytest.raises(DataError, match="no batches"):
        BatchedDataDict.from_batches([])


# Shards and micro-batches.


def test_each_shard_gets_its_part_of_every_global_batch():
    batch = make_batch(lengths=(1,) * 8)
    shards = batch.shard_by_batch_size(2, batch_size=4)
    assert_rows(shards[0], [0, 1, 4, 5])
    assert_rows(shards[1], [2, 3, 6, 7])
    assert [shard["row"] for shard in batch.shard_by_batch_size(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_last_global_batch_may_be_short_and_still_reaches_every_shard():
    shards = make_batch(lengths=(1,) * 6).shard_by_batch_size(2, batch_size=4)
    assert [shard["row"] for shard in shards] == [[0, 1, 4], [2, 3, 5]]


def test_uneven_shards_must_be_allowed_and_then_lose_no_row():
    batch = make_batch(lengths=(1,) * 5)
    with pytest.raises(DataError, match="global batch of 5 rows does not split evenly over 2 shards"):
        batch.shard_by_batch_size(2)
    assert [shard["row"] for shard in batch.shard_by_batch_size(2, allow_uneven_shards=True)] == [[0, 1, 2], [3, 4]]
    assert [s.size for s in batch.shard_by_batch_size(7, allow_uneven_shards=True)] == [1, 1, 1, 1, 1, 0, 0]
    with pytest.raises(DataError, match="set only one of the two"):
        batch.shard_by_batch_size(2, allow_uneven_shards=True, dynamic_batching_args=dynamic_args(8))


def test_microbatches_are_as_long_as_their_longest_row():
    batch = make_batch(lengths=(3, 5, 1, 2))
    parts = list(batch.microbatches(dynamic_plan(batch["input_lengths"], max_tokens=10)))
    assert [part["input_ids"].shape for part in parts] == [(2, 5), (2, 2)]
    for part, rows in zip(parts, [[0, 1], [2, 3]], strict=True):
        assert_rows(part, rows)
    assert [part["input_ids"].shape[1] for part in batch.microbatches([[2, 3], [0, 1]], length_multiple=4)] == [4, 6]
    assert batch["input_ids"].shape[1] == 6


def test_a_microbatch_of_empty_rows_keeps_one_token():
    (part,) = make_batch(lengths=(0, 0)).microbatches([[0, 1]])
    assert part["input_ids"].shape == (2, 1)


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 16), min_size=4, max_size=24).map(lambda x: x[: len(x) // 4 * 4]),
    multiple=st.sampled_from([1, 4]),
)
def test_dynamic_microbatches_of_shards_fit_the_budget_and_agree_in_number(lengths, multiple):
    batch = make_batch(lengths=lengths, width=16)
    shards = batch.shard_by_batch_size(2, batch_size=4, dynamic_batching_args=dynamic_args(20, multiple))
    counts = []
    for shard in shards:
        global_batches = [shard.get_batch(index, 2) for index in range(len(lengths) // 4)]
        parts = [list(each.make_microbatch_iterator_with_dynamic_shapes()) for each in global_batches]
        counts.append([len(each) for each in parts])
        assert all(part["input_ids"].numel() <= 20 for each in parts for part in each)
        assert all((part["input_lengths"] <= part["input_ids"].shape[1]).all() for each in parts for part in each)
        for whole, each in zip(global_batches, parts, strict=True):
            assert sorted(row for part in each for row in part["row"]) == whole["row"]
    assert counts[0] == counts[1]


def test_the_plan_survives_pickling_and_new_columns_but_not_other_rows():
    args = dynamic_args(10)
    shard, _ = make_batch(lengths=(5,) * 8).shard_by_batch_size(2, batch_size=8, dynamic_batching_args=args)
    shard["advantages"] = torch.zeros(4)
    restored = pickle.loads(pickle.dumps(shard)).to("cpu")
    assert [part["row"] for part in restored.make_microbatch_iterator_with_dynamic_shapes()] == [[2, 3], [0, 1]]
    reordered = shard.copy()
    reordered.reorder_data([3, 2, 1, 0])
    replaced = shard.copy()
    replaced.update(make_batch(lengths=(5,)), advantages=torch.zeros(1))
    for other in (shard.slice(0, 3), shard.repeat_interleave(1), shard.select_indices([1, 0]), reordered, replaced):
        with pytest.raises(DataError, match="no plan"):
            other.make_microbatch_iterator_with_dynamic_shapes()


def test_a_row_over_the_budget_is_named_by_its_number_in_the_whole_batch():
    batch = make_batch(lengths=(1, 1, 1, 6))
    with pytest.raises(DataError, match="row 3 has 6 tokens, more than the budget of 5"):
        batch.shard_by_batch_size(2, dynamic_batching_args=dynamic_args(5))
    batch["input_lengths"] = torch.tensor([1, 1, 1, 7])
    with pytest.raises(DataError, match="row 3 has input_lengths=7, but input_ids has length 6"):
        batch.shard_by_batch_size(2, dynamic_batching_args=dynamic_args(50))


def test_an_empty_batch_goes_through_every_method():
    empty = make_batch().slice(0, 0)
    assert_rows(empty, [])
    assert empty["input_ids"].shape == (0, 6)
    assert_rows(empty.repeat_interleave(3), [])
    assert_rows(empty.select_indices([]), [])
    assert_rows(BatchedDataDict.from_batches([empty, make_batch()]), [0, 1, 2, 3])
    assert list(empty.make_microbatch_iterator(2)) == list(empty.microbatches([])) == []
    for shard in empty.shard_by_batch_size(2, dynamic_batching_args=dynamic_args(8)):
        assert list(shard.make_microbatch_iterator_with_dynamic_shapes()) == []
    assert BatchedDataDict().size == 0
