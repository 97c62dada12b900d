"""Weights and optimizer of a policy on disk: whole tensors under Hugging Face names, whatever the layout of the ranks.

Every rank takes part in gathering; rank 0 writes. The optimizer's files list its state in the order of the model's
parameters, so that another number of ranks can go on from them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lucidrl.checkpoint.tensors import flatten_state, load_tensors, save_tensors, unflatten_state
from lucidrl.errors import CheckpointError
from lucidrl.models.loading import DTYPES
from lucidrl.models.policy.optim import PolicyOptimizer
from lucidrl.models.policy.sharding import Sharding

WEIGHTS_FILE, OPTIMIZER_TENSORS, OPTIMIZER_STRUCTURE = "model.safetensors", "optimizer.safetensors", "optimizer.json"


def save_weights(sharding: Sharding, precision: str, folder: str) -> None:
    """Write a Hugging Face folder, in the precision that the policy computes with."""
    weights = {}
    for name, tensor in sharding.full_weights():
        if sharding.mesh.rank == 0:
            weights[name] = tensor.to("cpu", DTYPES[precision])
    if sharding.mesh.rank == 0:
        sharding.model.model.config.dtype = DTYPES[precision]  # sharded parameters are of another one than is saved
        # One file, whatever its size: that is what `load_weights` reads.
        sharding.model.model.save_pretrained(folder, state_dict=weights, max_shard_size="1000GB")


def load_weights(sharding: Sharding, folder: str) -> None:
    """Take the weights of a Hugging Face folder, or none of them if it is of another model."""
    saved = load_tensors(Path(folder) / WEIGHTS_FILE)
    _check_same_model(sharding, saved, folder)
    sharding.load_full_weights(saved)


def save_optimizer(sharding: Sharding, optimizer: PolicyOptimizer, folder: str) -> None:
    state = _whole(sharding, optimizer.state_dict())
    if sharding.mesh.rank == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tensors, structure = flatten_state(state)
        save_tensors(Path(folder) / OPTIMIZER_TENSORS, tensors)
        (Path(folder) / OPTIMIZER_STRUCTURE).write_text(json.dumps(structure))


def load_optimizer(sharding: Sharding, optimizer: PolicyOptimizer, folder: str) -> None:
    try:
        structure = json.loads((Path(folder) / OPTIMIZER_STRUCTURE).read_text())
        saved = unflatten_state(load_tensors(Path(folder) / OPTIMIZER_TENSORS), structure)
        optimizer.load_state_dict(_parts(sharding, saved))
    except (OSError, KeyError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"{folder} holds no state of this policy's optimizer ({type(error).__name__}: {error}); "
            "resume with the policy.optimizer, policy.scheduler and policy.precision it was saved with"
        ) from error


def _whole(sharding: Sharding, state: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's state with whole tensors; complete on rank 0 only."""
    number_of = _numbers(sharding)
    states: dict[int, dict[str, Any]] = state["optimizer"]["state"]
    whole: dict[int, dict[str, Any]] = {}
    for key in dict.fromkeys(key for entry in states.values() for key in entry):
        parts = [states[index][key] for index in range(len(states))]
        if all(isinstance(part, torch.Tensor) and part.dim() for part in parts):
            for name, tensor in sharding.full_tensors(parts):
                if sharding.mesh.rank == 0:
                    whole.setdefault(number_of[name], {})[key] = tensor.cpu()
        else:  # a count of steps: one for all
            for number in number_of.values():
                whole.setdefault(number, {})[key] = parts[0]
    groups = [{**group, "params": list(range(len(number_of)))} for group in state["optimizer"]["param_groups"]]
    result = {**state, "optimizer": {"state": whole, "param_groups": groups}}
    if "masters" in state:
        masters = {}
        for name, tensor in sharding.full_tensors(state["masters"]):
            if sharding.mesh.rank == 0:
                masters[number_of[name]] = tensor.cpu()
        result["masters"] = [masters[number] for number in sorted(masters)]
    return result


def _parts(sharding: Sharding, whole: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse: this rank's parts."""
    number_of = _numbers(sharding)
    states: dict[int, dict[str, Any]] = whole["optimizer"]["state"]
    num_parameters = len(sharding.parameters())
    for group in whole["optimizer"]["param_groups"]:
        if len(group["params"]) != len(number_of):
            raise ValueError(f"it is of {len(group['params'])} tensors, the model has {len(number_of)}")
    state: dict[int, dict[str, Any]] = {index: {} for index in range(num_parameters)} if states else {}
    for key, value in states[0].items() if states else ():
        if isinstance(value, torch.Tensor) and value.dim():
            parts = list(sharding.parts_of(lambda name, key=key: states[number_of[name]][key]))
        else:
            parts = [value.clone() if isinstance(value, torch.Tensor) else value for _ in range(num_parameters)]
        for index, part in enumerate(parts):
            state[index][key] = part
    groups = [{**group, "params": list(range(num_parameters))} for group in whole["optimizer"]["param_groups"]]
    result = {**whole, "optimizer": {"state": state, "param_groups": groups}}
    if "masters" in whole:
        result["masters"] = list(sharding.parts_of(lambda name: whole["masters"][number_of[name]]))
    return result


def _numbers(sharding: Sharding) -> dict[str, int]:
    return {name: number for number, name in enumerate(sharding.shapes())}


def _check_same_model(sharding: Sharding, saved: Mapping[str, torch.Tensor], path: str) -> None:
    """Refuse weights that differ in name or shape, before any of them is taken."""
    expected = sharding.shapes()
    buffers = {name.replace("_fsdp_wrapped_module.", "") for name, _ in sharding.model.model.named_buffers()}
    unknown = sorted(saved.keys() - expected.keys() - buffers)
    for name in [*expected, *unknown]:
        found = list(saved[name].shape) if name in saved else None
        if found != expected.get(name):
            raise CheckpointError(
                f"{path} is of another model: {name} should have shape {expected.get(name, 'none')}, "
                f"found {found or 'nothing'}; resume with the policy.model_name it was saved from"
            )
