"""Configuration of the two networks of a control task, the policy and the critic."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from lucidrl.models.policy.config import OptimizationConfig, OptimizerConfig

Activation = Literal["tanh", "relu", "silu"]


class NetworkOptimizerConfig(OptimizerConfig):
    """Any torch optimizer, by import path."""

    name: str = "torch.optim.Adam"
    """Import path of the optimizer class."""
    kwargs: dict[str, Any] = Field(default_factory=lambda: {"lr": 3e-4, "eps": 1e-5})
    """Its arguments. AdamW and Adam use their fused implementation unless told otherwise."""


class NetworkConfig(OptimizationConfig):
    """A network of its own for one role, with its own optimizer."""

    hidden_sizes: tuple[PositiveInt, ...] = (64, 64)
    """Units of each hidden layer."""
    activation: Activation = "tanh"
    """What follows each hidden layer."""
    precision: Literal["float32", "float64"] = "float32"
    """What the network computes in."""
    optimizer: NetworkOptimizerConfig = NetworkOptimizerConfig()
    """The optimizer."""
    max_grad_norm: PositiveFloat | None = 0.5
    """Gradients are scaled down to this norm."""


class ControlPolicyConfig(NetworkConfig):
    """The network that decides."""

    initial_std: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Standard deviation of continuous actions before training, in units of half their range; then it is learned."""


class CriticConfig(NetworkConfig):
    """The network that estimates what an observation is worth."""
