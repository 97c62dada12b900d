"""Action heads: probabilities equal those of torch's distributions; env actions have the right form."""

from __future__ import annotations

import pytest
import torch
from torch import distributions

from lucidrl.errors import TrainingError
from lucidrl.models.control.interfaces import ContinuousActions, DiscreteActions
from lucidrl.models.control.networks import ContinuousHead, DiscreteHead


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def box(low, high):
    return ContinuousActions(torch.tensor(low), torch.tensor(high))


@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
def test_discrete_logprobs_and_entropy_are_those_of_a_categorical(batch):
    head, outputs = DiscreteHead(DiscreteActions(4)), 3 * torch.randn(*batch, 4)
    latent = head.sample(outputs)
    expected = distributions.Categorical(logits=outputs)
    assert latent.shape == batch
    torch.testing.assert_close(head.logprob(outputs, latent), expected.log_prob(latent))
    torch.testing.assert_close(head.entropy(outputs), expected.entropy())


@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
def test_continuous_logprobs_and_entropy_are_those_of_independent_normals(batch):
    head, outputs = ContinuousHead(box([-1.0, -1.0], [1.0, 1.0]), initial_std=0.3), torch.randn(*batch, 2)
    with torch.no_grad():
        head.log_std += torch.tensor([0.0, 1.0])
    latent = head.sample(outputs)
    expected = distributions.Independent(distributions.Normal(outputs, head.log_std.exp()), 1)
    torch.testing.assert_close(head.logprob(outputs, latent), expected.log_prob(latent))
    torch.testing.assert_close(head.entropy(outputs), expected.entropy())


def test_samples_follow_the_reported_probabilities():
    head, outputs = DiscreteHead(DiscreteActions(3)), torch.tensor([0.0, 1.0, 2.0]).expand(20_000, 3)
    frequencies = torch.bincount(head.sample(outputs), minlength=3) / 20_000
    torch.testing.assert_close(frequencies, outputs[0].softmax(-1), atol=0.015, rtol=0)
    continuous = ContinuousHead(box([0.0], [4.0]), initial_std=0.5)
    drawn = continuous.sample(torch.full((20_000, 1), 0.25)).detach()
    assert float(drawn.mean()) == pytest.approx(0.25, abs=0.02)
    assert float(drawn.std()) == pytest.approx(0.5, abs=0.02)


def test_nonfinite_outputs_raise_a_training_error():
    with pytest.raises(TrainingError, match=r"cannot sample an action.*policy\.optimizer\.kwargs\.lr"):
        DiscreteHead(DiscreteActions(2)).sample(torch.tensor([[0.0, torch.nan]]))


def test_discrete_actions_are_one_hot_and_the_mode_has_the_largest_output():
    head = DiscreteHead(DiscreteActions(3))
    latent = head.mode(torch.tensor([[0.0, 5.0, 1.0], [2.0, 1.0, 0.0]]))
    assert head.action(latent).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert head.action(latent).dtype == torch.int64


def test_continuous_actions_are_in_units_of_the_range_and_clipped_to_it():
    head = ContinuousHead(box([0.0, -2.0], [10.0, 2.0]), initial_std=1.0)
    latent = torch.tensor([[0.0, 0.5], [-3.0, 3.0]])
    assert head.action(latent).tolist() == [[5.0, 1.0], [0.0, 2.0]]


def test_without_limits_actions_are_the_latent_actions():
    head = ContinuousHead(box([-torch.inf, 0.0], [torch.inf, torch.inf]), initial_std=1.0)
    assert head.action(torch.tensor([[1e6, -3.0]])).tolist() == [[1e6, 0.0]]


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_continuous_actions_have_the_shape_of_the_action_space(shape):
    head = ContinuousHead(ContinuousActions(-torch.ones(shape), torch.ones(shape)), initial_std=1.0)
    outputs = torch.zeros(5, head.num_inputs)
    assert head.action(head.sample(outputs)).shape == (5, *shape)
