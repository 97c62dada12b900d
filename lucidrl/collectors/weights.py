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
    """Return the weights in a state dict, a TensorDict of parameters or a module, by parameter name.

    Raises:
        ConfigError: `source` has another type, or entries that are not tensors, such as a module's extra state.
    """
    if isinstance(source, nn.Module):
        weights = dict(source.state_dict())
    elif isinstance(source, TensorDictBase):
        weights = dict(source.flatten_keys(".").items())
    elif isinstance(source, Mapping):
        weights = dict(source)
    else:
        raise ConfigError(
            f"weights cannot be taken from a {type(source).__name__}; pass a module, its state_dict(), or a TensorDict"
        )
    if others := [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]:
        raise ConfigError(f"the weights have entries that are not tensors ({_listed(others)}); pass tensors only")
    return weights


def check_weights(weights: Weights, expected: Mapping[str, torch.Size]) -> None:
    """Check that the weights have exactly the names and shapes of the policy's weights.

    Raises:
        ConfigError: they differ; the message names the difference.
    """
    if missing := [name for name in expected if name not in weights]:
        raise ConfigError(f"the weights lack {_listed(missing)} of the policy; pass the policy's whole state dict")
    if unknown := [name for name in weights if name not in expected]:
        raise ConfigError(f"the policy has no weights {_listed(unknown)}; pass only entries of the policy's state dict")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise ConfigError(
                f"the weight {name} has shape {list(weights[name].shape)}, but the policy needs {list(shape)}; "
                "pass the state dict of a policy of the same architecture"
            )


def shapes_of(policy: Any) -> dict[str, torch.Size]:
    """Return the shapes of a policy's weights; empty if the policy is not a module."""
    return {name: tensor.shape for name, tensor in weights_of(policy).items()} if isinstance(policy, nn.Module) else {}


def load_weights(module: nn.Module, source: Any) -> None:
    """Load weights into a module. An error leaves the module unchanged."""
    weights = weights_of(source)
    check_weights(weights, shapes_of(module))
    module.load_state_dict(weights)


def on_device(policy: Any, device: torch.device | None) -> Any:
    """Return the policy itself if it is on `device`, else a copy on `device`."""
    if device is None or not isinstance(policy, nn.Module):
        return policy
    if all(tensor.device == device for tensor in (*policy.parameters(), *policy.buffers())):
        return policy
    return copy.deepcopy(policy).to(device)


def device_of(device: Device) -> torch.device | None:
    """Return the device with its index, as `tensor.device` reports it: "cuda" becomes "cuda:0".

    Raises:
        ConfigError: this machine has no such device.
    """
    if device is None:
        return None
    try:
        return torch.zeros(1, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch raises any of these
        raise ConfigError(f"device {device} cannot be used; choose a device of this machine") from error


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
