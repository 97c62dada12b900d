"""Valid and invalid policy configs."""

from __future__ import annotations

import pytest

from lucidrl.errors import ConfigError
from lucidrl.models.policy import PolicyConfig
from lucidrl.utils.config import validate

LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR"}


def test_defaults_are_valid():
    assert validate(PolicyConfig, {}).model_name == "embedded"


def test_one_scheduler_need_not_be_a_list():
    assert validate(PolicyConfig, {"scheduler": LINEAR}) == validate(PolicyConfig, {"scheduler": [LINEAR]})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"dynamic_batching": {"enabled": True}},
            r"dynamic_batching\.enabled and sequence_packing\.enabled are both true; turn one",
        ),
        ({"scheduler": [LINEAR, LINEAR]}, "2 schedulers need 1 scheduler_milestones, not 0"),
        ({"scheduler": LINEAR, "scheduler_milestones": [3]}, "1 schedulers need 0 scheduler_milestones, not 1"),
        ({"scheduler_milestones": [3]}, "0 schedulers need 0 scheduler_milestones, not 1"),
        ({"optimizer": {"kwargs": {"lr": -1e-4}}}, r"lr=-0\.0001 is not a learning rate"),
        ({"optimizer": {"kwargs": {"lr": 0}}}, "lr=0 is not a learning rate"),
        ({"optimizer": {"kwargs": {"lr": float("nan")}}}, "lr=nan is not a learning rate"),
        ({"optimizer": {"kwargs": {"lr": "1e-4"}}}, "lr='1e-4' is not a learning rate"),
        ({"max_grad_norm": 0}, "max_grad_norm=0 is not valid"),
        ({"train_micro_batch_size": 0}, "train_micro_batch_size=0 is not valid"),
        ({"precision": "float8"}, "precision='float8' is not valid"),
        ({"generation": {"temperature": 0}}, r"generation\.temperature=0 is not valid"),
        ({"generation": {"top_p": 0}}, r"generation\.top_p=0 is not valid"),
        ({"generation": {"top_p": 1.01}}, r"generation\.top_p=1\.01 is not valid"),
        ({"learning_rate": 1}, "unknown key learning_rate"),
    ],
)
def test_invalid_values_are_named_in_the_error(fields, message):
    with pytest.raises(ConfigError, match=message):
        validate(PolicyConfig, fields)
