"""A user's network, by import path: `policy.network=my_nets:make`.

Shapes: N rows, O the shape of an observation, P the number of outputs that the role needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lucidrl.errors import ConfigError
from lucidrl.models.control.config import NetworkConfig
from lucidrl.models.control.interfaces import ActionSpace, DiscreteActions, ObservationSpace
from lucidrl.utils.imports import import_user_module

_NUM_ROWS = 2
"""Number of observations in the batch that tests a network."""


class OwnNetwork(nn.Module):
    """Flattens the leading dims of observations to [N, *O], calls a user's network, and returns outputs [..., P]."""

    def __init__(self, network: nn.Module, space: ObservationSpace, num_outputs: int, dtype: torch.dtype):
        super().__init__()
        self.network = network.to(dtype)
        self._space, self._num_outputs, self._dtype = space, num_outputs, dtype

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        leading = observation.shape[: observation.dim() - len(self._space.shape)]
        outputs_NP = self.network(observation.reshape(-1, *self._space.shape).to(self._dtype))
        return outputs_NP.reshape(*leading, self._num_outputs)


def own_network(
    config: NetworkConfig, role: str, observations: ObservationSpace, actions: ActionSpace, num_outputs: int
) -> OwnNetwork:
    """Call the function of `config.network` with the shapes of an observation and of an action, and test its result.

    Args:
        role: policy or critic.
        num_outputs: P.

    Raises:
        ConfigError: the function cannot be imported or called, or the network's outputs have another shape or dtype.
    """
    key = f"{role}.network={config.network!r}"
    dtype: torch.dtype = getattr(torch, config.precision)
    action_shape = (actions.n,) if isinstance(actions, DiscreteActions) else tuple(actions.low.shape)
    make = _imported(config.network or "", key)
    try:
        network: Any = make(observations.shape, action_shape, **config.network_kwargs)
    except Exception as error:  # of the user's code
        raise ConfigError(
            f"{key} raised {type(error).__name__} when called with the shapes {observations.shape} of an observation "
            f"and {action_shape} of an action: {error}"
        ) from error
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{key} returned a {type(network).__name__}; return a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise ConfigError(f"{key} returned a network without trainable parameters; return one that can learn")
    own = OwnNetwork(network, observations, num_outputs, dtype)
    _check_outputs(own.network, key, observations, num_outputs, dtype, role)
    return own


def check_share_nothing(policy: nn.Module, critic: nn.Module) -> None:
    """Raise ConfigError if policy and critic share parameters: both optimizers would change them."""
    shared = {id(parameter) for parameter in policy.parameters()}
    for name, parameter in critic.named_parameters():
        if id(parameter) in shared:
            raise ConfigError(
                f"policy.network and critic.network share the parameter {name.removeprefix('body.network.')}, but each "
                "has its own optimizer; return a new module from every call"
            )


def _imported(path: str, key: str) -> Any:
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name.isidentifier()):
        raise ConfigError(f"{key} is not of the form module:function, such as my_nets:make")
    make = getattr(import_user_module(module_name, "the network"), name, None)
    if not callable(make):
        raise ConfigError(f"{key}: module {module_name} has no function {name}; define it there")
    return make


def _check_outputs(
    network: nn.Module, key: str, observations: ObservationSpace, num_outputs: int, dtype: torch.dtype, role: str
) -> None:
    was_training = network.training
    shape = (_NUM_ROWS, *observations.shape)
    try:
        with torch.no_grad():
            zeros = torch.zeros(shape, dtype=dtype, device=next(network.parameters()).device)
            outputs = network.eval()(zeros)  # in this mode, batch statistics stay as they are
    except Exception as error:  # of the user's code
        raise ConfigError(
            f"{key} cannot process observations of shape {list(shape)}: {type(error).__name__}: {error}"
        ) from error
    finally:
        network.train(was_training)
    needed = [[_NUM_ROWS, num_outputs], *([[_NUM_ROWS]] if role == "critic" else [])]
    purpose = "the value of each observation" if role == "critic" else "a logit or mean per action"
    if not isinstance(outputs, torch.Tensor) or list(outputs.shape) not in needed:
        found = (
            f"shape {list(outputs.shape)}" if isinstance(outputs, torch.Tensor) else f"type {type(outputs).__name__}"
        )
        raise ConfigError(
            f"{key} returns outputs of {found} for {_NUM_ROWS} observations; return a tensor of shape {needed[0]}, "
            f"{purpose}"
        )
    if not outputs.is_floating_point():
        raise ConfigError(f"{key} returns outputs of {outputs.dtype}; return floating-point numbers")
