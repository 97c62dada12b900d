"""Draws follow the distribution of the logits and depend on their key only."""

from __future__ import annotations

import pytest
import torch

from lucidrl.models.generation.sampling import BLOCK, draw, draw_key, uniforms
from tests.tiers import slow_except

LARGEST_UNIFORM = 1 - 2.0**-53


def keys(count: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor([draw_key(seed, number) for number in range(count)], dtype=torch.int64)


def random_logits(rows: int, vocabulary: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return spread * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def test_keys_and_uniforms_never_change():
    """A seed must mean the same completions in every release."""
    assert draw_key(0, 7, "12+30", 3) == 2877050337132119151
    assert draw_key(1) == 3390214401120528442
    numbers = uniforms(torch.tensor([0, -1, 2**63 - 1]), 2)
    assert numbers.tolist() == [
        [0.8833108082136426, 0.43152799704850997],
        [0.8939429202831845, 0.9125972035944532],
        [0.16564699010451844, 0.9454956800914366],
    ]


def test_different_parts_give_different_keys():
    parts = [(1, 23), (12, 3), (1, "23"), ("1", 23), ("1", "23"), (1, 2, 3), (123,), (), ("",)]
    assert len({draw_key(*part) for part in parts}) == len(parts)


def test_uniforms_depend_on_key_and_position_only():
    every = uniforms(keys(40), 30)
    assert torch.equal(uniforms(keys(40)[[7, 3]], 30), every[[7, 3]])
    assert torch.equal(uniforms(keys(40), 16), every[:, :16])
    assert every.dtype == torch.float64
    assert len(every.unique()) == every.numel()


def test_uniforms_are_uniform_and_uncorrelated():
    numbers = uniforms(torch.arange(20_000), 4)
    assert 0 <= numbers.min() < 1e-3
    assert 1 - 1e-3 < numbers.max() < 1
    counts = torch.histc(numbers.flatten().float(), bins=50, min=0, max=1)
    expected = numbers.numel() / 50
    # 49 degrees of freedom: mean 49, and 100 is more than five standard deviations away.
    assert ((counts - expected) ** 2 / expected).sum() < 100
    correlation = torch.corrcoef(torch.cat((numbers.T, numbers.roll(1, 0).T)))
    assert (correlation - torch.eye(8, dtype=torch.float64)).abs().max() < 0.04


@pytest.mark.parametrize("vocabulary", slow_except([5, BLOCK, 3 * BLOCK + 44], 3 * BLOCK + 44))
def test_draws_follow_the_softmax(vocabulary):
    logits = random_logits(1, vocabulary)
    count = 50_000
    numbers = uniforms(keys(100), count // 100).flatten()
    tokens = torch.cat([draw(logits.expand(len(part), -1), part)[0] for part in numbers.split(2_000)])
    expected = logits.softmax(-1)[0].double() * count
    seen = torch.bincount(tokens, minlength=vocabulary).double()
    common = expected > 5
    chi_square = ((seen - expected)[common] ** 2 / expected[common]).sum()
    freedom = int(common.sum())
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5
    assert 0.5 * (seen - expected).abs().sum() / count < 0.05


def test_a_draw_is_the_inverse_of_the_cumulative_distribution():
    logits = random_logits(200, 700, seed=1).double()
    numbers = uniforms(keys(200), 1)[:, 0]
    tokens, _ = draw(logits, numbers)
    above = logits.softmax(-1).cumsum(-1).gather(1, tokens[:, None])[:, 0]
    below = above - logits.softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert (below - 1e-12 <= numbers).all()
    assert (numbers < above + 1e-12).all()


def test_a_rows_token_does_not_depend_on_the_batch():
    logits, numbers = random_logits(64, 300), uniforms(keys(64), 1)[:, 0]
    together, _ = draw(logits, numbers)
    alone = [draw(logits[row : row + 1], numbers[row : row + 1])[0] for row in range(64)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("top_k", [1, 3, 40, 10_000])
def test_top_k_draws_all_of_the_k_most_likely_tokens_and_no_others(top_k):
    logits = random_logits(1, 300, spread=0.3)
    tokens, _ = draw(logits.expand(8_000, -1), uniforms(keys(1), 8_000)[0], top_k=top_k)
    assert set(tokens.tolist()) == set(logits[0].topk(min(top_k, 300)).indices.tolist())


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9])
def test_top_p_draws_from_the_smallest_set_of_most_likely_tokens(top_p):
    logits = random_logits(1, 100, spread=1.0)
    ordered, index = logits[0].double().softmax(-1).sort(descending=True)
    size = int((ordered.cumsum(0) < top_p).sum()) + 1
    tokens, _ = draw(logits.expand(10_000, -1), uniforms(keys(1), 10_000)[0], top_p=top_p)
    assert set(tokens.tolist()) == set(index[:size].tolist())


def test_top_p_applies_after_top_k():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    numbers = uniforms(keys(1), 5_000)[0]
    tokens, _ = draw(logits.expand(5_000, -1), numbers, top_k=2, top_p=0.5)
    assert set(tokens.tolist()) == {0}  # 0.4 of 0.7 is more than half


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.4}, {"greedy": True}], ids=str)
def test_logprobs_are_those_of_the_full_distribution(options):
    logits = random_logits(50, 300)
    tokens, logprobs = draw(logits, uniforms(keys(50), 1)[:, 0], **options)
    expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


def test_greedy_takes_the_most_likely_token():
    logits = random_logits(50, 300)
    assert torch.equal(draw(logits, torch.zeros(50), greedy=True)[0], logits.argmax(-1))


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, LARGEST_UNIFORM])
@pytest.mark.parametrize("vocabulary", [3, BLOCK, 4 * BLOCK + 1])
def test_a_token_of_probability_zero_is_never_drawn(uniform, vocabulary):
    """Also where whole blocks at either end, or all but one token, are impossible."""
    generator = torch.Generator().manual_seed(vocabulary)
    rows = 300
    logits = 5 * torch.randn(rows, vocabulary, generator=generator)
    start = torch.randint(vocabulary, (rows, 1), generator=generator)
    end = start + 1 + torch.randint(vocabulary, (rows, 1), generator=generator)
    token = torch.arange(vocabulary)
    possible = (token >= start) & (token < end)
    logits = logits.masked_fill(~possible, float("-inf"))
    tokens, logprobs = draw(logits, torch.full((rows,), uniform, dtype=torch.float64))
    assert possible.gather(1, tokens[:, None]).all()
    assert logprobs.isfinite().all()


def test_the_ends_of_the_unit_interval_give_the_first_and_last_possible_token():
    logits = torch.full((2, 1000), float("-inf"))
    logits[:, [300, 511, 600]] = 0.0
    tokens, _ = draw(logits, torch.tensor([0.0, LARGEST_UNIFORM], dtype=torch.float64))
    assert tokens.tolist() == [300, 600]
