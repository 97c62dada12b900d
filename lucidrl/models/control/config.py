"""Configuration of the policy and critic networks of a control task."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from lucidrl.models.policy.config import OptimizationConfig, OptimizerConfig

Activation = Literal["tanh", "relu", "silu"]


class NetworkOptimizerConfig(OptimizerConfig):
    """Any torch optimizer, by import path, or muon."""

    name: str = "torch.optim.Adam"
    """Import path of the optimizer class, or `muon`: Muon for matrices, AdamW for the rest."""
    kwargs: dict[str, Any] = Field(default_factory=lambda: {"lr": 3e-4, "eps": 1e-5})
    """Arguments of the optimizer class. AdamW and Adam default to `fused=true`."""


class NetworkConfig(OptimizationConfig):
    """A network and its optimizer."""

    network: str | None = None
    """Your own network, as `module:function`. The function gets the shapes of an observation and of an action, and
    returns a torch module for observations `[N, ...]`. Default: fully connected layers."""
    network_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the function in `network`."""
    hidden_sizes: tuple[PositiveInt, ...] = (64, 64)
    """Units of each hidden layer; not used with `network`."""
    activation: Activation = "tanh"
    """Activation after each hidden layer; not used with `network`."""
    precision: Literal["float32", "float64"] = "float32"
    """Precision of the network's computations."""
    optimizer: NetworkOptimizerConfig = NetworkOptimizerConfig()
    """The optimizer."""
    max_grad_norm: PositiveFloat | None = 0.5
    """Clip gradients to this norm; null turns clipping off."""

    @model_validator(mode="after")
    def _arguments_have_a_network(self) -> Self:
        if self.network_kwargs and self.network is None:
            raise ValueError("network_kwargs are arguments of your own network; set network=module:function too")
        return self


class ControlPolicyConfig(NetworkConfig):
    """The policy network."""

    initial_std: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Initial standard deviation of continuous actions, relative to half their range; it is learned."""


class CriticConfig(NetworkConfig):
    """The network that estimates the value of an observation."""
