"""Metrics reduce as declared, however the batch was cut; one rule says which tokens count."""

from __future__ import annotations

import math

import pytest
import torch

from lucidrl.errors import DataError
from lucidrl.losses.config import ClippedPGConfig
from lucidrl.losses.interfaces import LossFunction, valid_token_mask
from lucidrl.losses.nll import NLLLoss
from lucidrl.losses.policy_gradient import ClippedPGLoss
from lucidrl.losses.reductions import Max, Mean, Min, Quantile, Sum, reduce_metrics


def test_each_metric_reduces_by_its_own_rule():
    first = {"sum": Sum(1.0), "mean": Mean(2.0, weight=3), "min": Min(4.0), "max": Max(5.0)}
    second = {"sum": Sum(torch.tensor(10.0)), "mean": Mean(6.0, weight=1), "min": Min(7.0), "max": Max(8.0)}
    assert reduce_metrics([(first, 1), (second, 1)]) == {"sum": 11.0, "mean": 3.0, "min": 4.0, "max": 8.0}


def test_a_bare_number_is_a_mean_over_valid_samples():
    assert reduce_metrics([({"reward": 1.0}, 3), ({"reward": torch.tensor(5.0)}, 1)]) == {"reward": 2.0}


def test_a_part_without_weight_does_not_count_even_if_it_is_nan():
    assert reduce_metrics([({"loss": Mean(math.nan, 0)}, 0), ({"loss": Mean(2.0, 4)}, 4)]) == {"loss": 2.0}


def test_an_empty_part_does_not_move_an_extreme():
    parts = [({"min": Min(math.inf), "max": Max(-math.inf)}, 0), ({"min": Min(2.0), "max": Max(3.0)}, 1)]
    assert reduce_metrics(parts) == {"min": 2.0, "max": 3.0}


def test_what_no_part_measured_is_nan():
    reduced = reduce_metrics([({"mean": Mean(0.0, 0), "min": Min(math.inf), "max": Max(-math.inf)}, 0)])
    assert all(math.isnan(value) for value in reduced.values())


@pytest.mark.parametrize("scale", [1e-7, 1.0, 10.0])
@pytest.mark.parametrize("cuts", [[], [1], [500, 501, 900]])
def test_a_quantile_is_the_same_however_the_values_were_cut_and_within_5_percent(scale, cuts):
    values = scale * torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = values.tensor_split(cuts)
    reduced = reduce_metrics([({"p99": Quantile.of(part, 0.99)}, 1) for part in parts])["p99"]
    assert reduced == Quantile.of(values, 0.99).value
    assert reduced == pytest.approx(values.quantile(0.99).item(), rel=0.05)


def test_quantiles_at_the_ends():
    assert math.isnan(Quantile.of(torch.tensor([]), 0.99).value)
    assert math.isnan(Quantile.of(torch.tensor([1.0, math.nan]), 0.5).value)
    assert Quantile.of(torch.zeros(5), 0.99).value == 0
    assert Quantile.of(torch.tensor([math.inf, 1e9]), 0.5).value == pytest.approx(64, rel=0.05)
    assert Quantile.of(torch.tensor([1.0, 3.0]), 1.0).value == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
@pytest.mark.parametrize("kind", [Sum, Min, Max, lambda value: Mean(value, 1)])
def test_nan_is_seen_wherever_it_stands(kind, values):
    reduced = reduce_metrics([({"metric": kind(value)}, 1) for value in values])
    assert math.isnan(reduced["metric"])


def test_a_metric_missing_from_some_parts_reduces_over_the_others():
    assert reduce_metrics([({"kl": Mean(1.0, 2)}, 2), ({}, 2)]) == {"kl": 1.0}


def test_one_metric_with_two_reductions_is_refused_by_name():
    with pytest.raises(TypeError, match="'loss'"):
        reduce_metrics([({"loss": Sum(1.0)}, 1), ({"loss": Max(1.0)}, 1)])


def test_a_token_counts_if_it_its_row_and_its_position_do():
    data = {"token_mask": torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]]), "sample_mask": torch.tensor([1.0, 0.0])}
    expected = torch.tensor([[False, True, False, True], [False, False, False, False]])
    assert torch.equal(valid_token_mask(data), expected)


def test_counting_tokens_leaves_the_batch_as_it_was():
    data = {"token_mask": torch.ones(2, 3, dtype=torch.bool), "sample_mask": torch.ones(2, dtype=torch.bool)}
    valid_token_mask(data)
    assert data["token_mask"].all()


@pytest.mark.parametrize("missing", ["token_mask", "sample_mask"])
def test_a_missing_mask_is_named(missing):
    data = {"token_mask": torch.ones(2, 3), "sample_mask": torch.ones(2)}
    del data[missing]
    with pytest.raises(DataError, match=missing):
        valid_token_mask(data)


@pytest.mark.parametrize("loss_fn", [NLLLoss(), ClippedPGLoss(ClippedPGConfig())])
def test_our_losses_implement_the_protocol(loss_fn):
    assert isinstance(loss_fn, LossFunction)
