"""What may act in an env, and how it is asked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

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


class ArrayPolicy(Protocol):
    """How envs ask a policy."""

    in_keys: Sequence[Key]
    """Entries of the root that it reads; only they need be given."""

    def __call__(self, observation: Tensors) -> Tensors:
        """From entries of the root, each [*B, ...], to the actions under the env's action keys and whatever else is
        put out, such as log-probabilities and values."""


def as_policy(policy: Any, env: EnvBase, device: torch.device | None = None) -> ArrayPolicy:
    """How to ask a policy.

    - A TensorDict module reads and writes a TensorDict; its `out_keys` are kept.
    - Any other `nn.Module` is called with the observation, or with observations by the names of its parameters, and
      returns the action, or a mapping that has it.
    - Any other callable is called with a TensorDict, and returns one, or a mapping, or the action.
    - None acts at random.

    Args:
        device: where the policy computes; by default where it is fed from, the CPU.
    """
    ask: ArrayPolicy
    if policy is None:
        ask = _AtRandom(env)
    elif isinstance(policy, TensorDictModuleBase):
        ask = _OnTensorDicts(policy, env, kept=set(policy.out_keys))
    elif isinstance(policy, nn.Module):
        ask = _OnObservations(policy, env)
    elif callable(policy):
        ask = _OnTensorDicts(policy, env, kept=None)
    else:
        raise ConfigError(
            f"policy is {policy!r}; give a TensorDict module, a module on the observation, a callable, or None"
        )
    return ask if device is None or device.type == "cpu" else _OnDevice(ask, device)


def check_is_tensor(key: Key, value: Any) -> None:
    """Refuse an output of a policy that is none, when it comes for the first time."""
    if not isinstance(value, torch.Tensor):
        raise DataError(f"the policy gave {key!r} as a {type(value).__name__}; every output must be a tensor")


def other_dtype(key: Key, dtype: torch.dtype, before: torch.dtype) -> DataError:
    """For an output that would not be kept as it is."""
    return DataError(f"the policy gave {key!r} as {dtype}, but as {before} before; every step must give the same")


def check_actions(env: EnvBase, taken: Arrays, given: Tensors, rows: Any = ...) -> None:
    """Refuse actions that are not of the env's kind; the first ones tell whether a policy and an env speak of the same.

    Numbers beyond their bounds are the env's to clip, as Gaussian policies rely on.

    Args:
        taken: what the env is about to act on.
        given: what the policy gave for those `rows` of it.
    """
    for key, spec in env.action_leaves().items():
        action = given[key].cpu()
        is_rounded = not spec.dtype.is_floating_point and not (torch.from_numpy(taken[key][rows]) == action).all()
        if is_rounded or not (isinstance(spec, Bounded) or spec.contains(taken[key])):
            raise DataError(
                f"the policy's {key!r} is {action.reshape(-1)[:8].tolist()}, which is not in {spec}; "
                "let it give what the env takes"
            )


class _AtRandom:
    in_keys: Sequence[Key] = ()

    def __init__(self, env: EnvBase):
        self._env = env

    def __call__(self, observation: Tensors) -> Tensors:
        actions = self._env.new_actions()
        self._env.sample_actions(actions)
        return {key: torch.from_numpy(array) for key, array in actions.items()}


class _OnTensorDicts:
    """Feeds a TensorDict; `kept` are the entries to keep, None for all new ones."""

    def __init__(self, policy: Callable[[TensorDictBase], Any], env: EnvBase, kept: set[Any] | None):
        self._policy, self._kept = policy, kept
        self._num_batch_dims, self._action_keys = len(env.batch_size), env.action_keys
        self.in_keys: Sequence[Key] = list(env.observation_leaves())

    def __call__(self, observation: Tensors) -> Tensors:
        some = next(iter(observation.values()))
        # Of those that are asked for, which need not be all envs.
        batch_size = some.shape[: self._num_batch_dims]
        result = self._policy(tensordict_of(observation, batch_size, some.device))
        if not isinstance(result, TensorDictBase):
            return _outputs(result, self._action_keys, self._policy)
        entries = dict(result.items(include_nested=True, leaves_only=True))
        if self._kept is not None:
            entries = {key: value for key, value in entries.items() if key in self._kept}
        outputs = {key: value for key, value in entries.items() if key not in observation}
        return _outputs(outputs, self._action_keys, self._policy)


class _OnObservations:
    """Calls a module with tensors."""

    def __init__(self, module: nn.Module, env: EnvBase):
        self._module, self._action_keys = module, env.action_keys
        self.in_keys: Sequence[Key] = _inputs_of(module, list(env.observation_leaves()))

    def __call__(self, observation: Tensors) -> Tensors:
        result = self._module(*[observation[key] for key in self.in_keys])
        if type(result) is torch.Tensor and len(self._action_keys) == 1:
            return {self._action_keys[0]: result}
        return _outputs(result, self._action_keys, self._module)


class _OnDevice:
    """Carries observations to a device, and outputs back when they are stored."""

    def __init__(self, ask: ArrayPolicy, device: torch.device):
        self._ask, self._device = ask, device
        self.in_keys = ask.in_keys

    def __call__(self, observation: Tensors) -> Tensors:
        return self._ask({key: value.to(self._device) for key, value in observation.items()})


def _inputs_of(module: nn.Module, keys: list[Key]) -> list[Key]:
    """The observations that a module is called with: the only one there is, or those that its parameters name."""
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
        f"{type(module).__name__}.forward({', '.join(needed)}) does not say which of the observations "
        f"{', '.join(map(str, keys))} it takes; name its parameters after them, or give a TensorDict module"
    )


def _outputs(result: Any, action_keys: list[Key], policy: Any) -> Tensors:
    if isinstance(result, torch.Tensor) and len(action_keys) == 1:
        return {action_keys[0]: result}
    entries = dict(result) if isinstance(result, Mapping) else {}
    if missing := [key for key in action_keys if key not in entries]:
        name = getattr(policy, "__name__", type(policy).__name__)
        nothing = "nothing" if isinstance(result, Mapping) else f"a {type(result).__name__}"
        got = ", ".join(map(str, entries)) or nothing
        raise ConfigError(
            f"the policy {name} gave no {missing[0]!r}, but {got}; it must write what the env takes under that key"
        )
    return entries
