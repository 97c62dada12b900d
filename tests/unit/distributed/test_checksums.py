"""A checksum changes with everything that can go wrong with a tensor."""

from __future__ import annotations

import pytest
import torch

from lucidrl.distributed.checksums import checksums_of, tensor_checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_elements_in_another_order_change_the_checksum(dtype):
    tensor = torch.arange(300).to(dtype).view(20, 15)
    same = tensor_checksum(tensor)
    assert tensor_checksum(tensor.clone()) == same
    swapped = tensor.clone()
    swapped[[3, 17]] = tensor[[17, 3]]
    others = [tensor.flip(0), swapped, tensor.t().contiguous().view(20, 15), tensor.view(15, 20), tensor[:19]]
    assert same not in {tensor_checksum(other) for other in others}


def test_a_sign_in_another_place_changes_the_checksum():
    tensor = torch.ones(64)
    tensor[5] = -1
    moved = tensor.roll(2)
    assert tensor_checksum(tensor) != tensor_checksum(moved)


def test_layout_in_memory_does_not_change_the_checksum():
    tensor = torch.randn(6, 4)
    assert tensor_checksum(tensor.t()) == tensor_checksum(tensor.t().contiguous())


def test_two_swapped_tensors_are_both_named():
    weights = {name: torch.randn(8, 8) for name in "abcd"}
    swapped = weights | {"b": weights["c"], "c": weights["b"]}
    own, other = checksums_of(weights.items()), checksums_of(swapped.items())
    assert [name for name in own if own[name] != other[name]] == ["b", "c"]


def test_the_bytes_decide_not_the_dtype_alone():
    tensor = torch.tensor([1.0, 2.0])
    assert tensor_checksum(tensor) != tensor_checksum(tensor.view(torch.int32))
    assert tensor_checksum(torch.empty(0)) != tensor_checksum(torch.empty(0, 3))
