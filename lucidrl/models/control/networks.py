"""Policy and critic networks of a control task, and their action distributions: categorical, or Gaussian with limits.

Shapes: B any leading dims, O numbers in an observation, P the network's outputs, D numbers in an action.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod

import torch
from torch import nn
from torch.nn.functional import log_softmax, one_hot

from lucidrl.errors import TrainingError
from lucidrl.models.control.config import Activation, ControlPolicyConfig, CriticConfig, NetworkConfig
from lucidrl.models.control.interfaces import ActionSpace, ContinuousActions, DiscreteActions, ObservationSpace
from lucidrl.models.control.own_network import own_network

_HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)


class ActionHead(nn.Module, ABC):
    """A distribution over latent actions, and the mapping to env actions.

    Log-probabilities are of the sampled latent action; the env action may be a clipped or encoded form of it.
    """

    num_inputs: int
    """P, the number of network outputs that the head needs."""

    @abstractmethod
    def sample(self, outputs_BP: torch.Tensor) -> torch.Tensor:
        """Sample latent actions with torch's generator."""

    @abstractmethod
    def mode(self, outputs_BP: torch.Tensor) -> torch.Tensor:
        """Return the most likely latent actions."""

    @abstractmethod
    def logprob(self, outputs_BP: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities [B] of latent actions."""

    @abstractmethod
    def entropy(self, outputs_BP: torch.Tensor) -> torch.Tensor:
        """Return entropies [B] of the latent distribution."""

    @abstractmethod
    def action(self, latent: torch.Tensor) -> torch.Tensor:
        """Map latent actions to env actions."""


class DiscreteHead(ActionHead):
    """Categorical over n actions. The latent action is an index, [B]; the env action is one-hot, [B, n] int64."""

    def __init__(self, space: DiscreteActions):
        super().__init__()
        self.num_inputs = space.n

    def sample(self, outputs_BP: torch.Tensor) -> torch.Tensor:
        probabilities = outputs_BP.softmax(-1).view(-1, self.num_inputs)
        try:
            return torch.multinomial(probabilities, 1).view(outputs_BP.shape[:-1])
        except RuntimeError as error:  # checking before the call would slow every env step
            raise TrainingError(
                f"the policy cannot sample an action: {error}; check for NaN or infinite observations, or lower "
                "policy.optimizer.kwargs.lr"
            ) from error

    def mode(self, outputs_BP: torch.Tensor) -> torch.Tensor:
        return outputs_BP.argmax(-1)

    def logprob(self, outputs_BP: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        return log_softmax(outputs_BP, -1).gather(-1, latent.unsqueeze(-1)).squeeze(-1)

    def entropy(self, outputs_BP: torch.Tensor) -> torch.Tensor:
        logprobs_BP = log_softmax(outputs_BP, -1)
        return -(logprobs_BP.exp() * logprobs_BP).sum(-1)

    def action(self, latent: torch.Tensor) -> torch.Tensor:
        return one_hot(latent, self.num_inputs)


class ContinuousHead(ActionHead):
    """A diagonal Gaussian, [B, D]; env actions are clipped to the limits.

    The network outputs means; standard deviations are separate parameters. If the limits are finite, both are relative
    to the middle and half of the range, so that one initial standard deviation fits every env.
    """

    _low: torch.Tensor
    _high: torch.Tensor
    _half_range: torch.Tensor
    _middle: torch.Tensor

    def __init__(self, space: ContinuousActions, initial_std: float):
        super().__init__()
        self._shape = space.low.shape
        low, high = space.low.flatten().double(), space.high.flatten().double()
        is_finite = torch.isfinite(low) & torch.isfinite(high)
        half_range = torch.where(is_finite, (high - low) / 2, 1.0)
        middle = torch.where(is_finite, (high + low) / 2, 0.0)
        for name, limit in (("_low", low), ("_high", high), ("_half_range", half_range), ("_middle", middle)):
            self.register_buffer(name, limit.to(torch.get_default_dtype()), persistent=False)
        self.num_inputs = low.numel()
        self.log_std = nn.Parameter(torch.full((self.num_inputs,), math.log(initial_std)))

    def sample(self, outputs_BP: torch.Tensor) -> torch.Tensor:
        return outputs_BP + self.log_std.exp() * torch.randn_like(outputs_BP)

    def mode(self, outputs_BP: torch.Tensor) -> torch.Tensor:
        return outputs_BP

    def logprob(self, outputs_BP: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        distance_BD = (latent - outputs_BP) * (-self.log_std).exp()
        return (-0.5 * distance_BD.square() - self.log_std - _HALF_LOG_2_PI).sum(-1)

    def entropy(self, outputs_BP: torch.Tensor) -> torch.Tensor:
        return (self.log_std + 0.5 + _HALF_LOG_2_PI).sum().expand(outputs_BP.shape[:-1])

    def action(self, latent: torch.Tensor) -> torch.Tensor:
        action_BD = (self._middle + self._half_range * latent).clamp(self._low, self._high)
        return action_BD.unflatten(-1, self._shape) if self._shape else action_BD.squeeze(-1)


def action_head(space: ActionSpace, initial_std: float) -> ActionHead:
    if isinstance(space, DiscreteActions):
        return DiscreteHead(space)
    return ContinuousHead(space, initial_std)


ACTIVATIONS: dict[Activation, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
FIRST_POLICY_GAIN, FIRST_CRITIC_GAIN = 0.01, 1.0
"""Initial gains of the last layers; the small gain makes a new policy close to uniform for every observation."""


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
    """Returns a policy's most likely env actions; uses the weights of this policy."""

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
