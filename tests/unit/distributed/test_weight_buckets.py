"""Buckets hold every weight once, and both sides plan them alike."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from lucidrl.distributed.weight_buckets import (
    ALIGNMENT_BYTES,
    TensorInfo,
    checksum_of,
    copy_weights,
    plan_buckets,
)

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float64]
SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple)
INFOS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=12).map(
    lambda forms: [TensorInfo(f"weight {number}", *form) for number, form in enumerate(forms)]
)


@given(INFOS, st.integers(1, 5000))
def test_every_tensor_is_in_one_bucket_in_order_and_only_a_large_one_is_over_the_size(infos, bucket_bytes):
    buckets = plan_buckets(infos, bucket_bytes)
    assert [info for bucket in buckets for info in bucket.tensors] == infos
    for bucket in buckets:
        assert all(offset % ALIGNMENT_BYTES == 0 for offset in bucket.offsets)
        assert bucket.size_bytes <= bucket_bytes or len(bucket.tensors) == 1


@given(INFOS, st.integers(1, 5000))
def test_no_smaller_number_of_buckets_would_do_in_this_order(infos, bucket_bytes):
    buckets = plan_buckets(infos, bucket_bytes)
    for bucket, following in pairwise(buckets):
        (joined,) = plan_buckets([*bucket.tensors, following.tensors[0]], 1 << 40)
        assert joined.size_bytes > bucket_bytes


@given(INFOS, st.integers(1, 5000))
def test_what_was_packed_comes_out(infos, bucket_bytes):
    tensors = {info.name: torch.randn(info.shape).mul(10).to(info.dtype) for info in infos}
    found = {}
    for bucket in plan_buckets(infos, bucket_bytes):
        memory = torch.zeros(bucket.size_bytes, dtype=torch.uint8)
        bucket.pack((tensors[info.name] for info in bucket.tensors), memory)
        found |= dict(bucket.unpack(memory))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_packing_rounds_to_the_dtype_that_was_announced():
    tensor = torch.randn(7, 3)
    (bucket,) = plan_buckets([TensorInfo("weight", (7, 3), torch.bfloat16)], 1000)
    memory = torch.zeros(bucket.size_bytes, dtype=torch.uint8)
    bucket.pack([tensor], memory)
    ((_, packed),) = bucket.unpack(memory)
    assert torch.equal(packed, tensor.bfloat16())


def test_copies_of_any_layout_are_equal():
    values = torch.arange(24.0)
    for source in (values, values[:9], values[:12].view(3, 4).t(), values[3], values[:0], values.bfloat16()):
        target = torch.empty(source.shape)
        copy_weights([(target, source)])
        assert torch.equal(target, source.float())


def test_a_checksum_is_of_names_and_values_in_any_order():
    weights = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3, dtype=torch.bfloat16)}
    same = checksum_of(weights.items())
    assert checksum_of(reversed(weights.items())) == same
    changed = [
        {"a": weights["b"], "b": weights["a"]},
        {"a": weights["a"]},
        weights | {"a": weights["a"].view(torch.int32)},
        weights | {"a": weights["a"].view(2, 1)},
        weights | {"a": torch.tensor([1.0, 2.0000002])},
    ]
    assert same not in {checksum_of(other.items()) for other in changed}
