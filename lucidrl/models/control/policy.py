"""`ControlPolicy`: the policy and critic that PPO trains."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lucidrl.checkpoint.manifest import FileDigest, read_json
from lucidrl.checkpoint.tensors import TensorSpec, flatten_state, open_tensors, unflatten_state
from lucidrl.checkpoint.writer import CheckpointWriter, TensorSet
from lucidrl.errors import CheckpointError, TrainingError
from lucidrl.losses.interfaces import FrameLoss, FrameOutputs, Frames
from lucidrl.models.control.config import ControlPolicyConfig, CriticConfig, NetworkConfig
from lucidrl.models.control.interfaces import ActionSpace, ControlTrainResult, ObservationSpace
from lucidrl.models.control.networks import CriticNetwork, GreedyPolicy, PolicyNetwork
from lucidrl.models.control.own_network import check_share_nothing
from lucidrl.models.muon import matrix_names
from lucidrl.models.optim import PolicyOptimizer
from lucidrl.models.parameter_groups import WeightInfo
from lucidrl.profiling.recording import Recording
from lucidrl.profiling.spans import span
from lucidrl.utils.device import default_device
from lucidrl.utils.nsys import POLICY, profile_request, worker_name
from lucidrl.utils.recorded import Recorded

WEIGHTS_STEM, OPTIMIZERS = "model", "optimizer"


class Role:
    """A trained network with its optimizer; config, metrics and checkpoints use the name of the role.

    A checkpoint holds `<name>/model.safetensors`, `optimizer/<name>.safetensors` and `optimizer/<name>.json`.
    """

    def __init__(self, name: str, network: nn.Module, config: NetworkConfig):
        self.name, self.network = name, network
        matrices = matrix_names(network)
        weights = [
            WeightInfo(weight, _on_one_rank if weight in matrices else None) for weight, _ in network.named_parameters()
        ]
        self.optimizer = PolicyOptimizer(network.parameters(), config, key=name, weights=weights)
        self.nonfinite_steps_in_a_row = 0
        self._max_nonfinite_steps = config.max_nonfinite_steps

    def step(self) -> float:
        """Make one optimizer update; return the gradient norm before clipping. Skip nonfinite gradients.

        Raises:
            TrainingError: too many consecutive updates were skipped.
        """
        norm = self.optimizer.step()
        self.nonfinite_steps_in_a_row = 0 if math.isfinite(norm) else self.nonfinite_steps_in_a_row + 1
        if self.nonfinite_steps_in_a_row >= self._max_nonfinite_steps:
            raise TrainingError(
                f"gradients of the {self.name} were NaN or infinite in {self.nonfinite_steps_in_a_row} optimizer steps "
                f"in a row; lower {self.name}.optimizer.kwargs.lr, or check for huge observations and rewards"
            )
        return norm

    def tensor_sets(self, folder: Path, *, weights_only: bool) -> tuple[list[TensorSet], dict[Path, bytes]]:
        """Return tensor sets and JSON files to save: weights, and the optimizer's state unless `weights_only`."""
        weights = self.network.state_dict()
        sets = [TensorSet(folder / self.name, WEIGHTS_STEM, _specs(weights), weights.items)]
        if weights_only:
            return sets, {}
        tensors, structure = flatten_state(self.optimizer.state_dict())
        sets.append(TensorSet(folder / OPTIMIZERS, self.name, _specs(tensors), tensors.items))
        text = json.dumps(structure, indent=1, allow_nan=False) + "\n"
        return sets, {folder / OPTIMIZERS / f"{self.name}.json": text.encode()}

    def read_weights(self, folder: Path) -> Mapping[str, torch.Tensor]:
        """Read and check saved weights.

        Raises:
            CheckpointError: names the file and the reason.
        """
        weights = open_tensors(folder / self.name, WEIGHTS_STEM)
        own = self.network.state_dict()
        for name in [*own, *(weights.keys() - own.keys())]:
            shape, saved = (list(tensors[name].shape) if name in tensors else "none" for tensors in (own, weights))
            if shape != saved:
                raise CheckpointError(
                    f"{folder / self.name} was saved from another network: {name} should have shape {shape}, found "
                    f"{saved}; "
                    f"use the env, {self.name}.network and {self.name}.hidden_sizes it was saved with"
                )
        return weights

    def read(self, folder: Path) -> dict[str, Any]:
        """Read and check a saved state for `load`.

        Raises:
            CheckpointError: names the file and the reason.
        """
        weights = self.read_weights(folder)
        tensors = {name: tensor.clone() for name, tensor in open_tensors(folder / OPTIMIZERS, self.name).items()}
        optimizer = unflatten_state(tensors, read_json(folder / OPTIMIZERS, f"{self.name}.json"))
        found, expected = (_kind(state) for state in (optimizer, self.optimizer.state_dict()))
        if found != expected:
            raise CheckpointError(
                f"{folder / OPTIMIZERS} holds the state of the {self.name}'s {found}, but {expected} is configured; "
                f"resume with the {self.name}.optimizer and the {self.name}.scheduler it was saved with"
            )
        return {"weights": weights, "optimizer": optimizer}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load the result of `read`."""
        self.network.load_state_dict(saved["weights"])
        self.optimizer.load_state_dict(saved["optimizer"])


class ControlPolicy(Recorded):
    """Policy and critic networks with their optimizers, in this process; torch's seed sets the initial weights."""

    def __init__(
        self,
        observations: ObservationSpace,
        actions: ActionSpace,
        policy: ControlPolicyConfig,
        critic: CriticConfig,
    ):
        profile_request()  # raises now if invalid, not in the first step
        self.device = default_device()
        self._recording = Recording(worker_name(POLICY, 0))
        self.network = PolicyNetwork(observations, actions, policy).to(self.device)
        """Samples actions for collectors; always has the newest weights."""
        self.greedy = GreedyPolicy(self.network)
        """Acts without sampling."""
        self.critic = CriticNetwork(observations, actions, critic).to(self.device)
        check_share_nothing(self.network, self.critic)
        self._roles = [Role("policy", self.network, policy), Role("critic", self.critic, critic)]
        self._writer = CheckpointWriter(0, 1, None, pin_memory=self.device.type == "cuda")

    @torch.no_grad()
    def values(self, observations: torch.Tensor) -> torch.Tensor:
        """Return the critic's values [B] of observations [B, ...]."""
        return self.critic(observations)

    def score(self, frames: Frames) -> FrameOutputs:
        """Return log-probabilities, entropies and values of frames, with gradients."""
        logprobs, entropy = self.network.score(frames.observations, frames.latent_actions)
        return FrameOutputs(logprobs, entropy, self.critic(frames.observations))

    def train(
        self, frames: Frames, loss_fn: FrameLoss, *, num_epochs: int, minibatch_frames: int
    ) -> ControlTrainResult:
        """Train for several epochs of shuffled minibatches, one optimizer update per minibatch."""
        measured: list[Mapping[str, torch.Tensor]] = []
        norms: list[dict[str, float]] = []
        rates = {_metric(role, "learning_rate"): role.optimizer.learning_rate for role in self._roles}
        with span("train"):
            for _ in range(num_epochs):
                for indices in torch.randperm(len(frames)).split(minibatch_frames):
                    minibatch = frames.select(indices.to(self.device))
                    with span("forward"):
                        losses = loss_fn(self.score(minibatch), minibatch)
                    with span("backward"):  # the networks share no weights, so one pass serves both losses
                        (losses.policy + losses.critic).backward()
                    measured.append(losses.metrics)
                    with span("optimizer"):
                        norms.append({_metric(role, "grad_norm"): role.step() for role in self._roles})
            for role in self._roles:
                role.optimizer.schedule()
        means = {name: float(torch.stack([metrics[name] for metrics in measured]).mean()) for name in measured[0]}
        means |= {name: math.fsum(norm[name] for norm in norms) / len(norms) for name in norms[0]}
        num_skipped = sum(not math.isfinite(norm) for minibatch in norms for norm in minibatch.values())
        return ControlTrainResult({**means, **rates}, num_skipped)

    def begin_save(self, folder: Path, *, weights_only: bool = False) -> None:
        """Copy both networks, and their optimizers unless `weights_only`, and write them in the background."""
        parts = [role.tensor_sets(folder, weights_only=weights_only) for role in self._roles]
        small_files = {path: content for _, files in parts for path, content in files.items()}
        self._writer.begin([tensor_set for sets, _ in parts for tensor_set in sets], small_files)

    def reserve_save(self, folder: Path, *, weights_only: bool = False) -> bool:
        """Allocate nothing: networks of control tasks are small."""
        return True

    def is_save_written(self) -> bool:
        return self._writer.is_done()

    def finish_save(self) -> dict[Path, FileDigest]:
        """Wait until all files are on disk; return their digests."""
        return self._writer.finish()

    def load(self, folder: Path) -> None:
        """Load a checkpoint folder; an invalid folder raises an error before anything changes."""
        saved = [(role, role.read(folder)) for role in self._roles]
        for role, state in saved:
            role.load(state)

    def load_weights(self, folder: Path) -> None:
        """Load the networks of a checkpoint folder; the folder may lack the optimizers."""
        saved = [(role, role.read_weights(folder)) for role in self._roles]
        for role, weights in saved:
            role.network.load_state_dict(weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the layout, and the state except weights and optimizers, as plain values.

        The random state is not included: the driver saves it.
        """
        return {
            "layout": f"{type(self).__name__} on {'GPU' if self.device.type == 'cuda' else 'CPU'}",
            "ranks": [{"nonfinite_steps_in_a_row": {role.name: role.nonfinite_steps_in_a_row for role in self._roles}}],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for role in self._roles:
            role.nonfinite_steps_in_a_row = state["ranks"][0]["nonfinite_steps_in_a_row"][role.name]


def _on_one_rank(matrix: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return function(matrix)


def _metric(role: Role, name: str) -> str:
    """Return the name of a role's metric: the critic's metrics have a prefix, the policy's have none."""
    return name if role.name == "policy" else f"{role.name}_{name}"


def _kind(optimizer: Mapping[str, Any]) -> str:
    return f"{optimizer['kind']} {'with' if 'scheduler' in optimizer else 'without'} a scheduler"


def _specs(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
