"""Policy and critic networks of a control task.

Shapes: B any leading dims, O numbers in an observation, P inputs of the action head.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import nn

from lucidrl.models.control.actions import action_head
from lucidrl.models.control.config import Activation, ControlPolicyConfig, CriticConfig, NetworkConfig
from lucidrl.models.control.interfaces import ActionSpace, ObservationSpace
from lucidrl.models.control.own_network import own_network

ACTIVATIONS: dict[Activation, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
FIRST_POLICY_GAIN, FIRST_CRITIC_GAIN = 0.01, 1.0
"""Initial gains of the last layers: a policy starts close to uniform for every observation."""


class MLP(nn.Module):
    """Fully connected layers with orthogonal initialisation, for observations of one shape."""

    def __init__(self, space: ObservationSpace, num_outputs: int, config: NetworkConfig, last_gain: float):
        super().__init__()
        self._num_dims, self._dtype = len(space.shape), getattr(torch, config.precision)
        sizes = [space.size, *config.hidden_sizes, num_outputs]
        layers: list[nn.Module] = []
        for num_inputs, num_units in itertools.pairwise(sizes):
            layers += [nn.Linear(num_inputs, num_units), ACTIVATIONS[config.activation]()]
        self.layers = nn.Sequential(*layers[:-1])
        linear = [layer for layer in self.layers if isinstance(layer, nn.Linear)]
        for layer in linear:
            nn.init.orthogonal_(layer.weight, last_gain if layer is linear[-1] else math.sqrt(2))
            nn.init.zeros_(layer.bias)
        self.layers.to(self._dtype)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        leading = observation.shape[: observation.dim() - self._num_dims]
        flat_BO = observation.reshape(*leading, -1)
        return self.layers(flat_BO.to(self._dtype))


class PolicyNetwork(nn.Module):
    """Samples actions for observations [B, ...], as collectors call it; use `score` for training.

    Returns:
        `action` for the env, the sampled `latent_action`, and its `sample_log_prob` [B]; all without gradients.
    """

    def __init__(self, observations: ObservationSpace, actions: ActionSpace, config: ControlPolicyConfig):
        super().__init__()
        self.head = action_head(actions, config.initial_std)
        self.body: nn.Module = (
            own_network(config, "policy", observations, actions, self.head.num_inputs)
            if config.network is not None
            else MLP(observations, self.head.num_inputs, config, FIRST_POLICY_GAIN)
        )

    @torch.no_grad()
    def forward(self, observation: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs_BP = self.body(observation)
        latent = self.head.sample(outputs_BP)
        return {
            "action": self.head.action(latent),
            "latent_action": latent,
            "sample_log_prob": self.head.logprob(outputs_BP, latent),
        }

    def score(self, observation: torch.Tensor, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities of latent actions, and entropies; both [B]."""
        outputs_BP = self.body(observation)
        return self.head.logprob(outputs_BP, latent), self.head.entropy(outputs_BP)


class GreedyPolicy(nn.Module):
    """Returns a policy's most likely env actions; shares its weights."""

    def __init__(self, policy: PolicyNetwork):
        super().__init__()
        self.policy = policy

    @torch.no_grad()
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        head = self.policy.head
        return head.action(head.mode(self.policy.body(observation)))


class CriticNetwork(nn.Module):
    """Estimates the value of observations [B, ...] as [B]."""

    def __init__(self, observations: ObservationSpace, actions: ActionSpace, config: CriticConfig):
        super().__init__()
        self.body: nn.Module = (
            own_network(config, "critic", observations, actions, 1)
            if config.network is not None
            else MLP(observations, 1, config, FIRST_CRITIC_GAIN)
        )

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.body(observation).squeeze(-1)
