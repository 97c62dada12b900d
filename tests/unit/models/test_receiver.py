"""A receiver computes with whole versions only, and says what is missing or wrong."""

from __future__ import annotations

import pytest
import torch

from lucidrl.distributed.shared_memory import SharedMemory
from lucidrl.distributed.weight_buckets import Bucket, BucketHandle, TensorInfo
from lucidrl.errors import RefitError
from lucidrl.models.generation.receiver import WeightReceiver
from lucidrl.models.loading import load_model

DEVICE = "CPU-0"


@pytest.fixture
def model(tiny_model):
    return load_model(tiny_model("llama"), torch.float32)


@pytest.fixture
def receiver(model):
    return WeightReceiver(model, DEVICE)


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_new_weights_are_used_from_commit_on_and_tied_ones_stay_tied(model, receiver):
    before = weights_of(model)
    receiver.begin(1)
    for name, weight in before.items():
        receiver.put(name, weight + 1)
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())
    receiver.commit(1)
    assert all(torch.equal(weight, before[name] + 1) for name, weight in weights_of(model).items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert receiver.version == 1


def test_versions_change_places_without_a_copy(model, receiver):
    places = []
    for version in range(1, 4):
        receiver.begin(version)
        for name, weight in weights_of(model).items():
            receiver.put(name, weight)
        receiver.commit(version)
        places.append(model.model.norm.weight.data_ptr())
    assert places[0] == places[2] != places[1]


def test_an_incomplete_version_is_not_taken_and_dropped_by_the_next(model, receiver):
    before = receiver.checksum()
    receiver.begin(1)
    with pytest.raises(RefitError, match=r"not complete: model\.embed_tokens\.weight has not come .*keeps version 0"):
        receiver.commit(1)
    for name, weight in weights_of(model).items():
        if name != "model.norm.weight":
            receiver.put(name, torch.zeros_like(weight))
    with pytest.raises(RefitError, match=r"model\.norm\.weight has not come \(1 of \d+ weights are missing\)"):
        receiver.commit(1)
    assert receiver.checksum() == before
    receiver.begin(2)
    receiver.put("model.norm.weight", model.model.norm.weight)
    with pytest.raises(RefitError, match=r"embed_tokens\.weight has not come"):
        receiver.commit(2)


def test_a_commit_is_of_the_version_that_was_begun(receiver):
    with pytest.raises(RefitError, match="version 1 cannot be taken: None is expected"):
        receiver.commit(1)
    receiver.begin(2)
    with pytest.raises(RefitError, match="version 1 cannot be taken: 2 is expected"):
        receiver.commit(1)


def test_weights_of_another_model_are_refused(receiver):
    receiver.begin(1)
    with pytest.raises(RefitError, match=r"model\.extra came, which this model does not have"):
        receiver.put("model.extra", torch.zeros(1))
    with pytest.raises(RefitError, match=r"norm\.weight came with shape \(5,\) and torch\.float32, and has \(32,\)"):
        receiver.put("model.norm.weight", torch.zeros(5))


def test_handles_of_another_device_or_version_are_refused(receiver):
    memory = SharedMemory(4096)
    bucket = Bucket.of([TensorInfo("model.norm.weight", (32,), torch.float32)])
    handle = BucketHandle(bucket, memory.handle, version=1, digest=None)
    receiver.begin(2)
    with pytest.raises(RefitError, match="left weights for the devices CPU-1, but this generator is on CPU-0"):
        receiver.take({"CPU-1": (True, handle)})
    with pytest.raises(RefitError, match="weights of version 1 came while version 2 is expected"):
        receiver.take({DEVICE: (True, handle)})
    memory.close()
