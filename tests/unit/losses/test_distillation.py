"""Distillation losses agree with a plain implementation over the whole vocabulary, in value and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lucidrl.errors import DataError
from lucidrl.losses.config import ClippedPGConfig
from lucidrl.losses.distillation import DistillationLoss
from lucidrl.losses.interfaces import TokenOutputs

ROWS, LENGTH, VOCABULARY = 3, 6, 9


class Case:
    """Logits of student and teacher, with an unsampled prompt and a masked row."""

    def __init__(self, top_k: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(2)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.student = randn(ROWS, LENGTH, VOCABULARY).requires_grad_()
        teacher = torch.log_softmax(randn(ROWS, LENGTH, VOCABULARY), dim=-1)
        self.teacher = teacher
        self.ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
        self.candidate_ids = teacher.topk(top_k).indices
        self.data: dict[str, Any] = {
            "token_mask": (torch.arange(LENGTH) >= torch.tensor([[2], [3], [1]])).long(),
            "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
            "advantages": randn(ROWS),
            "prev_logprobs": self.picked(torch.log_softmax(self.student.detach() + 0.1 * randn(1), dim=-1)),
            "teacher_logprobs": self.picked(teacher),
            "candidate_ids": self.candidate_ids,
            "teacher_candidates": self.coarse(teacher),
        }
        self.counted = [(row, time) for row in range(2) for time in range(LENGTH) if self.data["token_mask"][row, time]]

    def picked(self, logprobs: torch.Tensor) -> torch.Tensor:
        return logprobs.gather(-1, self.ids[..., None])[..., 0]

    def coarse(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the candidates, and of all others together."""
        others = logprobs.scatter(-1, self.candidate_ids, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat([logprobs.gather(-1, self.candidate_ids), others], dim=-1)

    def loss(self, loss_fn: DistillationLoss, spoiled: bool = False) -> torch.Tensor:
        logprobs = torch.log_softmax(self.student, dim=-1)
        data = dict(self.data)
        if spoiled:
            is_masked = ~(self.data["token_mask"].bool() & self.data["sample_mask"].bool()[:, None])
            for name in ("prev_logprobs", "teacher_logprobs", "teacher_candidates"):
                data[name] = data[name].clone()
                data[name][is_masked] = torch.nan
        others = torch.ones_like(logprobs, dtype=torch.bool).scatter(-1, self.candidate_ids, False)
        mass = torch.where(others, logprobs.exp(), 0).sum(-1, keepdim=True)
        rest = torch.where(mass > 0, mass.clamp(min=1e-300).log(), -torch.inf)
        candidates = torch.cat([logprobs.gather(-1, self.candidate_ids), rest], dim=-1)
        outputs = TokenOutputs(logprobs=self.picked(logprobs), candidates=candidates)
        counts = torch.tensor(2), torch.tensor(len(self.counted))
        return loss_fn(outputs, data, *counts)[0]

    def plain(self, reward: float, coefficient: float, divergence: str) -> torch.Tensor:
        """The loss as its definition, token by token."""
        total = torch.zeros((), dtype=self.student.dtype)
        for row, time in self.counted:
            logprobs = self.student[row, time] - self.student[row, time].logsumexp(0)
            token = self.ids[row, time]
            advantage = reward * self.data["advantages"][row]
            if divergence == "sampled":
                advantage = advantage + coefficient * (self.teacher[row, time, token] - logprobs[token].detach())
            else:
                chosen = set(self.candidate_ids[row, time].tolist())
                for candidate in chosen:
                    ratio = logprobs[candidate] - self.teacher[row, time, candidate]
                    total = total + coefficient * logprobs[candidate].exp() * ratio
                if left := [token for token in range(VOCABULARY) if token not in chosen]:
                    student, teacher = logprobs[left].exp().sum(), self.teacher[row, time, left].exp().sum()
                    total = total + coefficient * student * (student / teacher).log()
            total = total - advantage * (logprobs[token] - logprobs[token].detach()).exp()
        return total / len(self.counted)


def gradient(loss: torch.Tensor, case: Case) -> torch.Tensor:
    return torch.autograd.grad(loss, case.student)[0]


@pytest.mark.parametrize("top_k", [1, 4, VOCABULARY])
@pytest.mark.parametrize(("reward", "coefficient"), [(0.0, 1.0), (0.7, 0.3)])
@pytest.mark.parametrize("divergence", ["sampled", "top_k"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_value_and_gradient_are_those_of_a_plain_implementation(divergence, reward, coefficient, top_k, dtype):
    case = Case(top_k, dtype)
    expected = case.plain(reward, coefficient, divergence)
    expected_gradient = gradient(expected, case)
    case.data["advantages"] = case.data["advantages"] * reward
    loss = case.loss(DistillationLoss(ClippedPGConfig(), divergence, coefficient, on_policy=True))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient(loss, case), expected_gradient, rtol=1e-6, atol=1e-6)


def test_with_all_tokens_as_candidates_it_is_the_divergence_over_the_vocabulary():
    case = Case(VOCABULARY)
    case.data["advantages"] = torch.zeros(ROWS)
    logprobs = torch.log_softmax(case.student, dim=-1)
    kl = torch.nn.functional.kl_div(case.teacher, logprobs, reduction="none", log_target=True).sum(-1)
    expected = torch.stack([kl[place] for place in case.counted]).mean()
    torch.testing.assert_close(case.loss(DistillationLoss(ClippedPGConfig(), "top_k")), expected)


def test_fewer_candidates_give_a_lower_bound():
    of_k = []
    for top_k in (1, 3, 6, VOCABULARY):
        case = Case(top_k)
        case.data["advantages"] = torch.zeros(ROWS)
        of_k.append(case.loss(DistillationLoss(ClippedPGConfig(), "top_k")).item())
    assert of_k == sorted(of_k)
    assert of_k[0] < of_k[-1]


def test_the_expected_gradient_of_samples_is_that_of_the_divergence():
    """Weighted by its probability, each possible token in turn is the sample."""
    case = Case(VOCABULARY)
    case.data["advantages"] = torch.zeros(ROWS)
    exact = gradient(case.loss(DistillationLoss(ClippedPGConfig(), "top_k")), case)
    expected = torch.zeros_like(exact)
    for token in range(VOCABULARY):
        case.ids = torch.full_like(case.ids, token)
        case.data["teacher_logprobs"] = case.picked(case.teacher)
        of_token = gradient(case.loss(DistillationLoss(ClippedPGConfig(), "sampled", on_policy=True)), case)
        expected += torch.softmax(case.student.detach(), dim=-1)[..., token, None] * of_token
    torch.testing.assert_close(expected, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("divergence", ["sampled", "top_k"])
def test_what_is_masked_counts_for_nothing(divergence):
    case = Case(4)
    loss_fn = DistillationLoss(ClippedPGConfig(), divergence)
    clean, spoiled = (case.loss(loss_fn, spoiled) for spoiled in (False, True))
    assert torch.equal(clean, spoiled)
    assert torch.equal(gradient(clean, case), gradient(spoiled, case))


def test_off_policy_the_advantage_is_that_before_the_update_and_ratios_are_clipped():
    case = Case(4)
    before = case.data["prev_logprobs"]
    case.data["prev_logprobs"] = torch.full_like(before, -30.0)  # now far likelier than before
    case.data["teacher_logprobs"] = torch.full_like(before, -29.0)  # advantage 1
    case.data["advantages"] = torch.zeros(ROWS)
    loss = case.loss(DistillationLoss(ClippedPGConfig(), "sampled"))
    assert loss.item() == pytest.approx(-1.2)
    assert gradient(loss, case).abs().max() == 0


@pytest.mark.parametrize(("divergence", "missing"), [("sampled", "teacher_logprobs"), ("top_k", "teacher_candidates")])
def test_a_batch_without_scores_of_the_teacher_is_refused(divergence, missing):
    case = Case(4)
    del case.data[missing]
    with pytest.raises(DataError, match=f"no column '{missing}'.*teacher"):
        case.loss(DistillationLoss(ClippedPGConfig(), divergence))
