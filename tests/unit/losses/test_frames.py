"""The objective of PPO: what the clip takes away, and that minibatches average to the whole."""

from __future__ import annotations

import math

import pytest
import torch

from lucidrl.losses.interfaces import FrameOutputs, Frames
from lucidrl.losses.policy_gradient import ClippedFrameLoss
from lucidrl.models.control.config import ControlPolicyConfig, CriticConfig
from lucidrl.models.control.interfaces import ContinuousActions, DiscreteActions, ObservationSpace
from lucidrl.models.control.policy import ControlPolicy


def one_frame(ratio: float, advantage: float, value: float = 0.0, target: float = 0.0):
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    outputs = FrameOutputs(logprob, torch.tensor([0.7]), torch.tensor([value]))
    zero = torch.zeros(1)
    frames = Frames(zero, zero, zero, zero, torch.tensor([advantage]), torch.tensor([target]))
    return outputs, frames


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "has_gradient"),
    [
        (1.1, 2.0, -2.2, True),
        (1.5, 2.0, -2.4, False),
        (1.5, -2.0, 3.0, True),
        (0.5, 2.0, -1.0, True),
        (0.5, -2.0, 1.6, False),
    ],
)
def test_the_clip_takes_the_gradient_of_what_went_far_enough_and_no_other(ratio, advantage, loss, has_gradient):
    outputs, frames = one_frame(ratio, advantage)
    losses = ClippedFrameLoss(clip=0.2, entropy_coefficient=0.0)(outputs, frames)
    assert losses.policy.item() == pytest.approx(loss)
    losses.policy.backward()
    assert bool(outputs.logprobs.grad) is has_gradient
    assert losses.metrics["clip_fraction"] == float(abs(ratio - 1) > 0.2)
    assert float(losses.metrics["approx_kl"]) == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-6)


def test_entropy_lowers_the_loss_of_the_policy_and_no_metric_of_it():
    outputs, frames = one_frame(1.0, 0.0)
    losses = ClippedFrameLoss(clip=0.2, entropy_coefficient=0.1)(outputs, frames)
    assert losses.policy.item() == pytest.approx(-0.07)
    assert float(losses.metrics["loss_policy"]) == 0.0


def test_the_critic_minimises_half_the_squared_error():
    losses = ClippedFrameLoss(clip=0.2, entropy_coefficient=0.0)(*one_frame(1.0, 0.0, value=1.0, target=4.0))
    assert float(losses.critic) == 4.5


def test_a_ratio_beyond_all_numbers_stays_finite():
    outputs, frames = one_frame(1.0, -1.0)
    far = FrameOutputs(torch.tensor([1e4], requires_grad=True), outputs.entropy, outputs.values)
    losses = ClippedFrameLoss(clip=0.2, entropy_coefficient=0.0)(far, frames)
    assert math.isfinite(losses.policy.item())


@pytest.mark.parametrize(
    "actions", [DiscreteActions(3), ContinuousActions(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 4.0]))]
)
def test_gradients_of_minibatches_average_to_that_of_the_whole_batch(actions):
    torch.manual_seed(0)
    role = {"precision": "float64"}
    policy = ControlPolicy(ObservationSpace((4,)), actions, ControlPolicyConfig(**role), CriticConfig(**role))
    observations = torch.randn(64, 4)
    acted = policy.network(observations)
    frames = Frames(
        observations,
        acted["latent_action"],
        acted["sample_log_prob"] + 0.3 * torch.randn(64),
        policy.values(observations),
        torch.randn(64, dtype=torch.float64),
        torch.randn(64, dtype=torch.float64),
    )
    loss_fn = ClippedFrameLoss(clip=0.2, entropy_coefficient=0.01)
    parameters = [*policy.network.parameters(), *policy.critic.parameters()]

    def gradient(part: Frames) -> list[torch.Tensor]:
        losses = loss_fn(policy.score(part), part)
        return list(torch.autograd.grad(losses.policy + losses.critic, parameters))

    whole = gradient(frames)
    parts = [gradient(frames.select(indices)) for indices in torch.randperm(64).split(16)]
    for expected, *found in zip(whole, *parts, strict=True):
        torch.testing.assert_close(torch.stack(found).mean(0), expected)
        assert expected.abs().sum() > 0
