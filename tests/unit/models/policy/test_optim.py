"""The optimizer: clipping, skipped steps, master weights, loss scale, schedules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from lucidrl.errors import ConfigError, TrainingError
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.optim import PolicyOptimizer
from lucidrl.models.policy.config import PolicyConfig

every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


def sgd(lr: float = 1.0, **fields: Any) -> PolicyConfig:
    return PolicyConfig(optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": lr}}, **fields)


def parameters_of(*values: list[float], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor(value, dtype=dtype)) for value in values]


def give_gradients(parameters: list[nn.Parameter], *gradients: list[float]) -> None:
    """Set gradients by a backward pass, as a model does."""
    products = (
        (parameter * torch.tensor(gradient, dtype=parameter.dtype)).sum()
        for parameter, gradient in zip(parameters, gradients, strict=True)
    )
    sum(products, torch.zeros(())).backward()


@every_dtype
def test_gradients_are_scaled_down_to_the_norm(dtype):
    parameters = parameters_of([0.0, 0.0], [0.0], dtype=dtype)
    optimizer = PolicyOptimizer(parameters, sgd(max_grad_norm=0.75))
    give_gradients(parameters, [2.0, 4.0], [4.0])
    assert optimizer.step() == pytest.approx(6.0)
    moved = torch.cat([parameter.detach().double() for parameter in parameters])
    torch.testing.assert_close(moved, torch.tensor([-0.25, -0.5, -0.5], dtype=torch.float64), rtol=1e-4, atol=0)


@every_dtype
@pytest.mark.parametrize("max_grad_norm", [None, 100.0])
def test_small_gradients_are_not_scaled(dtype, max_grad_norm):
    parameters = parameters_of([0.0, 0.0], dtype=dtype)
    optimizer = PolicyOptimizer(parameters, sgd(max_grad_norm=max_grad_norm))
    give_gradients(parameters, [3.0, 4.0])
    assert optimizer.step() == pytest.approx(5.0)
    assert parameters[0].tolist() == [-3.0, -4.0]


@every_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_with_a_bad_gradient_changes_nothing(dtype, bad):
    parameters = parameters_of([1.0, 2.0], [3.0], dtype=dtype)
    config = PolicyConfig(optimizer={"kwargs": {"lr": 0.1}})
    optimizer = PolicyOptimizer(parameters, config)
    give_gradients(parameters, [1.0, 1.0], [1.0])
    optimizer.step()
    before = [parameter.tolist() for parameter in parameters]
    state = {key: value.clone() for key, value in optimizer.state_dict()["optimizer"]["state"][0].items()}
    give_gradients(parameters, [1.0, 1.0], [bad])
    assert not torch.isfinite(torch.tensor(optimizer.step()))
    assert [parameter.tolist() for parameter in parameters] == before
    after = optimizer.state_dict()["optimizer"]["state"][0]
    assert all(torch.equal(after[key], value) for key, value in state.items())
    give_gradients(parameters, [1.0, 1.0], [1.0])
    assert optimizer.step() == pytest.approx(3**0.5)  # the bad gradient was dropped


def test_master_weights_collect_updates_too_small_for_half_precision():
    parameters = parameters_of([1.0], dtype=torch.bfloat16)
    optimizer = PolicyOptimizer(parameters, sgd(lr=1e-3))
    values = []
    for _ in range(20):
        give_gradients(parameters, [1.0])
        optimizer.step()
        values.append(parameters[0].item())
    assert values[0] == 1.0  # the nearest bfloat16 below 1 is 0.996
    assert values[-1] == pytest.approx(0.98, abs=0.002)
    (master,) = optimizer.state_dict()["masters"]
    assert master.dtype == torch.float32
    assert master.item() == pytest.approx(0.98, abs=1e-5)


def test_gradients_of_micro_batches_add_up_in_float32():
    parameters = parameters_of([0.0], dtype=torch.bfloat16)
    optimizer = PolicyOptimizer(parameters, sgd(max_grad_norm=None))
    give_gradients(parameters, [256.0])
    for _ in range(64):
        give_gradients(parameters, [0.5])  # lost, if it were added to 256 in bfloat16
    assert parameters[0].grad is None
    assert optimizer.step() == pytest.approx(288.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_full_precision_needs_no_copies(dtype):
    optimizer = PolicyOptimizer(parameters_of([1.0], dtype=dtype), sgd())
    assert not optimizer.has_masters
    assert "masters" not in optimizer.state_dict()


def test_frozen_parameters_are_left_alone():
    trained, frozen = parameters_of([1.0], [1.0])
    frozen.requires_grad_(False)
    optimizer = PolicyOptimizer([trained, frozen], sgd(max_grad_norm=None))
    (trained * frozen).sum().backward()
    optimizer.step()
    assert (trained.item(), frozen.item()) == (0.0, 1.0)


@every_dtype
def test_state_is_bit_identical_after_a_round_trip(dtype):
    config = PolicyConfig(
        optimizer={"kwargs": {"lr": 0.1}},
        scheduler={"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": 0.5}},
    )

    def advance(parameters: list[nn.Parameter], optimizer: PolicyOptimizer, step: int) -> None:
        give_gradients(parameters, [0.3 * step, -0.7 + 0.4 * step])
        optimizer.step()
        optimizer.schedule()

    first = parameters_of([1.0, 2.0], dtype=dtype)
    optimizer = PolicyOptimizer(first, config)
    for step in range(3):
        advance(first, optimizer, step)
    second = [nn.Parameter(first[0].detach().clone())]
    resumed = PolicyOptimizer(second, config)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.learning_rate == optimizer.learning_rate == pytest.approx(0.0125)
    for step in range(3, 6):
        advance(first, optimizer, step)
        advance(second, resumed, step)
    assert torch.equal(first[0], second[0])


# The loss scale of float16


def float16_optimizer(dtype: torch.dtype = torch.float16) -> tuple[list[nn.Parameter], PolicyOptimizer]:
    """A single rank has float16 parameters, several ranks have float32."""
    parameters = parameters_of([0.0, 0.0], dtype=dtype)
    return parameters, PolicyOptimizer(parameters, sgd(precision="float16", max_grad_norm=None))


def scaled_step(parameters: list[nn.Parameter], optimizer: PolicyOptimizer, gradient: list[float]) -> float:
    give_gradients(parameters, [value * optimizer.loss_scale for value in gradient])
    return optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_scaled_gradients_are_measured_and_applied_unscaled(dtype):
    parameters, optimizer = float16_optimizer(dtype)
    assert optimizer.loss_scale > 1
    assert scaled_step(parameters, optimizer, [3.0, 4.0]) == pytest.approx(5.0)
    assert parameters[0].tolist() == [-3.0, -4.0]


def test_the_loss_scale_is_halved_at_every_overflow_down_to_1():
    parameters, optimizer = float16_optimizer()
    scales = []
    for _ in range(14):
        scales.append(optimizer.loss_scale)
        assert scaled_step(parameters, optimizer, [float("inf"), 1.0]) == float("inf")
    assert scales == [2.0**power for power in range(12, 0, -1)] + [1.0, 1.0]
    assert parameters[0].tolist() == [0.0, 0.0]


def test_the_loss_scale_is_doubled_after_200_good_steps_in_a_row_up_to_65536():
    parameters, optimizer = float16_optimizer(torch.float32)
    for number in range(6 * 200 + 1):
        expected = min(2.0**12 * 2 ** (number // 200), 2.0**16)
        assert optimizer.loss_scale == expected
        scaled_step(parameters, optimizer, [1e-3, 0.0])
    scaled_step(parameters, optimizer, [float("nan"), 0.0])
    for _ in range(200):
        assert optimizer.loss_scale == 2.0**15
        scaled_step(parameters, optimizer, [1e-3, 0.0])
    assert optimizer.loss_scale == 2.0**16


def test_the_loss_scale_and_its_good_steps_survive_a_round_trip():
    parameters, optimizer = float16_optimizer()
    scaled_step(parameters, optimizer, [float("inf"), 0.0])
    for _ in range(199):
        scaled_step(parameters, optimizer, [1e-3, 0.0])
    same_parameters, resumed = float16_optimizer()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.loss_scale == 2.0**11
    scaled_step(same_parameters, resumed, [1e-3, 0.0])
    assert resumed.loss_scale == 2.0**12


class SteepLoss(NLLLoss):
    """A finite loss whose gradients may overflow."""

    def __init__(self, factor: float):
        self.factor = factor

    def __call__(self, *args):
        loss, metrics = super().__call__(*args)
        return loss * self.factor, metrics


@pytest.mark.slow
def test_the_search_for_a_loss_scale_does_not_end_the_training(make_worker, make_rows):
    worker = make_worker("embedded", precision="float16", max_nonfinite_steps=2)
    skipped = [worker.train(make_rows(), SteepLoss(2.0**14))["num_skipped_steps"] for _ in range(13)]
    assert sum(skipped) > 3
    assert skipped == sorted(skipped, reverse=True)
    assert skipped[-1] == 0


@pytest.mark.slow
def test_gradients_that_overflow_at_a_loss_scale_of_1_end_the_training(make_worker, make_rows):
    worker = make_worker("embedded", precision="float16", max_nonfinite_steps=2)
    for _ in range(12 + 1):
        worker.train(make_rows(), SteepLoss(1e30))
    with pytest.raises(TrainingError, match="NaN or infinite in 2 optimizer steps in a row"):
        worker.train(make_rows(), SteepLoss(1e30))


# Schedules


def learning_rates(config: PolicyConfig, count: int) -> list[float]:
    parameters = parameters_of([1.0])
    optimizer = PolicyOptimizer(parameters, config)
    rates = []
    for _ in range(count):
        rates.append(optimizer.learning_rate)
        give_gradients(parameters, [1.0])
        optimizer.step()
        optimizer.schedule()
    return rates


def test_without_scheduler_the_rate_stays():
    assert learning_rates(sgd(0.5), 3) == [0.5, 0.5, 0.5]


def test_one_scheduler():
    linear = {
        "name": "torch.optim.lr_scheduler.LinearLR",
        "kwargs": {"start_factor": 0.25, "end_factor": 1.0, "total_iters": 3},
    }
    assert learning_rates(sgd(1.0, scheduler=linear), 5) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_several_schedulers_follow_each_other_at_their_milestones():
    warm_up = {
        "name": "torch.optim.lr_scheduler.LinearLR",
        "kwargs": {"start_factor": 0.5, "end_factor": 1.0, "total_iters": 2},
    }
    constant = {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 100}}
    decay = {"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": 0.5}}
    config = sgd(1.0, scheduler=[warm_up, constant, decay], scheduler_milestones=[2, 4])
    assert learning_rates(config, 7) == pytest.approx([0.5, 0.75, 1.0, 1.0, 1.0, 0.5, 0.25])


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"scheduler": "linear"}, [1, 0.75, 0.5, 0.25, 0]),
        ({"scheduler": "cosine"}, [1, 0.853553, 0.5, 0.146447, 0]),
        ({"scheduler": "constant"}, [1, 1, 1, 1, 1]),
        ({"scheduler": "linear", "warmup_steps": 2}, [1 / 3, 2 / 3, 1, 0.5, 0]),
        ({"scheduler": "cosine", "warmup_steps": 1}, [0.5, 1, 0.75, 0.25, 0]),
        ({"warmup_steps": 3}, [0.25, 0.5, 0.75, 1, 1]),
        ({"scheduler": "linear", "warmup_steps": 9}, [0.1, 0.2, 0.3, 0.4, 0.5]),
        ({"scheduler": {"name": "linear", "kwargs": {"final_fraction": 0.5}}}, [1, 0.875, 0.75, 0.625, 0.5]),
        ({"scheduler": {"name": "linear", "kwargs": {"total_steps": 2}}}, [1, 0.5, 0, 0, 0]),
    ],
)
def test_a_schedule_by_name_ends_with_the_run(settings, rates):
    config = sgd(1.0, **settings).with_total_steps(4)
    assert learning_rates(config, 5) == pytest.approx(rates, abs=1e-6)


def test_a_schedule_by_name_needs_an_end_and_known_arguments():
    with pytest.raises(ConfigError, match="cosine needs total_steps"):
        PolicyOptimizer(parameters_of([1.0]), sgd(1.0, scheduler="cosine"))
    wrong = sgd(1.0, scheduler={"name": "cosine", "kwargs": {"warmup": 3}})
    with pytest.raises(ConfigError, match=r"kwargs\.warmup; did you mean policy\.scheduler\.kwargs\.warmup_steps"):
        PolicyOptimizer(parameters_of([1.0]), wrong.with_total_steps(4))
    for settings, said in (
        ({"scheduler": "cosin"}, "'cosin' is not a schedule; choose constant, cosine, linear"),
        (
            {"scheduler": "torch.optim.lr_scheduler.LinearLR", "warmup_steps": 3},
            "is for the schedules constant, cosine",
        ),
    ):
        with pytest.raises(ValidationError, match=said):
            sgd(1.0, **settings)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": {"name": "torch.optim.Adamw"}}, r"policy\.optimizer\.name='torch\.optim\.Adamw' cannot be"),
        ({"optimizer": {"name": "no_such_package.Adam"}}, r"policy\.optimizer\.name='no_such_package\.Adam' cannot"),
        ({"optimizer": {"kwargs": {"learning_rate": 1e-3}}}, r"did you mean policy\.optimizer\.kwargs\.lr\?"),
        ({"optimizer": {"kwargs": {"lr": 1e-3, "betas": [2.0, 0.9]}}}, r"policy\.optimizer\.kwargs=.*beta"),
        ({"scheduler": {"name": "torch.optim.lr_scheduler.Nope"}}, r"policy\.scheduler\.name='torch.*Nope' cannot"),
        (
            {"scheduler": {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"end": 2}}},
            r"unknown key policy\.scheduler\.kwargs\.end; known here: end_factor",
        ),
    ],
)
def test_bad_paths_and_arguments_are_config_errors(fields, message):
    with pytest.raises(ConfigError, match=message):
        PolicyOptimizer(parameters_of([1.0]), PolicyConfig(**fields))


def test_a_learning_rate_changed_at_resume_is_the_new_peak_of_the_schedule():
    def optimizer(rate: float, **kwargs) -> PolicyOptimizer:
        warmup = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.5, "total_iters": 2}}
        flat = {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0}}
        config = PolicyConfig(
            optimizer={"kwargs": {"lr": rate, **kwargs}}, scheduler=[warmup, flat], scheduler_milestones=[2]
        )
        return PolicyOptimizer([torch.nn.Parameter(torch.ones(2))], config)

    saved = optimizer(1e-3)
    saved.schedule()
    same, changed = optimizer(1e-3), optimizer(1e-5, weight_decay=0.5)
    same.load_state_dict(saved.state_dict())
    changed.load_state_dict(saved.state_dict())
    for _ in range(3):
        assert same.learning_rate == saved.learning_rate
        assert changed.learning_rate == pytest.approx(saved.learning_rate / 100)
        for one in (saved, same, changed):
            one.schedule()
    assert changed._optimizer.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.filterwarnings("error")
def test_a_schedule_changed_at_resume_is_where_it_would_be_by_now():
    def optimizer(**kwargs) -> PolicyOptimizer:
        anneal = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 1.0, **kwargs}}
        return PolicyOptimizer(parameters_of([1.0]), sgd(1.0, scheduler=anneal))

    saved = optimizer(end_factor=0.5, total_iters=2)
    for _ in range(3):
        saved.step()
        saved.schedule()
    longer = optimizer(end_factor=0.0, total_iters=10)
    longer.load_state_dict(copy.deepcopy(saved.state_dict()))
    rates = []
    for _ in range(3):
        rates.append(longer.learning_rate)
        longer.schedule()
    assert rates == pytest.approx([0.7, 0.6, 0.5])


def test_a_schedule_too_short_for_the_step_it_is_resumed_at_is_a_config_error():
    def optimizer(total_steps: int) -> PolicyOptimizer:
        cycle = {"max_lr": 1.0, "total_steps": total_steps, "cycle_momentum": False}
        scheduler = {"name": "torch.optim.lr_scheduler.OneCycleLR", "kwargs": cycle}
        return PolicyOptimizer(parameters_of([1.0]), sgd(1.0, scheduler=scheduler))

    saved = optimizer(10)
    for _ in range(5):
        saved.schedule()
    with pytest.raises(ConfigError, match=r"policy\.scheduler fails before step 5"):
        optimizer(3).load_state_dict(copy.deepcopy(saved.state_dict()))
