"""Weights of policies: their sources, and the refusal of other weights."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from lucidrl.collectors.multi import MultiSyncCollector
from lucidrl.collectors.weights import check_weights, weights_of
from lucidrl.errors import ConfigError
from tests.unit.envs.toys import Walk


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

    def forward(self, observation):
        sums = {f"sum.{name}": tensor.double().sum() for name, tensor in self.state_dict().items()}
        return {"action": torch.tensor([0, 1]), **sums}


def test_workers_use_exactly_the_published_weights():
    with MultiSyncCollector([Walk], Mixed(), frames_per_batch=1) as collector:
        for _ in range(2):
            source = Mixed()
            collector.update_policy_weights_(source)
            batch = collector.rollout()
            for name, tensor in source.state_dict().items():
                assert batch[f"sum.{name}"].item() == tensor.double().sum().item(), name


def test_module_state_dict_and_tensordict_name_the_same_weights():
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    expected = {name: tensor.tolist() for name, tensor in module.state_dict().items()}
    for source in (module, module.state_dict(), TensorDict.from_module(module)):
        assert {name: tensor.tolist() for name, tensor in weights_of(source).items()} == expected


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": torch.zeros(2)}, "the weights lack b of the policy; pass the policy's whole state dict"),
        ({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}, "the policy has no weights c; pass only"),
        (
            {"a": torch.zeros(2), "b": torch.zeros(3, 1)},
            r"the weight b has shape \[3, 1\], but the policy needs \[3",
        ),
    ],
)
def test_weights_of_another_policy_are_refused(weights, message):
    with pytest.raises(ConfigError, match=message):
        check_weights(weights, {"a": torch.Size([2]), "b": torch.Size([3])})


def test_a_policy_with_more_than_tensors_is_refused():
    class Calm(nn.Linear):
        def get_extra_state(self):
            return "calm"

    with pytest.raises(ConfigError, match=r"entries that are not tensors \(_extra_state\)"):
        weights_of(Calm(1, 1))
