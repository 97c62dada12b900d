"""A receiver uses complete versions only, and names missing or wrong weights."""

from __future__ import annotations

import pytest
import torch

from lucidrl.distributed.shared_memory import SharedMemory
from lucidrl.distributed.weight_buckets import Bucket, BucketHandle, TensorInfo, checksum_of
from lucidrl.errors import RefitError
from lucidrl.models.generation.receiver import EngineReceiver, WeightReceiver
from lucidrl.models.loading import empty_model, load_model

DEVICE = "CPU-0"


@pytest.fixture
def model(tiny_model):
    return load_model(tiny_model("llama"), torch.float32)


@pytest.fixture
def receiver(model):
    return WeightReceiver(model, DEVICE)


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_commit_swaps_in_new_weights_and_keeps_tied_ones_tied(model, receiver):
    before = weights_of(model)
    receiver.begin(1)
    for name, weight in before.items():
        receiver.put(name, weight + 1)
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())
    receiver.commit(1)
    assert all(torch.equal(weight, before[name] + 1) for name, weight in weights_of(model).items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert receiver.version == 1


def test_versions_alternate_between_two_buffers(model, receiver):
    addresses = []
    for version in range(1, 4):
        receiver.begin(version)
        for name, weight in weights_of(model).items():
            receiver.put(name, weight)
        receiver.commit(version)
        addresses.append(model.model.norm.weight.data_ptr())
    assert addresses[0] == addresses[2] != addresses[1]


def test_an_incomplete_version_is_refused_and_the_next_refit_drops_it(model, receiver):
    before = receiver.checksum()
    receiver.begin(1)
    with pytest.raises(RefitError, match=r"incomplete: model\.embed_tokens\.weight is missing .*keeps version 0"):
        receiver.commit(1)
    for name, weight in weights_of(model).items():
        if name != "model.norm.weight":
            receiver.put(name, torch.zeros_like(weight))
    with pytest.raises(RefitError, match=r"model\.norm\.weight is missing \(1 of \d+ weights\)"):
        receiver.commit(1)
    assert receiver.checksum() == before
    receiver.begin(2)
    receiver.put("model.norm.weight", model.model.norm.weight)
    with pytest.raises(RefitError, match=r"embed_tokens\.weight is missing"):
        receiver.commit(2)


def test_commit_refuses_another_version_than_begin(receiver):
    with pytest.raises(RefitError, match="version 1 cannot be committed: the current refit is for version None"):
        receiver.commit(1)
    receiver.begin(2)
    with pytest.raises(RefitError, match="version 1 cannot be committed: the current refit is for version 2"):
        receiver.commit(1)


def test_weights_of_another_model_are_refused(receiver):
    receiver.begin(1)
    with pytest.raises(RefitError, match=r"this model has no weight model\.extra"):
        receiver.put("model.extra", torch.zeros(1))
    with pytest.raises(RefitError, match=r"has shape \(5,\) and torch\.float32 in the policy, but \(32,\)"):
        receiver.put("model.norm.weight", torch.zeros(5))


def test_handles_of_another_device_or_version_are_refused(receiver):
    memory = SharedMemory(4096)
    bucket = Bucket.of([TensorInfo("model.norm.weight", (32,), torch.float32)])
    handle = BucketHandle(bucket, memory.handle, version=1, digest=None)
    receiver.begin(2)
    with pytest.raises(RefitError, match="has weights for the devices CPU-1, but this generator is on CPU-0"):
        receiver.take({"CPU-1": (True, handle)})
    with pytest.raises(RefitError, match="a bucket has version 1, but version 2 is expected"):
        receiver.take({DEVICE: (True, handle)})
    memory.close()


# Weights for the loader of an engine


@pytest.mark.parametrize("name", ["llama", "llama_untied"])
def test_an_engine_loads_whole_versions_and_tied_weights_under_all_their_names(tiny_model, name):
    model = load_model(tiny_model(name), torch.float32)
    empty = empty_model(tiny_model(name), torch.float32)
    loaded: list[dict[str, torch.Tensor]] = []
    receiver = EngineReceiver(empty, torch.device("cpu"), DEVICE, lambda weights: loaded.append(dict(weights)))
    weights = weights_of(model)
    receiver.begin(1)
    for number, (name_of_weight, weight) in enumerate(weights.items()):
        if number == 1:
            with pytest.raises(RefitError, match="version 1 is incomplete"):
                receiver.commit(1)
        receiver.put(name_of_weight, weight)
    assert loaded == []
    receiver.commit(1)
    [version] = loaded
    assert version.keys() == {*weights, "lm_head.weight"}
    assert all(torch.equal(version[name_of_weight], weight) for name_of_weight, weight in weights.items())
    assert torch.equal(version["lm_head.weight"], model.lm_head.weight)
    assert receiver.checksum() == checksum_of(weights.items())


def test_an_engine_copies_every_version_to_the_same_memory(model):
    addresses = []
    receiver = EngineReceiver(
        model,
        torch.device("cpu"),
        DEVICE,
        lambda weights: addresses.append(dict(weights)["model.norm.weight"].data_ptr()),
    )
    for version in (1, 2, 3):
        receiver.begin(version)
        for name, weight in weights_of(model).items():
            receiver.put(name, weight)
        receiver.commit(version)
    assert len(set(addresses)) == 1
