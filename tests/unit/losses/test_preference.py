"""Preference losses agree with a plain implementation, row by row, in value and gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lucidrl.errors import DataError
from lucidrl.losses.config import PreferenceConfig
from lucidrl.losses.interfaces import TokenOutputs
from lucidrl.losses.preference import BradleyTerryLoss, PreferenceLoss
from lucidrl.losses.reductions import reduce_metrics

PAIRS, LENGTH = 4, 7
LOSSES = ["dpo", "ipo", "kto"]
WEIGHTS = {"desirable_weight": 1.3, "undesirable_weight": 0.6}


def columns() -> dict[str, Any]:
    """Four pairs; in the second one, the rejected completion comes first."""
    generator = torch.Generator().manual_seed(3)
    starts = torch.randint(1, 4, (2 * PAIRS, 1), generator=generator)
    ends = torch.randint(4, LENGTH + 1, (2 * PAIRS, 1), generator=generator)
    return {
        "token_mask": ((torch.arange(LENGTH) >= starts) & (torch.arange(LENGTH) < ends)).long(),
        "sample_mask": torch.ones(2 * PAIRS),
        "preference": torch.tensor([1.0, -1, -1, 1, 1, -1, 1, -1]),
        "pair_ids": torch.arange(PAIRS).repeat_interleave(2) + 5,
        "reference_logprob_sums": -3 * torch.rand(2 * PAIRS, generator=generator, dtype=torch.float64) - 3,
        "kl_baseline": torch.full((2 * PAIRS,), 0.4, dtype=torch.float64),
    }


def random_logprobs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return -2 * torch.rand(2 * PAIRS, LENGTH, generator=generator, dtype=torch.float64)


def loss_of(loss_fn, outputs: TokenOutputs, data: dict[str, Any], num_rows: int = 2 * PAIRS):
    return loss_fn(outputs, data, torch.tensor(num_rows), torch.tensor(99))


def plain(kind: str, beta: float, logprobs: torch.Tensor, data: dict[str, Any]) -> torch.Tensor:
    """The losses as in their papers; IPO per token, as its authors recommend."""
    ratios, lengths = [], []
    for row in range(2 * PAIRS):
        tokens = [time for time in range(1, LENGTH) if data["token_mask"][row, time]]
        ratios.append(sum(logprobs[row, time] for time in tokens) - data["reference_logprob_sums"][row])
        lengths.append(len(tokens))
    losses = []
    if kind == "kto":
        for row, ratio in enumerate(ratios):
            is_desirable = data["preference"][row] > 0
            distance = ratio - data["kl_baseline"][row]
            value = 1 / (1 + torch.exp(-beta * (distance if is_desirable else -distance)))
            losses.append(WEIGHTS["desirable_weight" if is_desirable else "undesirable_weight"] * (1 - value))
    for pair in range(PAIRS) if kind != "kto" else ():
        first_is_chosen = data["preference"][2 * pair] > 0
        chosen, rejected = (2 * pair, 2 * pair + 1) if first_is_chosen else (2 * pair + 1, 2 * pair)
        if kind == "dpo":
            losses.append(torch.log(1 + torch.exp(-beta * (ratios[chosen] - ratios[rejected]))))
        else:
            margin = ratios[chosen] / lengths[chosen] - ratios[rejected] / lengths[rejected]
            losses.append((margin - 1 / (2 * beta)) ** 2)
    return sum(losses) / len(losses)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_value_and_gradient_are_those_of_the_formula(kind, beta):
    data, ours, theirs = columns(), random_logprobs().requires_grad_(), random_logprobs().requires_grad_()
    loss, _ = loss_of(PreferenceLoss(PreferenceConfig(loss=kind, beta=beta, **WEIGHTS)), TokenOutputs(ours), data)
    expected = plain(kind, beta, theirs, data)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    loss.backward()
    expected.backward()
    assert theirs.grad.abs().max() > 1e-4
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", LOSSES)
def test_micro_batches_sum_up_to_the_batch_and_so_do_their_metrics(kind):
    data, loss_fn = columns(), PreferenceLoss(PreferenceConfig(loss=kind))
    whole, metrics = loss_of(loss_fn, TokenOutputs(random_logprobs()), data)
    parts = []
    for rows in (slice(0, 2), slice(2, 8)):
        cut = {name: column[rows] for name, column in data.items()}
        parts.append(loss_of(loss_fn, TokenOutputs(random_logprobs()[rows]), cut))
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole, rtol=1e-12, atol=1e-12)
    of_parts = reduce_metrics([(found, float(number)) for (_, found), number in zip(parts, (2, 6), strict=True)])
    assert of_parts == pytest.approx(reduce_metrics([(metrics, 8.0)]), rel=1e-12)


@pytest.mark.parametrize("kind", LOSSES)
def test_tokens_outside_of_completions_do_not_matter_not_even_nan(kind):
    data, clean = columns(), random_logprobs().requires_grad_()
    is_prompt = ~data["token_mask"].bool()
    spoiled = random_logprobs().masked_fill(is_prompt, torch.nan).requires_grad_()
    loss_fn = PreferenceLoss(PreferenceConfig(loss=kind))
    for logprobs in (clean, spoiled):
        loss_of(loss_fn, TokenOutputs(logprobs), data)[0].backward()
    assert torch.equal(clean.grad, spoiled.grad)


def test_accuracy_and_margin_are_those_of_the_implicit_rewards():
    data = columns()
    data["token_mask"] = torch.zeros(2 * PAIRS, LENGTH).index_fill(1, torch.tensor(2), 1)
    data["reference_logprob_sums"] = torch.zeros(2 * PAIRS)
    logprobs = torch.zeros(2 * PAIRS, LENGTH)
    logprobs[:, 2] = torch.tensor([-1.0, -3, -1, -2, -4, -4, -1, -2])  # right, wrong, equal, right
    _, metrics = loss_of(PreferenceLoss(PreferenceConfig(beta=0.5)), TokenOutputs(logprobs), data)
    found = reduce_metrics([(metrics, 8.0)])
    assert found["accuracy"] == 0.625
    assert found["reward_margin"] == pytest.approx(0.5 * (2 - 1 + 0 + 1) / 4)
    assert found["chosen_reward"] == pytest.approx(0.5 * (-1 - 2 - 4 - 1) / 4)


def test_kto_learns_from_single_completions_and_measures_the_accuracy_of_pairs_only():
    data, loss_fn = columns(), PreferenceLoss(PreferenceConfig(loss="kto"))
    data["pair_ids"] = torch.tensor([0, 0, 1, 2, 3, 4, 5, 5])
    _, metrics = loss_of(loss_fn, TokenOutputs(random_logprobs()), data)
    assert metrics["accuracy"].weight == 2
    data["pair_ids"] = torch.arange(8)
    _, metrics = loss_of(loss_fn, TokenOutputs(random_logprobs()), data)
    assert math.isnan(reduce_metrics([(metrics, 8.0)])["accuracy"])


def test_bradley_terry_is_the_logistic_loss_of_the_marked_tokens():
    data, generator = columns(), torch.Generator().manual_seed(1)
    marked = torch.tensor([3, 2, 5, 6, 1, 4, 2, 6])
    data["token_mask"] = torch.nn.functional.one_hot(marked, LENGTH)
    values = torch.randn(2 * PAIRS, LENGTH, generator=generator, dtype=torch.float64)
    ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    loss, metrics = loss_of(BradleyTerryLoss(), TokenOutputs(values=ours), data)
    scores = [theirs[row, marked[row]] for row in range(2 * PAIRS)]
    pairs = [(0, 1), (3, 2), (4, 5), (6, 7)]
    margins = [scores[chosen] - scores[rejected] for chosen, rejected in pairs]
    expected = sum(torch.log(1 + torch.exp(-margin)) for margin in margins) / PAIRS
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    assert reduce_metrics([(metrics, 8.0)])["accuracy"] == sum(float(margin.detach()) > 0 for margin in margins) / PAIRS


@pytest.mark.parametrize("loss_fn", [PreferenceLoss(PreferenceConfig()), BradleyTerryLoss()])
def test_rows_that_are_no_pairs_are_refused(loss_fn):
    outputs = TokenOutputs(logprobs=random_logprobs(), values=random_logprobs())
    for name, column in (("pair_ids", torch.arange(8)), ("preference", torch.ones(8))):
        with pytest.raises(DataError, match="the 8 rows of a micro-batch are not pairs"):
            loss_of(loss_fn, outputs, {**columns(), name: column})
    with pytest.raises(DataError, match="no column 'pair_ids'"):
        loss_of(loss_fn, outputs, {name: column for name, column in columns().items() if name != "pair_ids"})
