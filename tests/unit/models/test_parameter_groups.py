"""Parameter groups: learning rates and weight decays by patterns of weight names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from lucidrl.errors import ConfigError
from lucidrl.models.optim import PolicyOptimizer
from lucidrl.models.parameter_groups import WeightInfo
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.fsdp1_policy_worker import FSDP1PolicyWorker
from lucidrl.models.policy.policy import check_optimizer

NAMES = ["layers.0.norm", "layers.0.weight", "layers.1.norm", "layers.1.weight"]


def config_of(*groups: dict[str, Any], lr: float = 0.1, **fields: Any) -> PolicyConfig:
    optimizer = {"name": "torch.optim.AdamW", "kwargs": {"lr": lr, "weight_decay": 0.5}, "groups": groups}
    return PolicyConfig(**{"optimizer": optimizer, "max_grad_norm": None, **fields})


def make(config: PolicyConfig) -> tuple[list[nn.Parameter], PolicyOptimizer]:
    parameters = [nn.Parameter(torch.full((2,), float(number))) for number in range(1, 1 + len(NAMES))]
    return parameters, PolicyOptimizer(parameters, config, weights=[WeightInfo(name) for name in NAMES])


def gradient(number: int, step: int) -> float:
    return (-1.0) ** (number * step) * (number + step)


def advance(parameters: list[nn.Parameter], optimizer: PolicyOptimizer, num_steps: int = 1) -> list[list[float]]:
    for step in range(num_steps):
        sum((parameter * gradient(number, step)).sum() for number, parameter in enumerate(parameters, 1)).backward()
        optimizer.step()
        optimizer.schedule()
    return [parameter.tolist() for parameter in parameters]


def by_hand(lr: list[float], weight_decay: list[float], factors: list[float]) -> list[list[float]]:
    """What one torch optimizer per weight computes."""
    values = []
    for number, (rate, decay) in enumerate(zip(lr, weight_decay, strict=True), 1):
        weight = nn.Parameter(torch.full((2,), float(number)))
        optimizer = torch.optim.AdamW([weight], lr=rate, weight_decay=decay, fused=True)
        for step, factor in enumerate(factors):
            optimizer.param_groups[0]["lr"] = rate * factor
            weight.grad = torch.full((2,), gradient(number, step))
            optimizer.step()
        values.append(weight.tolist())
    return values


def test_every_group_has_its_settings_and_the_schedule_scales_each():
    groups = [{"pattern": "*norm", "weight_decay": 0.0}, {"pattern": "layers.1.*", "lr": 0.01}]
    parameters, optimizer = make(config_of(*groups, scheduler="linear").with_total_steps(4))
    found = advance(parameters, optimizer, 3)
    # layers.1.norm belongs to the first group that matches it.
    assert found == by_hand([0.1, 0.1, 0.1, 0.01], [0.0, 0.5, 0.0, 0.5], [1.0, 0.75, 0.5])
    assert optimizer.learning_rate == pytest.approx(0.1 * 0.25)


def test_groups_may_cover_all_weights():
    parameters, optimizer = make(config_of({"pattern": "*", "lr": 0.01, "weight_decay": 0.0}))
    assert advance(parameters, optimizer) == by_hand([0.01] * 4, [0.0] * 4, [1.0])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_resume_is_bit_exact_and_takes_changed_groups(precision):
    groups = [{"pattern": "*norm", "weight_decay": 0.0}, {"pattern": "layers.1.*", "lr": 0.01}]
    config = config_of(*groups, scheduler="linear", precision=precision).with_total_steps(9)
    parameters, optimizer = make(config)
    advance(parameters, optimizer, 2)
    state, values = copy.deepcopy(optimizer.state_dict()), [parameter.detach().clone() for parameter in parameters]

    def resumed(config: PolicyConfig) -> list[list[float]]:
        own, second = make(config)
        for parameter, value in zip(own, values, strict=True):
            parameter.data.copy_(value)
        second.load_state_dict(copy.deepcopy(state))
        return advance(own, second, 2)

    without_groups = config_of(scheduler="linear", precision=precision).with_total_steps(9)
    other_order = config_of(*reversed(groups), scheduler="linear", precision=precision).with_total_steps(9)
    same = resumed(config)
    plain, swapped = resumed(without_groups), resumed(other_order)
    assert same == advance(parameters, optimizer, 2)
    assert plain[1] == same[1]  # in no group, before and after
    assert plain[0] != same[0]  # decays now
    assert swapped[3] == same[3]
    assert swapped[2] != same[2]  # layers.1.norm changed its group


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"pattern": "*bias", "lr": 0.1}], r"groups: the pattern '\*bias' matches no weight; match names such as lay"),
        (
            [{"pattern": "*norm", "lr": 0.1}, {"pattern": "layers.0.norm", "lr": 0.2}],
            r"'layers\.0\.norm' matches only weights of earlier groups; put it before them",
        ),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(groups, message):
    with pytest.raises(ConfigError, match=message):
        make(config_of(*groups))


def test_a_setting_that_the_optimizer_lacks_is_refused():
    optimizer = {
        "name": "torch.optim.Rprop",
        "kwargs": {"lr": 0.1},
        "groups": [{"pattern": "*norm", "weight_decay": 0.0}],
    }
    with pytest.raises(ConfigError, match=r"sets weight_decay, which torch\.optim\.Rprop does not have; remove it"):
        make(PolicyConfig(optimizer=optimizer))


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"pattern": "*norm"}, "sets nothing; set its lr or weight_decay"),
        ({"pattern": "*norm", "lr": 0.0}, "greater than 0"),
        ({"pattern": "*norm", "weight_decay": -1.0}, "greater than or equal to 0"),
        ({"lr": 0.1}, "pattern"),
    ],
)
def test_a_group_must_be_meaningful(group, message):
    with pytest.raises(ValidationError, match=message):
        config_of(group)


def test_the_preflight_compares_patterns_with_the_model():
    check_optimizer(config_of({"pattern": "*norm*", "weight_decay": 0.0}))
    with pytest.raises(ConfigError, match=r"'\*\.bias' matches no weight; match names such as "):
        check_optimizer(config_of({"pattern": "*.bias", "weight_decay": 0.0}))


def test_groups_on_fsdp1_are_refused():
    config = config_of({"pattern": "*norm*", "weight_decay": 0.0}, dtensor_cfg={"enabled": False})
    with pytest.raises(ConfigError, match=r"policy\.optimizer\.groups needs separate weights, but FSDP1"):
        FSDP1PolicyWorker.layout_of(config, 2)
