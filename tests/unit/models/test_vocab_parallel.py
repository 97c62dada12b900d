"""A head that is split over ranks by vocabulary equals the whole head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lucidrl.models import head as head_module
from lucidrl.models.head import LogitTransform, gathered_logits, token_logprobs

TOKENS, HIDDEN = 50, 6
TRANSFORMS = {
    "plain": LogitTransform(),
    "everything": LogitTransform(scale=1.7, softcap=2.5, temperature=0.6),
}


def make_inputs(
    vocabulary: int, *, bias: bool, dtype: torch.dtype = torch.float64, tokens: int = TOKENS
) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    head = nn.Linear(HIDDEN, vocabulary, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
    return hidden, head, torch.randint(vocabulary, (tokens,), generator=generator)


def split(head: nn.Linear) -> dist.ProcessGroup:
    """Splits a head over all ranks, in place."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, parameter in list(head.named_parameters()):
        head.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    return mesh.get_group()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def scored(
    hidden: torch.Tensor, head: nn.Linear, targets: torch.Tensor, transform: LogitTransform, **options: Any
) -> list[torch.Tensor]:
    """Log-probabilities, entropy, and the gradients of hidden states and head under a loss of both."""
    output = token_logprobs(hidden, head, targets, transform, with_entropy=True, **options)
    assert output.entropy is not None
    weights = torch.linspace(-1, 2, len(targets)).to(output.logprobs)
    loss = (weights * output.logprobs + weights.flip(0) * output.entropy).sum()
    gradients = torch.autograd.grad(loss, [hidden, *head.parameters()])
    return [output.logprobs.detach(), output.entropy.detach(), *map(whole, gradients)]


def scored_by_shards(
    vocabulary: int, bias: bool, transform: LogitTransform, recompute: bool, chunk_elements: int
) -> list[torch.Tensor]:
    head_module.CHUNK_ELEMENTS, usual = chunk_elements, head_module.CHUNK_ELEMENTS
    try:
        hidden, head, targets = make_inputs(vocabulary, bias=bias)
        return scored(hidden, head, targets, transform, recompute=recompute, group=split(head))
    finally:
        head_module.CHUNK_ELEMENTS = usual


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize(
    ("recompute", "chunk_elements"), [(False, 1), (True, 1), (False, 1 << 23)], ids=["kept", "recomputed", "one_chunk"]
)
def test_two_shards_equal_the_whole_head(two_ranks, transform, bias, recompute, chunk_elements):
    expected = scored(*make_inputs(37, bias=bias), transform)
    for found in two_ranks(scored_by_shards, 37, bias, transform, recompute, chunk_elements):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("vocabulary", [40, 38, 37], ids=["even", "smaller_last_shard", "much_smaller_last_shard"])
def test_four_shards_of_any_size_equal_the_whole_head(four_ranks, vocabulary):
    transform = TRANSFORMS["everything"]
    expected = scored(*make_inputs(vocabulary, bias=True), transform)
    results = four_ranks(scored_by_shards, vocabulary, True, transform, False, 1)
    for found in results:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert all(map(torch.equal, found, results[0])), "ranks must not drift apart"


def gradients_of_parameters() -> list[tuple[type, tuple[int, ...]]]:
    hidden, head, targets = make_inputs(37, bias=True)
    group = split(head)
    token_logprobs(hidden, head, targets, LogitTransform(), group=group).logprobs.sum().backward()
    return [(type(p.grad), tuple(p.grad.to_local().shape)) for p in head.parameters()]


def test_the_gradient_of_a_split_parameter_has_the_same_split(two_ranks):
    assert two_ranks(gradients_of_parameters) == [
        [(DTensor, (19, HIDDEN)), (DTensor, (19,))],
        [(DTensor, (18, HIDDEN)), (DTensor, (18,))],
    ]


def scored_from_local_parameters() -> torch.Tensor:
    hidden, head, targets = make_inputs(37, bias=True)
    group = split(head)
    for name, parameter in list(head.named_parameters()):
        head.register_parameter(name, nn.Parameter(parameter.detach().to_local()))
    with torch.no_grad():
        return token_logprobs(hidden, head, targets, LogitTransform(), group=group).logprobs


def test_parameters_may_be_local_shards(two_ranks):
    hidden, head, targets = make_inputs(37, bias=True)
    expected = token_logprobs(hidden, head, targets, LogitTransform()).logprobs.detach()
    for found in two_ranks(scored_from_local_parameters):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def scored_in_bfloat16() -> list[torch.Tensor]:
    hidden, head, targets = make_inputs(37, bias=True, dtype=torch.bfloat16)
    return scored(hidden, head, targets, LogitTransform(), group=split(head))


def test_bfloat16_shards_give_float32_log_probabilities(two_ranks):
    logprobs, entropy, *gradients = scored(*make_inputs(37, bias=True, dtype=torch.bfloat16), LogitTransform())
    for found in two_ranks(scored_in_bfloat16):
        assert found[0].dtype == torch.float32
        torch.testing.assert_close(found[:2], [logprobs, entropy], rtol=0, atol=1e-5)
        for gradient, expected in zip(found[2:], gradients, strict=True):
            assert gradient.dtype == torch.bfloat16
            assert (gradient - expected).float().norm() < 0.02 * expected.float().norm()


def scored_without_tokens() -> tuple[torch.Size, bool]:
    hidden, head, targets = make_inputs(37, bias=True, tokens=0)
    logprobs, _, *gradients = scored(hidden, head, targets, LogitTransform(), group=split(head))
    return logprobs.shape, any(bool(gradient.any()) for gradient in gradients)


def test_no_tokens_give_no_values_and_zero_gradients(two_ranks):
    assert two_ranks(scored_without_tokens) == [((0,), False)] * 2


def logits_and_gradients(hidden: torch.Tensor, head: nn.Linear, logits: torch.Tensor) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    gradients = torch.autograd.grad((weights * logits.square()).sum(), [hidden, *head.parameters()])
    return [logits.detach(), *map(whole, gradients)]


def gathered(vocabulary: int, bias: bool) -> list[torch.Tensor]:
    hidden, head, _ = make_inputs(vocabulary, bias=bias)
    split(head)
    return logits_and_gradients(hidden, head, gathered_logits(hidden, head))


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("vocabulary", [40, 37])
def test_gathered_logits_and_their_gradients_equal_those_of_the_whole_head(four_ranks, vocabulary, bias):
    hidden, head, _ = make_inputs(vocabulary, bias=bias)
    expected = logits_and_gradients(hidden, head, head(hidden))
    for found in four_ranks(gathered, vocabulary, bias):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
