"""An optimizer's state in terms of the whole model, by Hugging Face name, so that any layout can go on from it.

State with the shape of the weights (moments, master weights) is gathered and cut as they are; the rest, such as a count
of steps, is taken from the parameter that a weight lies in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lucidrl.checkpoint.manifest import read_json
from lucidrl.checkpoint.state import flatten_state, unflatten_state
from lucidrl.checkpoint.tensors import open_tensors
from lucidrl.errors import CheckpointError
from lucidrl.models.optim import PolicyOptimizer
from lucidrl.models.policy.sharding import Sharding

OPTIMIZER_STEM, STRUCTURE_NAME = "optimizer", "optimizer.json"
_MASTER = "master"


@dataclass(frozen=True)
class WholeState:
    """The state of all ranks, to be gathered."""

    structure: Any
    """All of it but the tensors, which it names; strict JSON."""
    tensors: dict[str, torch.Tensor]
    """By name; those that have to be gathered are on the meta device."""
    parts: dict[str, list[torch.Tensor]]
    """This rank's parts of those, by the last part of their names, in the order of the parameters."""
    sharding: Sharding

    def gather(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, one at a time; every rank has to walk through them."""
        for key, parts in self.parts.items():
            for name, tensor in self.sharding.full_tensors(parts):
                yield f"state/{name}/{key}", tensor
        yield from ((name, tensor) for name, tensor in self.tensors.items() if not tensor.is_meta)


def whole_state(sharding: Sharding, optimizer: PolicyOptimizer) -> WholeState:
    """What has to be saved of an optimizer.

    Raises:
        CheckpointError: if parts of its state, on several ranks, cannot be put together.
    """
    own = optimizer.state_dict()
    states: dict[int, dict[str, Any]] = {index: dict(state) for index, state in own["optimizer"]["state"].items()}
    for index, master in enumerate(own.get("masters", ())):
        states.setdefault(index, {})[_MASTER] = master
    parts = _parts_like_weights(sharding, states)
    parameter_of = {name: index for index, names in enumerate(names_of_parameters(sharding)) for name in names}
    by_name: dict[str, dict[str, Any]] = {}
    for name, shape in sharding.shapes().items():
        for key, value in states.get(parameter_of[name], {}).items():
            whole = torch.empty(shape, dtype=value.dtype, device="meta") if key in parts else value
            by_name.setdefault(name, {})[key] = whole
    _check_can_be_whole(sharding, by_name)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in _groups(own)]
    tensors, structure = flatten_state(
        {
            "shapes": sharding.shapes(),
            "like_weights": list(parts),
            "state": by_name,
            "settings": {**_settings(own), "param_groups": groups},
        }
    )
    return WholeState(structure, tensors, parts, sharding)


def read_whole_state(folder: Path, sharding: Sharding, optimizer: PolicyOptimizer) -> dict[str, Any]:
    """What `whole_state` saved, checked to be of this model and of this kind of optimizer; its tensors are not read.

    Raises:
        CheckpointError: names the file and the reason.
    """
    structure = read_json(folder, STRUCTURE_NAME)
    tensors = open_tensors(folder, OPTIMIZER_STEM)
    try:
        whole = unflatten_state(tensors, structure)
        check_same_shapes(folder, sharding.shapes(), whole["shapes"])
        own = optimizer.state_dict()
        _check_settings(own, whole["settings"])
        _check_state(sharding, whole, has_masters="masters" in own)
        _check_can_be_whole(sharding, whole["state"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / STRUCTURE_NAME} holds no state of this policy's optimizer ({error}); "
            "resume with the policy.optimizer, policy.scheduler and policy.precision it was saved with"
        ) from error
    return whole


def load_whole_state(sharding: Sharding, optimizer: PolicyOptimizer, whole: Mapping[str, Any]) -> None:
    """Take this rank's part of what `read_whole_state` gave."""
    saved: dict[str, dict[str, Any]] = whole["state"]
    names = names_of_parameters(sharding)
    device_of = [sharding.local(parameter.detach()).device for parameter in sharding.parameters()]
    state: dict[int, dict[str, Any]] = {}
    for index, own_names in enumerate(names):
        entry = next((saved[name] for name in own_names if name in saved), {})
        rest = {key: value for key, value in entry.items() if key not in whole["like_weights"]}
        copied = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in rest.items()}
        if copied:
            state[index] = copied
    for key in (key for key in whole["like_weights"] if key != _MASTER):
        for index, part in enumerate(sharding.parts_of(_Lookup(sharding, saved, key))):
            if any(key in saved.get(name, {}) for name in names[index]):
                state.setdefault(index, {})[key] = part.to(device_of[index], copy=True)
    own_groups, settings = _groups(optimizer.state_dict()), dict(whole["settings"])
    groups = [
        {**group, "params": own_group["params"]}
        for group, own_group in zip(settings.pop("param_groups"), own_groups, strict=True)
    ]
    result = {**settings, "optimizer": {"state": state, "param_groups": groups}}
    if _MASTER in whole["like_weights"]:
        result["masters"] = sharding.parts_of(_Lookup(sharding, saved, _MASTER))
    optimizer.load_state_dict(result)


def names_of_parameters(sharding: Sharding) -> list[list[str]]:
    """For each parameter of this rank, the names of the whole tensors that lie in it."""
    shapes = sharding.shapes()
    asked: list[str] = []

    def ask(name: str) -> torch.Tensor:
        asked.append(name)
        return torch.empty(shapes[name], device="meta")

    names = []
    for _ in sharding.parts_of(ask):
        names.append(asked[:])
        asked.clear()
    return names


def check_same_shapes(path: Path, expected: Mapping[str, list[int]], found: Mapping[str, list[int]]) -> None:
    """Refuse what was saved from another model, naming the first difference."""
    for name in [*expected, *sorted(found.keys() - expected.keys())]:
        if found.get(name) != expected.get(name):
            raise CheckpointError(
                f"{path} is of another model: {name} should have shape {expected.get(name, 'none')}, "
                f"found {found.get(name, 'nothing')}; resume with the policy.model_name it was saved from"
            )


@dataclass(frozen=True)
class _Lookup:
    """The whole tensors of one kind by name; zeros where there are none, for instance of a weight without gradients."""

    sharding: Sharding
    saved: Mapping[str, Mapping[str, Any]]
    key: str

    def __call__(self, name: str) -> torch.Tensor:
        tensor = self.saved.get(name, {}).get(self.key)
        if tensor is not None:
            return tensor
        known = next(entry[self.key] for entry in self.saved.values() if self.key in entry)
        return known.new_zeros(()).expand(self.sharding.shapes()[name])


def _parts_like_weights(sharding: Sharding, states: Mapping[int, Mapping[str, Any]]) -> dict[str, list[torch.Tensor]]:
    """This rank's tensors of each kind that has the shape of its weights; zeros for parameters without one."""
    weights = [sharding.local(parameter.detach()) for parameter in sharding.parameters()]
    parts: dict[str, list[torch.Tensor]] = {}
    for key in dict.fromkeys(key for state in states.values() for key in state):
        known = {index: state[key] for index, state in states.items() if key in state}
        if all(isinstance(part, torch.Tensor) and part.shape == weights[index].shape for index, part in known.items()):
            dtype = next(iter(known.values())).dtype
            parts[key] = [
                known[index] if index in known else torch.zeros_like(weight, dtype=dtype)
                for index, weight in enumerate(weights)
            ]
    return parts


def _check_can_be_whole(sharding: Sharding, by_name: Mapping[str, Mapping[str, Any]]) -> None:
    shapes = sharding.shapes()
    for name, entry in by_name.items() if sharding.mesh.layout.size > 1 else ():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and value.dim() and list(value.shape) != shapes[name]:
                raise CheckpointError(
                    f"the optimizer's {key} of {name} has shape {list(value.shape)}, which several ranks can neither "
                    "put together nor share; save without an optimizer_path, or choose another policy.optimizer"
                )


def _check_settings(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    expected = {*_settings(own), "param_groups"}
    for name in sorted(expected ^ saved.keys()):
        raise ValueError(f"it has no {name}" if name in expected else f"it has a {name}, which the policy has not")
    if saved["kind"] != own["kind"]:
        raise ValueError(f"it is of {saved['kind']}, the policy has {own['kind']}")
    if len(saved["param_groups"]) != len(_groups(own)):
        raise ValueError(f"it has {len(saved['param_groups'])} groups of parameters instead of {len(_groups(own))}")


def _check_state(sharding: Sharding, whole: Mapping[str, Any], *, has_masters: bool) -> None:
    shapes, state = sharding.shapes(), whole["state"]
    for name, entry in state.items():
        for key in entry.keys() & set(whole["like_weights"]):
            if list(entry[key].shape) != shapes[name]:
                raise ValueError(f"{key} of {name} has shape {list(entry[key].shape)} instead of {shapes[name]}")
    for name in shapes:
        if (_MASTER in state.get(name, {})) != has_masters:
            raise ValueError(f"it has {'no' if has_masters else 'a'} master weight of {name}")


def _settings(own: Mapping[str, Any]) -> dict[str, Any]:
    """What is no tensor of a parameter: kind, schedule, loss scale."""
    return {key: value for key, value in own.items() if key not in ("optimizer", "masters")}


def _groups(own: Mapping[str, Any]) -> list[dict[str, Any]]:
    return own["optimizer"]["param_groups"]
