"""Optimizer state of the full model by Hugging Face name, so that any layout can resume from it.

State with the shape of the weights (moments, master weights) is gathered and sharded like the weights. Other state,
such as a step count, is saved once per weight, as a copy of the state of the parameter that contains the weight.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lucidrl.checkpoint.manifest import read_json
from lucidrl.checkpoint.tensors import TensorSpec, flatten_state, open_tensors, unflatten_state
from lucidrl.checkpoint.writer import TensorSet
from lucidrl.errors import CheckpointError
from lucidrl.models.optim import PolicyOptimizer
from lucidrl.models.policy.sharding import Sharding

OPTIMIZER_STEM, STRUCTURE_NAME = "optimizer", "optimizer.json"
_MASTER = "master"


def full_state_files(
    folder: Path, sharding: Sharding, optimizer: PolicyOptimizer
) -> tuple[TensorSet, dict[Path, bytes]]:
    """Return the contents of the optimizer folder: tensors that all ranks gather, and the remaining state as JSON.

    Raises:
        CheckpointError: the state of several ranks cannot be gathered.
    """
    own = optimizer.state_dict()
    states: dict[int, dict[str, Any]] = {index: dict(state) for index, state in own["optimizer"]["state"].items()}
    for index, master in enumerate(own.get("masters", ())):
        states.setdefault(index, {})[_MASTER] = master
    shards = _shards_like_weights(sharding, states)
    parameter_of = {name: index for index, unit in enumerate(sharding.units) for name in unit.names}
    by_name: dict[str, dict[str, Any]] = {}
    for name, shape in sharding.shapes.items():
        for key, value in states.get(parameter_of[name], {}).items():
            full = torch.empty(shape, dtype=value.dtype, device="meta") if key in shards else value
            by_name.setdefault(name, {})[key] = full
    _check_can_be_gathered(sharding, by_name)
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in own["optimizer"]["param_groups"]
    ]
    tensors, structure = flatten_state(
        {
            "shapes": sharding.shapes,
            "like_weights": list(shards),
            "state": by_name,
            "settings": {**_settings(own), "param_groups": groups},
        }
    )

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for key, own_shards in shards.items():
            names = {name for name, entry in by_name.items() if key in entry}
            for name, tensor in sharding.full_tensors(own_shards, names):
                yield f"state/{name}/{key}", tensor
        yield from ((name, tensor) for name, tensor in tensors.items() if not tensor.is_meta)

    specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    text = json.dumps(structure, indent=1, allow_nan=False) + "\n"
    return TensorSet(folder, OPTIMIZER_STEM, specs, gather), {folder / STRUCTURE_NAME: text.encode()}


def read_full_state(folder: Path, sharding: Sharding, optimizer: PolicyOptimizer) -> dict[str, Any]:
    """Open the files of `full_state_files`, with lazy tensors; check that they fit this model and optimizer.

    Raises:
        CheckpointError: names the file and the reason.
    """
    structure = read_json(folder, STRUCTURE_NAME)
    tensors = open_tensors(folder, OPTIMIZER_STEM)
    try:
        state = unflatten_state(tensors, structure)
        check_same_shapes(folder, sharding.shapes, state["shapes"])
        own = optimizer.state_dict()
        _check_settings(own, state["settings"])
        _check_state(sharding, state, has_masters="masters" in own)
        _check_can_be_gathered(sharding, state["state"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / STRUCTURE_NAME} does not fit this policy's optimizer ({error}); resume with the "
            "policy.optimizer, policy.scheduler and policy.precision that the file was saved with"
        ) from error
    return state


def load_full_state(sharding: Sharding, optimizer: PolicyOptimizer, full: Mapping[str, Any]) -> None:
    """Load this rank's shards of `full`, the result of `read_full_state`."""
    saved: dict[str, dict[str, Any]] = full["state"]
    moments = [key for key in full["like_weights"] if key != _MASTER]
    state: dict[int, dict[str, Any]] = {}
    for index, (unit, weights) in enumerate(zip(sharding.units, sharding.local_weights(), strict=True)):
        entries = [saved[name] for name in unit.names if name in saved]
        own = {key: value for key, value in (entries[0] if entries else {}).items() if key not in full["like_weights"]}
        own = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in own.items()}
        for key in moments:
            if any(key in entry for entry in entries):
                shard = sharding.shard_of(unit, partial(_full_tensor, sharding, saved, key))
                own[key] = shard.to(weights.device, copy=True)
        if own:
            state[index] = own
    settings = dict(full["settings"])
    groups = settings.pop("param_groups")
    result = {**settings, "optimizer": {"state": state, "param_groups": groups}}
    if _MASTER in full["like_weights"]:
        result["masters"] = sharding.shards_of(partial(_full_tensor, sharding, saved, _MASTER))
    optimizer.load_state_dict(result)


def check_same_shapes(path: Path, expected: Mapping[str, list[int]], found: Mapping[str, list[int]]) -> None:
    """Raise CheckpointError if the shapes are those of another model; the message names the first difference."""
    for name in [*expected, *sorted(found.keys() - expected.keys())]:
        if found.get(name) != expected.get(name):
            raise CheckpointError(
                f"{path} was saved from another model: {name} should have shape {expected.get(name, 'none')}, "
                f"found {found.get(name, 'nothing')}; resume with the policy.model_name it was saved from"
            )


def _full_tensor(sharding: Sharding, saved: Mapping[str, Mapping[str, Any]], key: str, name: str) -> torch.Tensor:
    """Return a saved tensor by state key and weight name; zeros if none was saved, as for a weight without gradient."""
    tensor = saved.get(name, {}).get(key)
    if tensor is not None:
        return tensor
    known = next(entry[key] for entry in saved.values() if key in entry)
    return known.new_zeros(()).expand(sharding.shapes[name])


def _shards_like_weights(sharding: Sharding, states: Mapping[int, Mapping[str, Any]]) -> dict[str, list[torch.Tensor]]:
    """Return this rank's state tensors that have the shape of the weights, by state key; zeros where missing."""
    weights = sharding.local_weights()
    shards: dict[str, list[torch.Tensor]] = {}
    for key in dict.fromkeys(key for state in states.values() for key in state):
        known = {index: state[key] for index, state in states.items() if key in state}
        if all(
            isinstance(shard, torch.Tensor) and shard.shape == weights[index].shape for index, shard in known.items()
        ):
            dtype = next(iter(known.values())).dtype
            shards[key] = [
                known[index] if index in known else torch.zeros_like(weight, dtype=dtype)
                for index, weight in enumerate(weights)
            ]
    return shards


def _check_can_be_gathered(sharding: Sharding, by_name: Mapping[str, Mapping[str, Any]]) -> None:
    for name, entry in by_name.items() if sharding.mesh.layout.size > 1 else ():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and value.dim() and list(value.shape) != sharding.shapes[name]:
                raise CheckpointError(
                    f"the optimizer's {key} of {name} has shape {list(value.shape)}, which cannot be gathered from "
                    "several ranks; save without an optimizer_path, or choose another policy.optimizer"
                )


def _check_settings(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    expected = {*_settings(own), "param_groups"}
    for name in sorted(expected ^ saved.keys()):
        raise ValueError(
            f"the file has no {name}" if name in expected else f"the file has {name}, but this policy has none"
        )
    if saved["kind"] != own["kind"]:
        raise ValueError(f"the file was saved with {saved['kind']}, but this policy uses {own['kind']}")
    num_default = sum(group.get("pattern") is None for group in saved["param_groups"])
    if num_default != 1:
        raise ValueError(f"the file has {num_default} param_groups without pattern, not 1")


def _check_state(sharding: Sharding, full: Mapping[str, Any], *, has_masters: bool) -> None:
    shapes, state = sharding.shapes, full["state"]
    for name, entry in state.items():
        for key in entry.keys() & set(full["like_weights"]):
            if list(entry[key].shape) != shapes[name]:
                raise ValueError(f"{key} of {name} has shape {list(entry[key].shape)} instead of {shapes[name]}")
    for name in shapes:
        if (_MASTER in state.get(name, {})) != has_masters:
            raise ValueError(
                f"the file has no master weight of {name}, which this policy needs"
                if has_masters
                else f"the file has a master weight of {name}, which this policy does not use"
            )


def _settings(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that belongs to no parameter: kind (the optimizer's class name), schedule, loss scale."""
    return {key: value for key, value in own.items() if key not in ("optimizer", "masters")}
