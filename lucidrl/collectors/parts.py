"""What collectors of frames are made of: options, checks of numbers and calls, weights and devices of policies."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Required, TypedDict

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

from lucidrl.errors import ConfigError

log = logging.getLogger(__name__)

Device = torch.device | str | None
Weights = Mapping[str, torch.Tensor]

_MOST_NAMES = 4


class ReplayBuffer(Protocol):
    """Anything that takes batches."""

    def extend(self, data: Any) -> Any: ...


class CollectorArguments(TypedDict, total=False):
    """Keyword arguments that all collectors of frames take: fields of `CollectorOptions`."""

    frames_per_batch: Required[int]
    total_frames: int
    device: Device
    storing_device: Device
    policy_device: Device
    init_random_frames: int
    max_frames_per_traj: int | None
    split_trajs: bool
    reset_at_each_iter: bool
    exploration_type: InteractionType
    postproc: Callable[[TensorDictBase], TensorDictBase] | None
    replay_buffer: ReplayBuffer | None
    seed: int | None
    post_collect_hook: Callable[[TensorDictBase], object] | None


@dataclass(frozen=True, kw_only=True)
class CollectorOptions:
    """What all collectors of frames can be told; `Collector` says what each option means."""

    frames_per_batch: int
    total_frames: int = -1
    device: Device = None
    storing_device: Device = None
    policy_device: Device = None
    init_random_frames: int = 0
    max_frames_per_traj: int | None = None
    split_trajs: bool = False
    reset_at_each_iter: bool = False
    exploration_type: InteractionType = InteractionType.RANDOM
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = None
    replay_buffer: ReplayBuffer | None = None
    seed: int | None = None
    post_collect_hook: Callable[[TensorDictBase], object] | None = None

    def __post_init__(self) -> None:
        check_frames(self.frames_per_batch, self.total_frames, 1)


def check_frames(frames_per_batch: int, total_frames: int, num_envs: int) -> None:
    """Refuse numbers of frames that mean nothing, and warn of those that whole steps of all envs exceed."""
    if frames_per_batch < 1:
        raise ConfigError(f"frames_per_batch={frames_per_batch} makes no batch; give at least 1")
    if total_frames < -1 or total_frames == 0:
        raise ConfigError(f"total_frames={total_frames} collects nothing; give at least 1, or -1 to go on for ever")
    if frames_per_batch % num_envs:
        log.warning(
            "frames_per_batch=%d is no multiple of the %d envs, which step together: batches have %d frames",
            frames_per_batch,
            num_envs,
            -(-frames_per_batch // num_envs) * num_envs,
        )
    if total_frames > 0 and total_frames % num_envs:
        log.warning(
            "total_frames=%d is no multiple of the %d envs, which step together: %d frames are collected",
            total_frames,
            num_envs,
            -(-total_frames // num_envs) * num_envs,
        )


def weights_of(source: Any) -> Weights:
    """The weights in a state dict, a TensorDict of parameters or a module, by their names in the module.

    Raises:
        ConfigError: if it is none of them, or has more than tensors, such as a module's extra state.
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
        raise ConfigError(f"the weights have {listed(others)}, which is no tensor; collectors take tensors only")
    return weights


def check_weights(weights: Weights, expected: Mapping[str, torch.Size]) -> None:
    """Refuse weights that are not those of the policy: all of them, no others, of the same shapes.

    Raises:
        ConfigError: naming what differs.
    """
    if missing := [name for name in expected if name not in weights]:
        raise ConfigError(f"the weights lack {listed(missing)} of the policy; give all of its state dict")
    if unknown := [name for name in weights if name not in expected]:
        raise ConfigError(f"the weights have {listed(unknown)}, which the policy has not; give its state dict alone")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise ConfigError(
                f"the weight {name} has shape {list(weights[name].shape)}, but in the policy it is {list(shape)}; "
                "give the state dict of a policy of the same architecture"
            )


def load_weights(module: nn.Module, source: Any) -> None:
    """Load weights into a module, all of them or, with an error, none."""
    given = weights_of(source)
    check_weights(given, {name: tensor.shape for name, tensor in weights_of(module).items()})
    module.load_state_dict(given)


def on_device(policy: Any, device: torch.device | None) -> Any:
    """The policy itself if it computes there, else a copy that does."""
    if device is None or not isinstance(policy, nn.Module):
        return policy
    tensors = [*policy.parameters(), *policy.buffers()]
    if all(tensor.device == device for tensor in tensors):
        return policy
    return copy.deepcopy(policy).to(device)


def check_calls(list_of_args: Sequence[tuple[Any, ...]], num_workers: int) -> None:
    if len(list_of_args) != num_workers:
        raise ConfigError(
            f"list_of_args has {len(list_of_args)} tuples for {num_workers} worker(s); give one tuple a worker"
        )
    if wrong := [args for args in list_of_args if not isinstance(args, list | tuple)]:
        raise ConfigError(f"list_of_args has {wrong[0]!r}, which is no tuple of arguments; give one tuple a worker")


def call_method(target: object, name: str, args: Sequence[Any]) -> Any:
    """Call a method by its name, as `map_fn` does."""
    method = getattr(target, name, None)
    if not callable(method):
        raise ConfigError(f"{type(target).__name__} has no method {name!r} to call; give the name of one that it has")
    return method(*args)


def device_of(device: Device) -> torch.device | None:
    """The device with its number, as tensors there have it.

    Raises:
        ConfigError: if there is no such device.
    """
    if device is None:
        return None
    try:
        return torch.zeros(1, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # whatever torch has for it
        raise ConfigError(f"device {device} cannot be used here; give one that this machine has") from error


def listed(names: list[str]) -> str:
    """For a sentence, which a long list would drown."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
