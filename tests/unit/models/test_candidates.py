"""Log-probabilities of candidates, and of all other tokens together, equal those of a plain softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lucidrl.models import head as head_module
from lucidrl.models.candidates import candidate_logprobs, top_logprobs
from lucidrl.models.head import LogitTransform
from tests.unit.models.test_vocab_parallel import TRANSFORMS, make_inputs, split, whole

VOCABULARY = 31


def candidates_of(vocabulary: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.stack([torch.randperm(vocabulary, generator=generator)[:number] for _ in range(50)])


def gradients_of(output: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs, and the gradients of a loss that weighs every output differently."""
    finite = torch.where(output.candidates.isfinite(), output.candidates, 0)
    weights = torch.linspace(-1, 2, finite.numel()).to(finite).view_as(finite)
    loss = (weights * finite).sum() + (weights[:, 0] * output.logprobs.square()).sum()
    return [output.logprobs.detach(), output.candidates.detach(), *map(whole, torch.autograd.grad(loss, inputs))]


class Plain:
    """The same values from a softmax over all logits."""

    def __init__(self, hidden, head, targets, ids, transform):
        raw = hidden @ head.weight.T + (head.bias if head.bias is not None else 0)
        logits = raw * transform.scale
        if transform.softcap is not None:
            logits = transform.softcap * torch.tanh(logits / transform.softcap)
        logprobs = torch.log_softmax(logits / transform.temperature, dim=1)
        is_other = torch.ones_like(logprobs, dtype=torch.bool).scatter(1, ids, False)
        others = torch.stack([row[kept].logsumexp(0) for row, kept in zip(logprobs, is_other, strict=True)])
        self.logprobs = logprobs.gather(1, targets[:, None])[:, 0]
        self.candidates = torch.cat([logprobs.gather(1, ids), others[:, None]], dim=1)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("number", [1, 7, VOCABULARY])
@pytest.mark.parametrize("chunk_elements", [1 << 23, 20 * VOCABULARY])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_those_of_a_plain_softmax(monkeypatch, transform, number, chunk_elements, bias):
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", chunk_elements)
    hidden, head, targets = make_inputs(VOCABULARY, bias=bias)
    arguments = hidden, head, targets, candidates_of(VOCABULARY, number), TRANSFORMS[transform]
    inputs = [hidden, *head.parameters()]
    found, expected = gradients_of(candidate_logprobs(*arguments), inputs), gradients_of(Plain(*arguments), inputs)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


def test_float32_agrees_to_1e_6():
    hidden, head, targets = make_inputs(VOCABULARY, bias=False, dtype=torch.float32)
    exact, exact_head, _ = make_inputs(VOCABULARY, bias=False)
    with torch.no_grad():
        exact.copy_(hidden)
        exact_head.weight.copy_(head.weight)
    ids = candidates_of(VOCABULARY, 7)
    found = candidate_logprobs(hidden, head, targets, ids, LogitTransform())
    expected = Plain(exact, exact_head, targets, ids, LogitTransform())
    torch.testing.assert_close(found.candidates.double(), expected.candidates, rtol=1e-6, atol=2e-6)


def test_the_mass_of_all_others_is_exact_where_the_candidates_have_nearly_all():
    head = torch.nn.Linear(1, 4, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[60.0], [0.0], [1.0], [2.0]]))
    hidden = torch.ones(1, 1, requires_grad=True)
    found = candidate_logprobs(hidden, head, torch.tensor([0]), torch.tensor([[0, 1]]), LogitTransform())
    assert found.candidates[0, -1].item() == pytest.approx(torch.tensor([1.0, 2.0]).logsumexp(0).item() - 60, abs=1e-5)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_teacher_returns_its_likeliest_tokens_among_those_of_the_tokenizer(transform):
    hidden, head, targets = make_inputs(VOCABULARY, bias=True)
    ids, candidates = top_logprobs(hidden, head, 5, VOCABULARY - 3, TRANSFORMS[transform])
    assert ids.max() < VOCABULARY - 3
    plain = Plain(hidden, head, targets, ids, TRANSFORMS[transform])
    torch.testing.assert_close(candidates, plain.candidates.detach(), rtol=1e-10, atol=1e-11)
    everything = Plain(hidden, head, targets, torch.arange(VOCABULARY).repeat(50, 1), TRANSFORMS[transform])
    assert torch.equal(ids, everything.candidates[:, : VOCABULARY - 3].topk(5).indices)


def scored_by_shards(transform: LogitTransform, number: int) -> list[torch.Tensor]:
    hidden, head, targets = make_inputs(VOCABULARY, bias=True)
    group = split(head)
    output = candidate_logprobs(hidden, head, targets, candidates_of(VOCABULARY, number), transform, group=group)
    return gradients_of(output, [hidden, *head.parameters()])


@pytest.mark.parametrize("number", [1, 7, VOCABULARY])
def test_a_head_split_over_ranks_equals_the_whole_head(two_ranks, number):
    transform = TRANSFORMS["everything"]
    hidden, head, targets = make_inputs(VOCABULARY, bias=True)
    output = candidate_logprobs(hidden, head, targets, candidates_of(VOCABULARY, number), transform)
    expected = gradients_of(output, [hidden, *head.parameters()])
    for found in two_ranks(scored_by_shards, transform, number):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
