"""Weights reach other processes whole, and only if they are the policy's."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from lucidrl.collectors.parts import weights_of
from lucidrl.collectors.weights import SharedWeights, WeightReader, WeightWriter
from lucidrl.distributed.child_process import ChildProcess
from lucidrl.errors import ConfigError


class Mixed(nn.Module):
    """Parameters and buffers of several dtypes and sizes, a scalar and an empty one among them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.register_buffer("steps", torch.tensor([7, 8, 9]))
        self.register_buffer("is_warm", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.short = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))


def both_ends(weights):
    shared = SharedWeights.like(weights)
    return WeightWriter(shared), WeightReader(shared)


def test_what_is_published_is_what_is_read_to_the_bit():
    source = Mixed()
    writer, reader = both_ends(weights_of(source))
    writer.publish(weights_of(source), 1)
    weights, version = reader.read()
    assert version == 1
    expected = source.state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights[name].dtype == tensor.dtype
        assert torch.equal(weights[name], tensor), name


def test_a_version_is_read_once_and_only_the_newest_counts():
    writer, reader = both_ends({"w": torch.zeros(2)})
    assert reader.read() is None
    for version in (1, 2, 3):
        writer.publish({"w": torch.full((2,), float(version))}, version)
    weights, version = reader.read()
    assert version == 3
    assert weights["w"].tolist() == [3.0, 3.0]
    assert reader.read() is None


def test_a_version_that_is_published_again_is_read_again():
    writer, reader = both_ends({"w": torch.zeros(1)})
    for value in (1.0, 2.0):
        writer.publish({"w": torch.tensor([value])}, 5)
        weights, version = reader.read()
        assert (weights["w"].item(), version) == (value, 5)


def test_a_policy_without_weights_has_versions():
    writer, reader = both_ends({})
    writer.publish({}, 4)
    assert reader.read() == ({}, 4)


def test_module_state_dict_and_tensordict_name_the_same_weights():
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    expected = {name: tensor.tolist() for name, tensor in module.state_dict().items()}
    for source in (module, module.state_dict(), TensorDict.from_module(module)):
        assert {name: tensor.tolist() for name, tensor in weights_of(source).items()} == expected


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": torch.zeros(2)}, "the weights lack b of the policy; give all of its state dict"),
        ({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}, "the weights have c, which the policy has"),
        (
            {"a": torch.zeros(2), "b": torch.zeros(3, 1)},
            r"the weight b has shape \[3, 1\], but in the policy it is \[3",
        ),
    ],
)
def test_weights_of_another_policy_are_refused_and_change_nothing(weights, message):
    writer, reader = both_ends({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ConfigError, match=message):
        writer.publish(weights, 1)
    assert reader.read() is None


def test_a_policy_with_more_than_tensors_is_refused():
    class Calm(nn.Linear):
        def get_extra_state(self):
            return "calm"

    with pytest.raises(ConfigError, match="the weights have _extra_state, which is no tensor"):
        weights_of(Calm(1, 1))


def publish_without_rest(shared, seconds):
    torch.set_num_threads(1)
    writer = WeightWriter(shared)
    until, version = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        version += 1
        writer.publish({name: torch.full(shape, float(version)) for name, shape in shared.shapes.items()}, version)


def test_a_writer_that_never_rests_tears_nothing():
    shared = SharedWeights.like({"a": torch.zeros(50_000), "b": torch.zeros(3), "c": torch.zeros(200, 300)})
    process = ChildProcess(
        publish_without_rest,
        (shared, 2.0),
        name="writer",
        start_method="forkserver",
        imports_main=False,
        preload=["lucidrl.collectors.worker_main"],
    )
    reader, versions, torn = WeightReader(shared), [], []
    while not process.has_ended:
        if result := reader.read():
            weights, version = result
            versions.append(version)
            if any((tensor != version).any() for tensor in weights.values()):
                torn.append(version)
    assert process.join(1) == 0
    assert not torn
    assert versions == sorted(versions)
    assert len(versions) > 5  # on a busy machine; else hundreds


def test_threads_that_publish_at_once_do_not_mix():
    shared = SharedWeights.like({"a": torch.zeros(20_000)})
    writer, reader = WeightWriter(shared), WeightReader(shared)
    stop = threading.Event()

    def publish(version):
        while not stop.is_set():
            writer.publish({"a": torch.full((20_000,), float(version))}, version)

    threads = [threading.Thread(target=publish, args=(version,)) for version in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            if result := reader.read():
                weights, version = result
                assert (weights["a"] == version).all()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
