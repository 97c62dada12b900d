"""Objects arrive as they were sent, and their tensors are not copied through the pickle."""

from __future__ import annotations

import pickle
import socket
import threading

import pytest
import torch

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.workers.messages import Message, receive, send

BIG = 1 << 16
SHAPES = [(), (0, 3), (7,), (BIG,), (3, BIG // 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]


def through_a_socket(value):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=send, args=(ours, Message.of(value)))
        sender.start()
        received = receive(theirs).content()
        sender.join(60)
    return received


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_tensors_of_every_kind_arrive_equal_and_can_be_written(dtype, shape):
    tensor = torch.randn(shape).to(dtype)
    arrived = through_a_socket(tensor)
    assert arrived.dtype == dtype
    assert arrived.shape == tensor.shape
    assert torch.equal(arrived, tensor)
    arrived.zero_()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(300, 400).T,
        torch.randn(300, 400)[::2, 5:],
        torch.randn(BIG, dtype=torch.complex64).conj(),
        torch.randn(4, 5, requires_grad=True),
        torch.nn.Parameter(torch.randn(4, 5)),
        torch.eye(5).to_sparse(),
    ],
    ids=["transposed", "slice", "conjugate", "requires grad", "parameter", "sparse"],
)
def test_unusual_tensors_arrive_equal(tensor):
    arrived = through_a_socket(tensor)
    assert type(arrived) is type(tensor)
    assert arrived.requires_grad == tensor.requires_grad
    assert torch.equal(arrived.to_dense(), tensor.to_dense())


def test_a_tensor_that_occurs_twice_is_sent_once_and_stays_one():
    tensor = torch.randn(BIG)
    message = Message.of([tensor, {"again": tensor}])
    assert sum(len(part) for part in message.parts) < 1.1 * tensor.nbytes
    first, second = through_a_socket([tensor, {"again": tensor}])
    assert second["again"] is first


def test_large_tensors_are_not_copied_into_the_pickle():
    tensor = torch.randn(BIG)
    pickled, memory = Message.of({"tensor": tensor}).parts
    assert len(pickled) < 1000
    tensor[0] = 42.0
    assert torch.frombuffer(memory, dtype=torch.float32)[0] == 42.0


def test_a_view_takes_no_more_than_its_own_memory():
    message = Message.of(torch.randn(100, BIG)[3])
    assert sum(len(part) for part in message.parts) < 1.1 * BIG * 4


def test_batches_arrive_whole():
    batch = BatchedDataDict({"input_ids": torch.arange(12).view(3, 4), "names": ["a", "b", "c"]})
    arrived = through_a_socket(batch)
    assert torch.equal(arrived["input_ids"], batch["input_ids"])
    assert arrived["names"] == batch["names"]


def test_the_end_of_the_other_end_is_no_message():
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(b"\0\0\0")
        ours.close()
        with pytest.raises(EOFError):
            receive(theirs)


def test_what_cannot_be_pickled_says_so():
    with pytest.raises((AttributeError, pickle.PicklingError)):
        Message.of(lambda: None)
