"""An unknown name gets a suggestion from the whole tree of settings."""

from typing import Any

import pytest
from pydantic import Field
from torch.optim import SGD, AdamW

from lucidrl.errors import ConfigError
from lucidrl.utils.config import Config, load_config
from lucidrl.utils.suggestions import check_arguments


class _Optimizer(Config):
    name: str = "AdamW"
    kwargs: dict[str, Any] = Field(default_factory=lambda: {"lr": 1e-6})


class _Policy(Config):
    model_name: str = "x"
    optimizer: _Optimizer = _Optimizer()
    max_steps: int = 1


class _Run(Config):
    policy: _Policy = _Policy()
    critic: _Policy | None = None
    seed: int = 0


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("policy.lerning_rate=1", "did you mean policy.optimizer.kwargs.lr?"),
        ("policy.lr=1", "did you mean policy.optimizer.kwargs.lr?"),
        ("lerning_rate=1", "did you mean policy.optimizer.kwargs.lr or critic.optimizer.kwargs.lr?"),
        ("critic.learning_rate=1", "did you mean critic.optimizer.kwargs.lr?"),
        ("policy.seed=1", "did you mean seed?"),
        ("policy.steps=1", "did you mean policy.max_steps?"),
        ("policy.optimiser.name=x", "did you mean policy.optimizer?"),
        ("zzz=1", "known here: critic, policy, seed"),
    ],
)
def test_an_unknown_setting_is_looked_for_in_the_whole_tree(override, hint):
    with pytest.raises(ConfigError) as raised:
        load_config(_Run, overrides=[override])
    assert str(raised.value) == f"unknown key {override.partition('=')[0].removesuffix('.name')}; {hint}"


def test_arguments_are_compared_with_those_that_a_class_takes():
    check_arguments(AdamW, {"lr": 1e-3, "betas": (0.9, 0.99), "fused": True}, "policy.optimizer.kwargs", num_given=1)
    with pytest.raises(ConfigError) as raised:
        check_arguments(AdamW, {"learning_rate": 1, "weigth_decay": 1}, "policy.optimizer.kwargs", num_given=1)
    assert str(raised.value).splitlines() == [
        "unknown key policy.optimizer.kwargs.learning_rate; did you mean policy.optimizer.kwargs.lr?",
        "unknown key policy.optimizer.kwargs.weigth_decay; did you mean policy.optimizer.kwargs.weight_decay?",
    ]
    with pytest.raises(ConfigError, match="known here: dampening, differentiable, foreach, fused, lr, maximize"):
        check_arguments(SGD, {"params": 1}, "kwargs", num_given=1)


def test_a_factory_that_takes_any_argument_decides_for_itself():
    check_arguments(lambda parameters, **kwargs: None, {"anything": 1}, "kwargs")
    check_arguments(dict, {"anything": 1}, "kwargs")  # has no signature
