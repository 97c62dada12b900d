"""Adapters that let envs call TensorDict modules, other modules, and plain callables as policies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from lucidrl.envs.arrays import Arrays, Key
from lucidrl.envs.specs import Bounded
from lucidrl.envs.tensordicts import tensordict_of
from lucidrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from lucidrl.envs.base import EnvBase

Tensors = Mapping[Key, torch.Tensor]


@dataclass(frozen=True)
class ArrayPolicy:
    """A policy in the form that envs call."""

    in_keys: Sequence[Key]
    """Entries of the root that the policy reads."""
    call: Callable[[Tensors], Tensors]
    """Maps entries of the root, each [*B, ...], to actions under the env's action keys, and to further outputs such
    as log-probabilities and values."""

    def __call__(self, observation: Tensors) -> Tensors:
        return self.call(observation)


def as_policy(policy: Any, env: EnvBase, device: torch.device | None = None) -> ArrayPolicy:
    """Convert a policy to an `ArrayPolicy`.

    - A TensorDict module reads and writes a TensorDict; only its `out_keys` are recorded.
    - Any other `nn.Module` is called with the observation, or with the observations that its parameters name, and
      returns the action, or a mapping that contains the action.
    - Any other callable is called with a TensorDict, and returns a TensorDict, a mapping, or the action.
    - None draws random actions.

    Args:
        device: device of the policy; by default the CPU.
    """
    if policy is None:
        adapted = _at_random(env)
    elif isinstance(policy, TensorDictModuleBase):
        adapted = _on_tensordicts(policy, env, kept=set(policy.out_keys))
    elif isinstance(policy, nn.Module):
        adapted = _on_observations(policy, env)
    elif callable(policy):
        adapted = _on_tensordicts(policy, env, kept=None)
    else:
        raise ConfigError(f"policy is {policy!r}; give a TensorDict module, another module, a callable, or None")
    if device is None or device.type == "cpu":
        return adapted
    return ArrayPolicy(
        adapted.in_keys,
        lambda observation: adapted.call({key: value.to(device) for key, value in observation.items()}),
    )


def check_is_tensor(key: Key, value: Any) -> None:
    """Raise DataError for an output of a policy that is not a tensor."""
    if not isinstance(value, torch.Tensor):
        raise DataError(f"the policy returned {key!r} as a {type(value).__name__}; every output must be a tensor")


def other_dtype(key: Key, dtype: torch.dtype, before: torch.dtype) -> DataError:
    """Make the error for an output whose dtype changes between steps."""
    return DataError(f"the policy returned {key!r} as {dtype}, but as {before} in an earlier step; keep one dtype")


def check_actions(env: EnvBase, taken: Arrays, given: Tensors, rows: Any = ...) -> None:
    """Raise DataError for actions that do not fit the action spec, apart from numbers beyond its bounds.

    Gaussian policies rely on the env to clip such numbers. Callers check a policy's first actions only.

    Args:
        taken: actions after the cast to the env's dtype.
        given: actions that the policy returned for `rows`.
    """
    for key, spec in env.action_leaves().items():
        action = given[key].cpu()
        is_rounded = not spec.dtype.is_floating_point and not (torch.from_numpy(taken[key][rows]) == action).all()
        if is_rounded or not (isinstance(spec, Bounded) or spec.contains(taken[key])):
            values = action.reshape(-1)[:8].tolist()
            raise DataError(f"the policy's {key!r} is {values}, which is not in {spec}; fix the policy")


def _at_random(env: EnvBase) -> ArrayPolicy:
    def call(observation: Tensors) -> Tensors:
        actions = env.new_actions()
        env.sample_actions(actions)
        return {key: torch.from_numpy(array) for key, array in actions.items()}

    return ArrayPolicy((), call)


def _on_tensordicts(policy: Callable[[TensorDictBase], Any], env: EnvBase, kept: set[Any] | None) -> ArrayPolicy:
    """Wrap a policy that is called with a TensorDict; record the outputs in `kept`, or all new entries if None."""
    num_batch_dims, action_keys = len(env.batch_size), env.action_keys

    def call(observation: Tensors) -> Tensors:
        some = next(iter(observation.values()))
        # The batch may consist of some of the envs.
        result = policy(tensordict_of(observation, some.shape[:num_batch_dims], some.device))
        if isinstance(result, TensorDictBase):
            entries = dict(result.items(include_nested=True, leaves_only=True))
            names = (entries.keys() if kept is None else entries.keys() & kept) - observation.keys()
            result = {key: value for key, value in entries.items() if key in names}
        return _outputs(result, action_keys, policy)

    return ArrayPolicy(list(env.observation_leaves()), call)


def _on_observations(module: nn.Module, env: EnvBase) -> ArrayPolicy:
    """Wrap a module that takes the env's observations as tensors and returns actions."""
    action_keys, in_keys = env.action_keys, _inputs_of(module, list(env.observation_leaves()))

    def call(observation: Tensors) -> Tensors:
        result = module(*[observation[key] for key in in_keys])
        return _outputs(result, action_keys, module)

    return ArrayPolicy(in_keys, call)


def _inputs_of(module: nn.Module, keys: list[Key]) -> list[Key]:
    """Keys of the observations to call a module with: the only observation, or those that its parameters name."""
    parameters = inspect.signature(module.forward).parameters.values()
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p.name for p in plain if p.name in keys]
    needed = [p.name for p in plain if p.default is p.empty]
    if named and set(needed) <= set(named):
        return list(named)
    if len(keys) == 1 and len(needed) <= 1:
        return keys
    if "observation" in keys and len(needed) <= 1:
        return ["observation"]
    raise ConfigError(
        f"the parameters of {type(module).__name__}.forward({', '.join(needed)}) do not name observations of the env "
        f"({', '.join(map(str, keys))}); rename them, or give a TensorDict module"
    )


def _outputs(result: Any, action_keys: list[Key], policy: Any) -> Tensors:
    if isinstance(result, torch.Tensor) and len(action_keys) == 1:
        return {action_keys[0]: result}
    entries = dict(result) if isinstance(result, Mapping) else {}
    if missing := [key for key in action_keys if key not in entries]:
        name = getattr(policy, "__name__", type(policy).__name__)
        nothing = "nothing" if isinstance(result, Mapping) else f"a {type(result).__name__}"
        got = ", ".join(map(str, entries)) or nothing
        raise ConfigError(f"the policy {name} returned {got}, but no {missing[0]!r}; write the action under that key")
    return entries
