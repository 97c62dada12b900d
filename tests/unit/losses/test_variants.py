"""Each variant's loss equals TRL's, or a second implementation, and the cuts of its batch do not change it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from lucidrl.algorithms.config import GRPOConfig
from lucidrl.algorithms.variants import Variant
from lucidrl.losses.importance import importance_mask
from lucidrl.losses.interfaces import IMPORTANCE_MASK, TokenOutputs, valid_row_mask, valid_token_mask
from lucidrl.losses.policy_gradient import ClippedPGLoss
from lucidrl.losses.reductions import reduce_metrics

FIXTURES = json.loads((Path(__file__).parent / "trl_losses.json").read_text(encoding="utf-8"))
every_variant = pytest.mark.parametrize("variant", Variant)


def loss_of(variant: Variant, on_policy: bool = False, **options) -> ClippedPGLoss:
    config = GRPOConfig(variant=variant, loss=options).with_constant_length(FIXTURES["constant_length"])
    return ClippedPGLoss(config.loss, on_policy=on_policy)


def counts(data):
    return valid_row_mask(data).sum(), valid_token_mask(data).sum()


def stored_batch() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities and columns of the fixtures, behind one prompt token."""
    columns = {name: torch.tensor(value, dtype=torch.float64) for name, value in FIXTURES["columns"].items()}
    for name, column in columns.items():
        if column.ndim == 2:
            columns[name] = torch.nn.functional.pad(column, (1, 0))
    columns["sample_mask"] = torch.ones(len(columns["advantages"]), dtype=torch.float64)
    return columns.pop("logprobs"), columns


@pytest.mark.parametrize("variant", FIXTURES["results"])
def test_value_and_gradient_are_those_of_trl(variant):
    logprobs, data = stored_batch()
    logprobs.requires_grad_()
    loss, _ = loss_of(Variant(variant))(TokenOutputs(logprobs=logprobs), data, *counts(data))
    loss.backward()
    expected = FIXTURES["results"][variant]
    gradient = torch.tensor(expected["gradient"], dtype=torch.float64)
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-9)
    torch.testing.assert_close(logprobs.grad[:, 1:], gradient, rtol=0, atol=1e-9)
    assert gradient.abs().max() > 1e-3


def test_only_reinforce_pp_has_no_loss_in_trl():
    assert {*Variant} - {*FIXTURES["results"]} == {Variant.REINFORCE_PP}


def test_reinforce_pp_is_the_clipped_mean_over_tokens_with_an_advantage_per_token():
    logprobs, data = stored_batch()
    data["advantages"] = torch.linspace(-1.5, 1.5, data["token_mask"].numel(), dtype=torch.float64)
    data["advantages"] = data["advantages"].reshape(data["token_mask"].shape)
    logprobs.requires_grad_()
    loss, _ = loss_of(Variant.REINFORCE_PP)(TokenOutputs(logprobs=logprobs), data, *counts(data))
    loss.backward()
    terms, gradient, num_tokens = [], torch.zeros_like(logprobs), int(data["token_mask"].sum())
    for row, position in data["token_mask"].nonzero().tolist():
        ratio = math.exp(logprobs[row, position].item() - data["prev_logprobs"][row, position].item())
        advantage = data["advantages"][row, position].item()
        is_clipped = ratio > 1.2 if advantage > 0 else ratio < 0.8
        terms.append(-advantage * (min(max(ratio, 0.8), 1.2) if is_clipped else ratio))
        gradient[row, position] = 0 if is_clipped else -advantage * ratio / num_tokens
    assert loss.item() == pytest.approx(sum(terms) / num_tokens, abs=1e-12)
    torch.testing.assert_close(logprobs.grad, gradient, rtol=0, atol=1e-12)


def test_the_weight_of_cispo_has_no_gradient_and_every_token_has_one():
    logprobs, data = stored_batch()
    data["prev_logprobs"][1] = logprobs[1] - 3.0  # ratios of 20: clip would stop their gradients
    logprobs.requires_grad_()
    loss, metrics = loss_of(Variant.CISPO)(TokenOutputs(logprobs=logprobs), data, *counts(data))
    loss.backward()
    weight = (logprobs.detach() - data["prev_logprobs"]).exp().clamp(max=5.0)
    expected = -data["advantages"][:, None] * weight * data["token_mask"] / data["token_mask"].sum()
    torch.testing.assert_close(logprobs.grad, expected, rtol=0, atol=1e-12)
    assert metrics["clip_fraction/high"].value >= 3 / data["token_mask"].sum()


def test_the_divisor_of_dr_grpo_depends_on_no_length_in_the_batch():
    logprobs, data = stored_batch()
    loss_fn, gradients = loss_of(Variant.DR_GRPO, on_policy=True), []
    for num_tokens in (2, 5):  # of row 0
        data["token_mask"][0] = (torch.arange(7) >= 1) & (torch.arange(7) <= num_tokens)
        leaf = logprobs.clone().requires_grad_()
        loss_fn(TokenOutputs(logprobs=leaf), data, *counts(data))[0].backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0][1:], gradients[1][1:], rtol=0, atol=0)
    per_token = -data["advantages"][0].item() / 6 / FIXTURES["constant_length"]
    assert gradients[1][0, 1:6].tolist() == pytest.approx([per_token] * 5)
    assert gradients[0][0, 1:3].tolist() == pytest.approx([per_token] * 2)


# Cuts

CUTS = {
    "one micro-batch": [[range(12)]],
    "one row each": [[[row] for row in range(12)]],
    "two": [[range(7), range(7, 12)]],
    "three": [[range(1), range(1, 9), range(9, 12)]],
    "other order": [[[11, 3, 7, 0], [5, 1, 2, 10, 9], [4, 8, 6]]],
    "two ranks": [[range(6)], [range(6, 12)]],
    "uneven ranks": [[range(2)], [range(2, 12)]],
    "a rank without rows": [[range(12)], []],
    "two ranks of two": [[range(3), range(3, 6)], [range(6, 8), range(8, 12)]],
    "two ranks, one row each": [[[row] for row in range(start, start + 6)] for start in (0, 6)],
    "three ranks": [[[0, 5]], [[1], [2, 3, 4]], [range(6, 12)]],
    "twelve ranks": [[[row]] for row in range(12)],
}
"""Rows of each micro-batch of each rank."""
WITH = {
    "alone": {},
    "masked": {"importance_correction": "mask", "importance_cap": 1.3, "importance_floor": 0.75},
    "truncated": {"importance_correction": "truncate", "importance_cap": 1.1},
    "entropy": {"entropy_coefficient": 0.1},
}


def random_batch() -> tuple[TokenOutputs, dict[str, torch.Tensor]]:
    """Twelve rows; one is not valid, one has no sampled token."""
    generator = torch.Generator().manual_seed(11)

    def normal() -> torch.Tensor:
        return torch.randn(12, 9, generator=generator, dtype=torch.float64)

    logprobs = -normal().abs() - 0.05
    data = {
        "token_mask": (torch.rand(12, 9, generator=generator) < 0.6).double(),
        "sample_mask": torch.ones(12, dtype=torch.float64),
        "advantages": normal(),
        "prev_logprobs": logprobs + 0.2 * normal(),
        "generation_logprobs": logprobs + 0.2 * normal(),
        "reference_policy_logprobs": logprobs + 0.5 * normal(),
    }
    data["token_mask"][2], data["sample_mask"][7] = 0, 0
    return TokenOutputs(logprobs=logprobs, entropy=normal().abs()), data


def computed(loss_fn, outputs, data, ranks):
    """Loss, gradients and metrics of the batch, with the counts of all ranks."""
    leaves = [outputs.logprobs.clone().requires_grad_(), outputs.entropy.clone().requires_grad_()]
    total, parts = torch.zeros((), dtype=torch.float64), []
    for rows in (list(rows) for rank in ranks for rows in rank):
        micro = TokenOutputs(logprobs=leaves[0][rows], entropy=leaves[1][rows])
        loss, metrics = loss_fn(micro, {name: column[rows] for name, column in data.items()}, *counts(data))
        loss.backward()
        total += loss.detach()
        parts.append((metrics, 1))
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return total, gradients, reduce_metrics(parts)


def test_there_are_twelve_cuts_of_all_rows():
    assert len(CUTS) == 12
    for ranks in CUTS.values():
        assert sorted(row for rank in ranks for rows in rank for row in rows) == [*range(12)]


@every_variant
@pytest.mark.parametrize("options", WITH.values(), ids=WITH.keys())
def test_no_cut_changes_value_gradients_or_metrics(variant, options):
    loss_fn = loss_of(variant, **options)
    outputs, data = random_batch()
    if loss_fn.config.importance_correction == "mask":
        data[IMPORTANCE_MASK] = importance_mask(loss_fn.config, data)
    whole, whole_gradients, whole_metrics = computed(loss_fn, outputs, data, CUTS["one micro-batch"])
    assert whole.abs() > 1e-6
    for name, ranks in CUTS.items():
        loss, gradients, metrics = computed(loss_fn, outputs, data, ranks)
        torch.testing.assert_close(loss, whole, rtol=0, atol=1e-9, msg=name)
        torch.testing.assert_close(gradients, whole_gradients, rtol=0, atol=1e-9)
        assert metrics == pytest.approx(whole_metrics, abs=1e-9, nan_ok=True), name


@every_variant
def test_on_policy_every_variant_follows_the_policy_gradient(variant):
    """With ratios of 1, the gradient of a token is its advantage, divided as the normalization says."""
    outputs, data = random_batch()
    data["advantages"] = data["advantages"][:, :1].expand(12, 9).contiguous()
    leaf = outputs.logprobs.clone().requires_grad_()
    loss_fn = loss_of(variant, on_policy=True, kl_coefficient=0)
    loss_fn(TokenOutputs(logprobs=leaf), data, *counts(data))[0].backward()
    mask, lengths = valid_token_mask(data), valid_token_mask(data).sum(dim=1, keepdim=True).clamp(min=1)
    divisor = {
        "token": mask.sum(),
        "sequence": 11 * lengths,
        "constant": torch.tensor(11 * FIXTURES["constant_length"]),
    }[loss_fn.config.normalization]
    if loss_fn.config.ratio_level == "sequence_product":  # the whole completion is one action
        divisor = torch.tensor(11)
    torch.testing.assert_close(leaf.grad, -data["advantages"] * mask / divisor, rtol=0, atol=1e-12)


# What docs/algorithms.md says about the KL estimators


@pytest.mark.parametrize(
    ("estimator", "gradient_of"), [("k1", "nothing"), ("k2", "policy to reference"), ("k3", "reference to policy")]
)
def test_the_expected_gradient_of_each_kl_estimator(estimator, gradient_of):
    """The exact expectation over a distribution of five tokens, by summing over all of them."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.0, -0.4], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.5, 0.2, 0.4, 0.9, -1.0], dtype=torch.float64).log_softmax(0)

    def divergence(kind: str) -> torch.Tensor:
        policy = logits.log_softmax(0)
        if kind == "policy to reference":
            return (policy.exp() * (policy - reference)).sum()
        return (reference.exp() * (reference - policy)).sum() if kind == "reference to policy" else 0 * policy.sum()

    logprobs = logits.log_softmax(0)[:, None]
    data = {
        "token_mask": torch.ones(5, 2),
        "sample_mask": torch.ones(5),
        "advantages": torch.zeros(5),
        "reference_policy_logprobs": torch.nn.functional.pad(reference[:, None], (1, 0)),
    }
    loss_fn = loss_of(Variant.GRPO, on_policy=True, kl_coefficient=1.0, kl_estimator=estimator)
    outputs = torch.nn.functional.pad(logprobs, (1, 0))
    by_token = []
    for token in range(5):
        row = {name: column[[token]] for name, column in data.items()}
        by_token.append(loss_fn(TokenOutputs(logprobs=outputs[[token]]), row, *counts(row))[0])
    probabilities = logprobs.detach().exp()[:, 0]
    [found] = torch.autograd.grad((probabilities * torch.stack(by_token)).sum(), logits, retain_graph=True)
    [expected] = torch.autograd.grad(divergence(gradient_of), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_kl_in_the_reward_has_the_gradient_of_the_divergence_from_policy_to_reference():
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.5, 0.2, 0.4], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    penalty = (policy - reference).detach()
    # The loss of a token with reward -penalty is penalty * logprob.
    [found] = torch.autograd.grad((policy.detach().exp() * penalty * policy).sum(), logits, retain_graph=True)
    [expected] = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
