"""Losses agree with a per-token reference, add up over micro-batches, and never see what is masked.

Batches are float64 with NaN, inf and large numbers at every masked position.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lucidrl.errors import DataError
from lucidrl.losses.config import ClippedPGConfig
from lucidrl.losses.importance import importance_mask
from lucidrl.losses.interfaces import (
    IMPORTANCE_MASK,
    LossType,
    TokenOutputs,
    sampled_token_mask,
    valid_row_mask,
    valid_token_mask,
)
from lucidrl.losses.nll import NLLLoss
from lucidrl.losses.policy_gradient import KL_ESTIMATORS, ClippedPGLoss
from lucidrl.losses.reductions import reduce_metrics

OPTIONS = {
    "default": {},
    "asymmetric_clip": {"clip_low": 0.1, "clip_high": 0.4},
    "dual_clip": {"dual_clip": 1.3},
    "sequence_ratio": {"ratio_level": "sequence", "clip_low": 0.05, "clip_high": 0.05},
    "product_ratio": {"ratio_level": "sequence_product", "normalization": "sequence"},
    "cispo": {"objective": "cispo", "clip_low": 1.0, "clip_high": 0.3},
    "cispo_two_sided": {"objective": "cispo", "clip_low": 0.1, "clip_high": 0.1, "kl_coefficient": 0.1},
    "k1": {"kl_coefficient": 0.3, "kl_estimator": "k1"},
    "k2": {"kl_coefficient": 0.3, "kl_estimator": "k2"},
    "k3": {"kl_coefficient": 0.3, "kl_estimator": "k3"},
    "truncate": {"importance_correction": "truncate", "importance_cap": 1.2},
    "two_sided": {"importance_correction": "truncate", "importance_cap": 1.1, "importance_floor": 0.9},
    "mask": {"importance_correction": "mask", "importance_cap": 1.2},
    "mask_two_sided": {"importance_correction": "mask", "importance_cap": 1.2, "importance_floor": 0.8},
    "truncate_product": {
        "importance_correction": "truncate",
        "importance_level": "sequence",
        "importance_cap": 1.2,
        "importance_floor": 0.9,
    },
    "mask_product": {"importance_correction": "mask", "importance_level": "sequence", "importance_cap": 1.2},
    "truncate_mean": {
        "importance_correction": "truncate",
        "importance_level": "sequence_mean",
        "importance_cap": 1.05,
    },
    "mask_mean": {
        "importance_correction": "mask",
        "importance_level": "sequence_mean",
        "importance_cap": 1.1,
        "importance_floor": 0.85,
    },
    "entropy": {"entropy_coefficient": 0.2},
    "on_policy_mask": {"on_policy": True, "importance_correction": "mask", "importance_cap": 1.2},
    "on_policy": {"on_policy": True, "importance_correction": "truncate", "importance_cap": 1.2},
    "everything": {
        "dual_clip": 1.5,
        "kl_coefficient": 0.1,
        "entropy_coefficient": 0.05,
        "importance_correction": "mask",
        "importance_cap": 1.3,
    },
}


LENGTH = 9
"""Divisor of normalization=constant."""


def make_loss(on_policy: bool = False, **options) -> ClippedPGLoss:
    return ClippedPGLoss(ClippedPGConfig(**{"constant_length": LENGTH, **options}), on_policy=on_policy)


every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
every_normalization = pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])


def random_batch(seed: int = 0, rows: int = 6, tokens: int = 7) -> tuple[TokenOutputs, dict[str, torch.Tensor]]:
    """Outputs and columns with garbage wherever no loss may look; the last row is dropped, the first has no token."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    token_mask = (torch.rand(rows, tokens, generator=generator) < 0.7).double()
    token_mask[0] = 0
    data = {"token_mask": token_mask, "sample_mask": torch.ones(rows, dtype=torch.float64)}
    data["sample_mask"][-1] = 0
    garbage = torch.tensor([math.nan, math.inf, -math.inf, 1e30], dtype=torch.float64)
    valid = valid_token_mask(data)

    def spoiled(values: torch.Tensor) -> torch.Tensor:
        chosen = torch.randint(len(garbage), values.shape, generator=generator)
        return torch.where(valid, values, garbage[chosen])

    logprobs = -normal(rows, tokens).abs() - 0.1
    for name in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
        data[name] = spoiled(logprobs + 0.3 * normal(rows, tokens))
    data["advantages"] = spoiled(normal(rows, tokens))
    return TokenOutputs(logprobs=spoiled(logprobs), entropy=spoiled(normal(rows, tokens).abs())), data


def global_counts(data):
    return valid_row_mask(data).sum(), valid_token_mask(data).sum()


def batch_for(loss_fn, seed: int = 0) -> tuple[TokenOutputs, dict[str, torch.Tensor]]:
    """`random_batch`, with the column of excluded tokens if the loss reads it."""
    outputs, data = random_batch(seed)
    if getattr(getattr(loss_fn, "config", None), "importance_correction", None) == "mask":
        data[IMPORTANCE_MASK] = importance_mask(loss_fn.config, data)
    return outputs, data


def rows_of(outputs, data, start, end):
    columns = {name: column[start:end] for name, column in data.items()}
    return TokenOutputs(logprobs=outputs.logprobs[start:end], entropy=outputs.entropy[start:end]), columns


def reference_weights(config, log_ratios):
    """Importance weights of one row's tokens; None for excluded tokens."""
    if config.importance_correction == "none":
        return [1.0] * len(log_ratios)
    if config.importance_level != "token" and log_ratios:
        total = sum(log_ratios)
        log_ratios = [total if config.importance_level == "sequence" else total / len(log_ratios)] * len(log_ratios)
    weights = [math.exp(log_ratio) for log_ratio in log_ratios]
    if config.importance_correction == "truncate":
        return [max(min(weight, config.importance_cap), config.importance_floor) for weight in weights]
    return [weight if config.importance_floor <= weight <= config.importance_cap else None for weight in weights]


def reference_loss(loss_fn, outputs, data):
    """The objective written out token by token, in Python floats; it makes its own mask of excluded tokens."""
    config = loss_fn.config
    valid = sampled_token_mask(data).tolist()
    columns = {name: column.tolist() for name, column in data.items()}
    logprobs, entropy = outputs.logprobs.tolist(), outputs.entropy.tolist()
    row_losses, num_rows = [], 0
    for row, row_valid in enumerate(valid):
        positions = [position for position, counts in enumerate(row_valid) if counts]
        previous = logprobs[row] if loss_fn.on_policy else columns["prev_logprobs"][row]
        # A mask is made before the update, so it compares the column even on policy.
        scored = columns["prev_logprobs"][row] if config.importance_correction == "mask" else previous
        generated = columns["generation_logprobs"][row]
        weights = reference_weights(config, [scored[position] - generated[position] for position in positions])
        weight_of = {
            position: weight for position, weight in zip(positions, weights, strict=True) if weight is not None
        }
        num_rows += bool(data["sample_mask"][row]) and (bool(weight_of) or not positions)
        log_ratios = {position: logprobs[row][position] - previous[position] for position in weight_of}
        losses = []
        for position, weight in weight_of.items():
            log_ratio = log_ratios[position]
            if config.ratio_level != "token":
                total = sum(log_ratios.values())
                log_ratio = total / len(log_ratios) if config.ratio_level == "sequence" else total
            ratio, advantage = math.exp(log_ratio), columns["advantages"][row][position]
            clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            objective = min(ratio * advantage, clipped * advantage)
            if config.dual_clip is not None and advantage < 0:
                objective = max(objective, config.dual_clip * advantage)
            if config.objective == "cispo":
                objective = clipped * advantage * logprobs[row][position]
            d = logprobs[row][position] - columns["reference_policy_logprobs"][row][position]
            kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) + d - 1}[config.kl_estimator]
            bonus = config.entropy_coefficient * entropy[row][position]
            losses.append(-objective * weight + config.kl_coefficient * kl - bonus)
        row_losses.append(losses)
    if config.normalization == "token":
        return sum(map(sum, row_losses)) / max(1, sum(map(len, row_losses)))
    if config.normalization == "constant":
        return sum(map(sum, row_losses)) / LENGTH / max(1, num_rows)
    return sum(sum(losses) / len(losses) for losses in row_losses if losses) / max(1, num_rows)


@every_option
@every_normalization
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_the_per_token_formula(options, normalization, seed):
    loss_fn = make_loss(**{"normalization": normalization, **options})
    outputs, data = batch_for(loss_fn, seed)
    loss, _ = loss_fn(outputs, data, *global_counts(data))
    assert loss.item() == pytest.approx(reference_loss(loss_fn, outputs, data), abs=1e-12)


@every_option
@every_normalization
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), cuts=st.sets(st.integers(1, 5)))
def test_micro_batches_add_up_to_the_whole(options, normalization, seed, cuts):
    loss_fn = make_loss(**{"normalization": normalization, **options})
    outputs, data = batch_for(loss_fn, seed)
    counts = global_counts(data)
    whole, whole_metrics = loss_fn(outputs, data, *counts)
    bounds = [0, *sorted(cuts), 6]
    parts = [loss_fn(*rows_of(outputs, data, *pair), *counts) for pair in itertools.pairwise(bounds)]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), abs=1e-12)
    metrics = reduce_metrics([(metrics, 1) for _, metrics in parts])
    assert metrics == pytest.approx(reduce_metrics([(whole_metrics, 1)]), abs=1e-12, nan_ok=True)


# Finite differences do not apply where a factor of the loss has no gradient: the ratio on policy, which is 1 at every
# point, and the weight of cispo. Separate tests below have these gradients.
@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - {"on_policy", "on_policy_mask", "cispo", "cispo_two_sided"}))
@every_normalization
def test_gradients_match_finite_differences(name, normalization):
    loss_fn = make_loss(**{"normalization": normalization, **OPTIONS[name]})
    outputs, data = batch_for(loss_fn, 1)
    valid = valid_token_mask(data)
    # Finite differences need finite inputs.
    logprobs = outputs.logprobs.masked_fill(~valid, -1.0).requires_grad_()
    entropy = outputs.entropy.masked_fill(~valid, 1.0).requires_grad_()

    def loss_of(logprobs, entropy):
        return loss_fn(TokenOutputs(logprobs=logprobs, entropy=entropy), data, *global_counts(data))[0]

    assert torch.autograd.gradcheck(loss_of, (logprobs, entropy))


@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
def test_on_policy_is_the_first_update_with_the_same_gradient(ratio_level):
    options = {"importance_correction": "truncate", "importance_cap": 1.2, "ratio_level": ratio_level}
    outputs, data = random_batch(2)
    data["prev_logprobs"] = outputs.logprobs.clone()
    results = []
    for on_policy in (False, True):
        logprobs = outputs.logprobs.clone().requires_grad_()
        loss_fn = make_loss(on_policy=on_policy, **options)
        loss, metrics = loss_fn(TokenOutputs(logprobs=logprobs), data, *global_counts(data))
        loss.backward()
        results.append((loss.detach(), logprobs.grad))
        assert metrics["ratio/min"].value == metrics["ratio/max"].value == 1
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert results[0][1].abs().sum() > 0


@pytest.mark.parametrize("loss_fn", [NLLLoss(), *(make_loss(**options) for options in OPTIONS.values())])
def test_masked_garbage_reaches_neither_gradients_nor_metrics(loss_fn):
    outputs, data = batch_for(loss_fn, 3)
    logprobs, entropy = outputs.logprobs.requires_grad_(), outputs.entropy.requires_grad_()
    loss, metrics = loss_fn(outputs, data, *global_counts(data))
    loss.backward()
    valid = valid_token_mask(data)
    for leaf in (logprobs, entropy):
        if leaf.grad is not None:
            assert leaf.grad.isfinite().all()
            assert torch.equal(leaf.grad[~valid], torch.zeros_like(leaf.grad[~valid]))
    assert all(math.isfinite(value) for value in reduce_metrics([(metrics, 1)]).values())


@every_normalization
def test_a_batch_without_valid_tokens_has_loss_and_gradients_zero(normalization):
    loss_fn = make_loss(**OPTIONS["everything"], normalization=normalization)
    outputs, data = batch_for(loss_fn, 4)
    data["sample_mask"].zero_()
    logprobs = outputs.logprobs.requires_grad_()
    loss, metrics = loss_fn(outputs, data, *global_counts(data))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logprobs.grad, torch.zeros_like(logprobs))
    assert reduce_metrics([(metrics, 0)])["num_valid_tokens"] == 0


def test_an_advantage_for_each_row_holds_for_all_its_tokens():
    outputs, data = random_batch(5)
    loss_fn, counts = ClippedPGLoss(ClippedPGConfig()), global_counts(data)
    per_row = torch.arange(6, dtype=torch.float64) - 2
    by_row, _ = loss_fn(outputs, data | {"advantages": per_row}, *counts)
    by_token, _ = loss_fn(outputs, data | {"advantages": per_row[:, None].expand(6, 7)}, *counts)
    assert by_row == by_token


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
def test_policies_far_apart_give_finite_float32_losses_and_gradients(advantage, difference):
    logprobs = torch.full((1, 3), -1.0, requires_grad=True)
    other = logprobs.detach() - difference
    data = {
        "token_mask": torch.ones(1, 3),
        "sample_mask": torch.ones(1),
        "advantages": torch.tensor([advantage]),
        "prev_logprobs": other,
        "generation_logprobs": logprobs.detach(),
        "reference_policy_logprobs": other,
    }
    config = ClippedPGConfig(kl_coefficient=0.1, importance_correction="truncate")
    loss, metrics = ClippedPGLoss(config)(TokenOutputs(logprobs=logprobs), data, *global_counts(data))
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad.isfinite().all()
    assert all(math.isfinite(value) for value in reduce_metrics([(metrics, 1)]).values())


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_penalty_pulls_towards_the_reference_from_any_distance(estimator):
    distance = torch.tensor([-500.0, -21.0, -19.0, -1.0, 0.0, 1.0, 19.0, 500.0], requires_grad=True)
    KL_ESTIMATORS[estimator](distance).sum().backward()
    assert torch.equal(distance.grad.sign(), distance.detach().sign())


def test_k3_keeps_its_digits_for_nearly_equal_policies():
    distance = torch.tensor([1e-3, -1e-3, 1e-2])
    exact = torch.exp(-distance.double()) + distance.double() - 1
    torch.testing.assert_close(KL_ESTIMATORS["k3"](distance).double(), exact, rtol=1e-3, atol=0)


def test_metrics_count_the_tokens_that_were_clipped():
    ratios = torch.tensor([[1.0, 0.5, 0.5, 2.0, 2.0, 4.0, 1.1]], dtype=torch.float64)
    data = {
        "token_mask": torch.ones(1, 7),
        "sample_mask": torch.ones(1),
        "advantages": torch.tensor([[0.0, -1.0, 1.0, 1.0, -1.0, -1.0, 1.0]], dtype=torch.float64),
        "prev_logprobs": torch.full((1, 7), -5.0, dtype=torch.float64),
        "generation_logprobs": torch.full((1, 7), -5.0, dtype=torch.float64),
    }
    data["generation_logprobs"][0, 3] -= math.log(7)
    outputs = TokenOutputs(logprobs=ratios.log() - 5)
    _, declared = ClippedPGLoss(ClippedPGConfig(dual_clip=3.0))(outputs, data, *global_counts(data))
    # Tokens 1 to 6 are valid: surrogates 0.8, -0.5, -1.2, 2, 3 (bounded) and -1.1.
    assert reduce_metrics([(declared, 1)]) == pytest.approx(
        {
            "policy_loss": 3 / 6,
            "num_valid_tokens": 6,
            "ratio/mean": 10.1 / 6,
            "ratio/min": 0.5,
            "ratio/max": 4.0,
            "clip_fraction/low": 1 / 6,
            "clip_fraction/high": 1 / 6,
            "clip_fraction/dual": 1 / 6,
            "generation_mismatch/mean_abs_logprob_difference": math.log(7) / 6,
            "generation_mismatch/max_abs_logprob_difference": math.log(7),
            # One row, whose worst token is beyond the 99th percentile's bin only by the width of the bin.
            "generation_mismatch/p99_abs_logprob_difference": pytest.approx(math.log(7), rel=0.05),
            "generation_mismatch/worst_sequence_mean_abs_logprob_difference": math.log(7) / 6,
            "generation_mismatch/token_mult_prob_error": (5 + 7) / 6,
        }
    )


def test_the_mismatch_after_the_correction_is_what_the_weights_leave():
    data = {
        "token_mask": torch.ones(1, 5),
        "sample_mask": torch.ones(1),
        "advantages": torch.ones(1),
        "prev_logprobs": torch.tensor([[0.0, -1.0, -1.0, -1.0, -1.0]]),
        "generation_logprobs": torch.tensor([[0.0, -1.0, -1.5, -4.0, -0.5]]),
    }
    outputs = TokenOutputs(logprobs=data["prev_logprobs"])

    def remaining(**options):
        loss_fn = make_loss(importance_cap=math.e, **options)
        columns = dict(data)
        if loss_fn.config.importance_correction == "mask":
            columns[IMPORTANCE_MASK] = importance_mask(loss_fn.config, columns)
        metrics = reduce_metrics([(loss_fn(outputs, columns, *global_counts(columns))[1], 1)])
        prefix = "generation_mismatch/corrected_"
        return [metrics[f"{prefix}{name}_abs_logprob_difference"] for name in ("mean", "max")]

    # Differences are 0, 0.5, 3 and -0.5; the cap bounds log weights at 1.
    assert remaining(importance_correction="truncate") == pytest.approx([2 / 4, 2])
    assert remaining(importance_correction="truncate", importance_floor=1.0) == pytest.approx([2.5 / 4, 2])
    assert remaining(importance_correction="mask") == pytest.approx([0, 0])
    assert remaining(importance_correction="truncate", importance_level="sequence") == pytest.approx([2, 2])
    assert remaining(importance_correction="truncate", importance_level="sequence_mean") == pytest.approx([0, 0])


def test_a_row_without_a_token_in_bounds_leaves_the_mean_over_rows():
    loss_fn = make_loss(normalization="sequence", importance_correction="mask", importance_level="sequence")
    outputs, data = random_batch(7)
    data["generation_logprobs"][1] = data["prev_logprobs"][1] - 9.0
    data[IMPORTANCE_MASK] = importance_mask(loss_fn.config, data)
    rest = {name: column[[0, 2, 3, 4, 5]] for name, column in data.items()}
    kept = TokenOutputs(logprobs=outputs.logprobs[[0, 2, 3, 4, 5]])
    loss, _ = loss_fn(outputs, data, *global_counts(data))
    loss_of_rest, _ = loss_fn(kept, rest, *global_counts(rest))
    assert loss.item() == pytest.approx(loss_of_rest.item(), abs=1e-12)


@pytest.mark.parametrize(
    ("column", "options", "provider"),
    [
        ("advantages", {}, "compute_advantages"),
        ("prev_logprobs", {}, "get_logprobs"),
        ("reference_policy_logprobs", {"kl_coefficient": 0.1}, "get_reference_policy_logprobs"),
        ("generation_logprobs", {"importance_correction": "truncate"}, "generator"),
        (IMPORTANCE_MASK, {"importance_correction": "mask"}, "importance_mask"),
    ],
)
def test_a_missing_column_is_named_with_who_makes_it(column, options, provider):
    outputs, data = random_batch()
    counts = global_counts(data)
    data.pop(column, None)
    with pytest.raises(DataError, match=f"'{column}'.*{provider}"):
        ClippedPGLoss(ClippedPGConfig(**options))(outputs, data, *counts)


def test_columns_that_the_config_does_not_call_for_are_not_read():
    outputs, data = random_batch()
    counts = global_counts(data)
    columns = {name: data[name] for name in ("token_mask", "sample_mask", "advantages")}
    _, metrics = make_loss(on_policy=True)(outputs, columns, *counts)
    assert not {name for name in metrics if name.startswith(("generation_mismatch", "kl", "entropy"))}


def test_a_column_of_another_length_is_refused_with_both_shapes():
    outputs, data = random_batch()
    counts = global_counts(data)
    data["prev_logprobs"] = data["prev_logprobs"][:, 1:]
    with pytest.raises(DataError, match=r"'prev_logprobs' has shape \[6, 6\] but token_mask has \[6, 7\]"):
        ClippedPGLoss(ClippedPGConfig())(outputs, data, *counts)


def test_entropy_is_needed_only_for_the_bonus():
    assert ClippedPGLoss(ClippedPGConfig()).needs == {"logprobs"}
    loss_fn = ClippedPGLoss(ClippedPGConfig(entropy_coefficient=0.1))
    assert loss_fn.needs == {"logprobs", "entropy"}
    outputs, data = random_batch()
    with pytest.raises(DataError, match="entropy"):
        loss_fn(TokenOutputs(logprobs=outputs.logprobs), data, *global_counts(data))


def test_the_loss_type_follows_the_normalization():
    assert ClippedPGLoss(ClippedPGConfig(normalization="token")).loss_type is LossType.TOKEN_LEVEL
    assert ClippedPGLoss(ClippedPGConfig(normalization="sequence")).loss_type is LossType.SEQUENCE_LEVEL


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip_low": 1.1},
        {"clip_high": -0.1},
        {"dual_clip": 1.0},
        {"kl_coefficient": math.nan},
        {"importance_cap": 0},
        {"importance_floor": 3.0},
    ],
)
def test_values_without_meaning_are_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        ClippedPGConfig(**wrong)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), cut=st.integers(1, 5))
def test_nll_is_the_mean_over_all_valid_tokens_however_cut(seed, cut):
    outputs, data = random_batch(seed)
    counts = global_counts(data)
    expected = -outputs.logprobs[valid_token_mask(data)].mean().item()
    parts = [NLLLoss()(*rows_of(outputs, data, *bounds), *counts) for bounds in ((0, cut), (cut, 6))]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(expected, abs=1e-12)
    assert reduce_metrics([(metrics, 1) for _, metrics in parts])["nll"] == pytest.approx(expected, abs=1e-12)
