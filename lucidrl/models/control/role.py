"""One network with its optimizer: the policy or the critic."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lucidrl.checkpoint.manifest import read_json
from lucidrl.checkpoint.state import flatten_state, unflatten_state
from lucidrl.checkpoint.tensors import TensorSpec, open_tensors
from lucidrl.checkpoint.writer import TensorSet
from lucidrl.errors import CheckpointError, TrainingError
from lucidrl.models.control.config import NetworkConfig
from lucidrl.models.optim import PolicyOptimizer

WEIGHTS_STEM, OPTIMIZERS = "model", "optimizer"


class Role:
    """A network that is trained, under the name that config, metrics and checkpoints have for it.

    In the folder of a checkpoint it is `<name>/model.safetensors`, and its optimizer `optimizer/<name>.safetensors`
    with `optimizer/<name>.json`.
    """

    def __init__(self, name: str, network: nn.Module, config: NetworkConfig):
        self.name, self.network = name, network
        self.optimizer = PolicyOptimizer(network.parameters(), config, key=name)
        self.nonfinite_steps_in_a_row = 0
        self._max_nonfinite_steps = config.max_nonfinite_steps

    def step(self) -> float:
        """Move along the gradient that is there, unless it is NaN or infinite; its norm before clipping, which tells.

        Raises:
            TrainingError: after too many steps in a row that were left out.
        """
        norm = self.optimizer.step()
        self.nonfinite_steps_in_a_row = 0 if math.isfinite(norm) else self.nonfinite_steps_in_a_row + 1
        if self.nonfinite_steps_in_a_row >= self._max_nonfinite_steps:
            raise TrainingError(
                f"gradients of the {self.name} were NaN or infinite in {self.nonfinite_steps_in_a_row} optimizer steps "
                f"in a row; lower {self.name}.optimizer.kwargs.lr, or look for huge observations and rewards"
            )
        return norm

    def tensor_sets(self, folder: Path, *, weights_only: bool) -> tuple[list[TensorSet], dict[Path, bytes]]:
        """What a checkpoint writer needs: the weights, and the optimizer's state unless `weights_only`."""
        weights = self.network.state_dict()
        sets = [TensorSet(folder / self.name, WEIGHTS_STEM, _specs(weights), weights.items)]
        if weights_only:
            return sets, {}
        tensors, structure = flatten_state(self.optimizer.state_dict())
        sets.append(TensorSet(folder / OPTIMIZERS, self.name, _specs(tensors), tensors.items))
        text = json.dumps(structure, indent=1, allow_nan=False) + "\n"
        return sets, {folder / OPTIMIZERS / f"{self.name}.json": text.encode()}

    def read(self, folder: Path) -> dict[str, Any]:
        """What `load` takes, checked to be of this network.

        Raises:
            CheckpointError: names the file and the reason.
        """
        weights = open_tensors(folder / self.name, WEIGHTS_STEM)
        own = self.network.state_dict()
        for name in [*own, *(weights.keys() - own.keys())]:
            shape, saved = (list(tensors[name].shape) if name in tensors else "none" for tensors in (own, weights))
            if shape != saved:
                raise CheckpointError(
                    f"{folder / self.name} is of another network: {name} should have shape {shape}, found {saved}; "
                    f"resume with the env and the {self.name}.hidden_sizes it was saved with"
                )
        tensors = {name: tensor.clone() for name, tensor in open_tensors(folder / OPTIMIZERS, self.name).items()}
        optimizer = unflatten_state(tensors, read_json(folder / OPTIMIZERS, f"{self.name}.json"))
        found, expected = (_kind(state) for state in (optimizer, self.optimizer.state_dict()))
        if found != expected:
            raise CheckpointError(
                f"{folder / OPTIMIZERS} has the {self.name}'s {found}, but {expected} is configured; "
                f"resume with the {self.name}.optimizer and the {self.name}.scheduler it was saved with"
            )
        return {"weights": weights, "optimizer": optimizer}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take what `read` gave."""
        self.network.load_state_dict(saved["weights"])
        self.optimizer.load_state_dict(saved["optimizer"])


def _kind(optimizer: Mapping[str, Any]) -> str:
    return f"{optimizer['kind']} {'with' if 'scheduler' in optimizer else 'without'} a scheduler"


def _specs(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
