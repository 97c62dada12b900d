"""Weights and devices of the policies that collectors act with."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from lucidrl.errors import ConfigError

Device = torch.device | str | None
Weights = Mapping[str, torch.Tensor]

_MOST_NAMES = 4


def weights_of(source: Any) -> Weights:
    """The weights in a state dict, a TensorDict of parameters or a module, by their names in the module.

    Raises:
        ConfigError: for another type, or if it holds more than tensors, such as a module's extra state.
    """
    if isinstance(source, nn.Module):
        weights = dict(source.state_dict())
    elif isinstance(source, TensorDictBase):
        weights = dict(source.flatten_keys(".").items())
    elif isinstance(source, Mapping):
        weights = dict(source)
    else:
        raise ConfigError(
            f"weights cannot be taken from a {type(source).__name__}; give a module, its state_dict(), or a TensorDict"
        )
    if others := [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]:
        raise ConfigError(f"the weights have {_listed(others)}, which is no tensor; collectors take tensors only")
    return weights


def check_weights(weights: Weights, expected: Mapping[str, torch.Size]) -> None:
    """Refuse weights that are not those of the policy: all of them, no others, of the same shapes.

    Raises:
        ConfigError: naming what differs.
    """
    if missing := [name for name in expected if name not in weights]:
        raise ConfigError(f"the weights lack {_listed(missing)} of the policy; give all of its state dict")
    if unknown := [name for name in weights if name not in expected]:
        raise ConfigError(f"the weights have {_listed(unknown)}, which the policy has not; give its state dict alone")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise ConfigError(
                f"the weight {name} has shape {list(weights[name].shape)}, but in the policy it is {list(shape)}; "
                "give the state dict of a policy of the same architecture"
            )


def shapes_of(policy: Any) -> dict[str, torch.Size]:
    """Shapes of a policy's weights; empty if it is no module."""
    return {name: tensor.shape for name, tensor in weights_of(policy).items()} if isinstance(policy, nn.Module) else {}


def load_weights(module: nn.Module, source: Any) -> None:
    """Load weights into a module, all of them or, with an error, none."""
    weights = weights_of(source)
    check_weights(weights, shapes_of(module))
    module.load_state_dict(weights)


def on_device(policy: Any, device: torch.device | None) -> Any:
    """The policy itself if it computes there, else a copy that does."""
    if device is None or not isinstance(policy, nn.Module):
        return policy
    if all(tensor.device == device for tensor in (*policy.parameters(), *policy.buffers())):
        return policy
    return copy.deepcopy(policy).to(device)


def device_of(device: Device) -> torch.device | None:
    """The device with its number, as tensors there have it.

    Raises:
        ConfigError: if there is no such device.
    """
    if device is None:
        return None
    try:
        return torch.zeros(1, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch raises any of these
        raise ConfigError(f"device {device} cannot be used here; give one that this machine has") from error


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
