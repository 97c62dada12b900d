"""The chunked head equals plain autograd, and keeps only the documented logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lucidrl.models import head as head_module
from lucidrl.models.head import LogitTransform, token_logprobs

TOKENS, HIDDEN, VOCABULARY = 50, 6, 37
TRANSFORMS = {
    "plain": LogitTransform(),
    "temperature": LogitTransform(temperature=0.7),
    "scale": LogitTransform(scale=0.3, temperature=1.3),
    "softcap": LogitTransform(softcap=1.5),
    "everything": LogitTransform(scale=1.7, softcap=2.5, temperature=0.6),
}
CHUNK_ELEMENTS = {"one_chunk": 1 << 23, "chunks_of_20": 20 * VOCABULARY, "smallest_chunks": 1}


def make_inputs(
    dtype: torch.dtype, *, bias: bool, tokens: int = TOKENS
) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
    return hidden, head, torch.randint(VOCABULARY, (tokens,), generator=generator)


def plain_logprobs(
    hidden: torch.Tensor, head: nn.Linear, targets: torch.Tensor, transform: LogitTransform
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = head(hidden) * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    log_p = F.log_softmax(logits / transform.temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def gradients(output: torch.Tensor, hidden: torch.Tensor, head: nn.Linear) -> list[torch.Tensor]:
    return list(torch.autograd.grad(output, [hidden, *head.parameters()], retain_graph=True))


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize("chunk_elements", CHUNK_ELEMENTS.values(), ids=CHUNK_ELEMENTS.keys())
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_values_and_gradients_equal_plain_autograd(monkeypatch, transform, chunk_elements, bias, recompute):
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", chunk_elements)
    hidden, head, targets = make_inputs(torch.float64, bias=bias)
    ours = token_logprobs(hidden, head, targets, transform, with_entropy=True, recompute=recompute)
    logprobs, entropy = plain_logprobs(hidden, head, targets, transform)
    assert ours.entropy is not None
    torch.testing.assert_close(ours.logprobs, logprobs, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.entropy, entropy, rtol=0, atol=1e-12)

    weights = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    for loss_of in (
        lambda logprobs, entropy: (weights * logprobs).sum(),
        lambda logprobs, entropy: (weights.flip(0) * entropy).sum(),
        lambda logprobs, entropy: (weights * logprobs + weights.flip(0) * entropy).sum(),
    ):
        expected = gradients(loss_of(logprobs, entropy), hidden, head)
        found = gradients(loss_of(ours.logprobs, ours.entropy), hidden, head)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_without_entropy_the_gradient_is_the_same():
    hidden, head, targets = make_inputs(torch.float64, bias=True)
    transform = TRANSFORMS["everything"]
    ours = token_logprobs(hidden, head, targets, transform)
    assert ours.entropy is None
    expected = gradients(plain_logprobs(hidden, head, targets, transform)[0].sum(), hidden, head)
    torch.testing.assert_close(gradients(ours.logprobs.sum(), hidden, head), expected, rtol=1e-12, atol=1e-12)


def test_bfloat16_is_computed_in_float32_after_the_matrix_product(monkeypatch):
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", 1)
    hidden, head, targets = make_inputs(torch.bfloat16, bias=True)
    transform = TRANSFORMS["everything"]
    ours = token_logprobs(hidden, head, targets, transform, with_entropy=True)
    assert ours.logprobs.dtype == torch.float32

    exact_hidden = hidden.detach().double().requires_grad_()
    exact_head = nn.Linear(HIDDEN, VOCABULARY, dtype=torch.float64)
    exact_head.load_state_dict({name: value.double() for name, value in head.state_dict().items()})
    logprobs, entropy = plain_logprobs(exact_hidden, exact_head, targets, transform)
    torch.testing.assert_close(ours.logprobs.double(), logprobs, rtol=0, atol=0.05)
    torch.testing.assert_close(ours.entropy.double(), entropy, rtol=0, atol=0.05)
    for found, expected in zip(
        gradients((ours.logprobs + ours.entropy).sum(), hidden, head),
        gradients((logprobs + entropy).sum(), exact_hidden, exact_head),
        strict=True,
    ):
        assert found.dtype == torch.bfloat16
        assert (found.double() - expected).norm() < 0.02 * expected.norm()


def test_backward_can_run_twice_and_gives_the_same_gradients(monkeypatch):
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", 1)
    hidden, head, targets = make_inputs(torch.float64, bias=True)
    ours = token_logprobs(hidden, head, targets, TRANSFORMS["everything"], with_entropy=True)
    loss = (ours.logprobs * ours.entropy).sum()
    first = gradients(loss, hidden, head)
    assert all(map(torch.equal, first, gradients(loss, hidden, head)))


def test_no_tokens_give_no_values_and_zero_gradients():
    hidden, head, targets = make_inputs(torch.float32, bias=True, tokens=0)
    ours = token_logprobs(hidden, head, targets, LogitTransform(), with_entropy=True)
    assert ours.logprobs.shape == ours.entropy.shape == (0,)
    found = gradients(ours.logprobs.sum() + ours.entropy.sum(), hidden, head)
    assert [gradient.shape for gradient in found] == [hidden.shape, head.weight.shape, head.bias.shape]
    assert not any(gradient.any() for gradient in found)


@pytest.mark.parametrize(("frozen", "trained"), [("head", "hidden"), ("hidden", "head")])
def test_only_trained_tensors_get_a_gradient(frozen, trained):
    hidden, head, targets = make_inputs(torch.float64, bias=True)
    {"hidden": hidden, "head": head}[frozen].requires_grad_(False)
    token_logprobs(hidden, head, targets, LogitTransform()).logprobs.sum().backward()
    grads = {"hidden": hidden.grad, "head": head.weight.grad}
    assert grads[frozen] is None
    assert grads[trained].any()


@pytest.mark.parametrize(
    ("dtype", "recompute", "expected_chunks"),
    [
        pytest.param(torch.bfloat16, False, 4, id="half_precision_keeps_all"),
        pytest.param(torch.float32, False, 2, id="float32_keeps_every_second"),
        pytest.param(torch.float64, False, 1, id="float64_keeps_every_fourth"),
        pytest.param(torch.float32, True, 0, id="recompute_keeps_none"),
    ],
)
def test_logits_kept_for_backward(monkeypatch, dtype, recompute, expected_chunks):
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", 1)
    hidden, head, targets = make_inputs(dtype, bias=False)
    assert len(kept_logits(hidden, head, targets, recompute)) == expected_chunks


def test_nothing_is_kept_without_gradients():
    hidden, head, targets = make_inputs(torch.float32, bias=False)
    with torch.no_grad():
        assert kept_logits(hidden, head, targets, recompute=False) == []
        assert token_logprobs(hidden, head, targets, LogitTransform()).logprobs.grad_fn is None


def kept_logits(hidden: torch.Tensor, head: nn.Linear, targets: torch.Tensor, recompute: bool) -> list[torch.Tensor]:
    """The tensors with a vocabulary dim that a forward call saves for its backward pass."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        token_logprobs(hidden, head, targets, LogitTransform(), with_entropy=True, recompute=recompute)
    return [tensor for tensor in saved if tensor.dim() == 2 and tensor.shape[1] == VOCABULARY]


def test_half_precision_gradients_of_confident_tokens_do_not_vanish():
    """1 - p is 4e-4 here. The probability in bfloat16 is 1."""
    torch.manual_seed(0)
    head = nn.Linear(16, 50, bias=False).bfloat16()
    hidden = torch.randn(8, 16).bfloat16().requires_grad_()
    targets = torch.arange(8)
    with torch.no_grad():
        head.weight[:8] = (hidden * 0.75).bfloat16()
    token_logprobs(hidden, head, targets, LogitTransform()).logprobs.sum().backward()
    exact = hidden.detach().double().requires_grad_()
    logprobs = torch.log_softmax(exact @ head.weight.detach().double().T, dim=-1)[range(8), targets]
    logprobs.sum().backward()
    assert (1 - logprobs.exp()).median() < 2e-3
    assert (hidden.grad.double() - exact.grad).norm() < 0.05 * exact.grad.norm()
