"""LoRA: a linear layer with a low-rank adapter, whose output is W x + b + alpha / rank * B A x.

W and b are frozen and keep their names and memory; A and B are trained. The model runs with its adapters, without them
(the reference policy) or with other strengths of them (to diagnose an engine), and can be merged into a plain model.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, https://arxiv.org/abs/2106.09685.

Shapes: R rank, I input features, O output features of a layer.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lucidrl.errors import ConfigError
from lucidrl.models.policy.config import ALL_LINEAR, LoraConfig
from lucidrl.utils.suggestions import closest

KEY = "policy.lora.target_modules"
FACTORS = ("lora_A", "lora_B")
"""Names of an adapter's parameters in its layer; PEFT has the same names."""
_MOST_NAMED = 8


class LoraLinear(nn.Linear):
    """A linear layer with an adapter; `add_adapters` makes one from an `nn.Linear`, which keeps its hooks."""

    lora_A: nn.Parameter
    """[R, I]"""
    lora_B: nn.Parameter
    """[O, R]"""
    scaling: float
    """alpha / rank"""
    dropout: float
    strength: float
    """Multiplies `scaling`: 1 = as trained, 0 = without the adapter."""
    is_merged: bool
    """Whether the forward pass adds the adapter to the weight first, as a merged model does."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.strength == 0:
            return super().forward(input)
        if self.is_merged:
            return nn.functional.linear(input, self.merged(), self.bias)
        # Only passes that compute gradients train, so scoring and generation drop nothing.
        dropped = nn.functional.dropout(input, self.dropout) if self.dropout and torch.is_grad_enabled() else input
        low = nn.functional.linear(dropped.to(self.lora_A.dtype), self.lora_A)
        added = nn.functional.linear(low, self.lora_B) * (self.scaling * self.strength)
        output = super().forward(input)
        return output + added.to(output.dtype)

    def merged(self) -> torch.Tensor:
        """Return the weight with the adapter added."""
        return merged_weight(self.weight, self.lora_A, self.lora_B, self.scaling)


def merged_weight(weight: torch.Tensor, a_RI: torch.Tensor, b_OR: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return weight + scaling * B @ A, computed in at least float32, in the dtype of the weight."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + (b_OR.to(wide) @ a_RI.to(wide)) * scaling).to(weight.dtype)


def add_adapters(model: nn.Module, config: LoraConfig, seed: int = 0) -> None:
    """Freeze a model and add trainable adapters to its target layers, in place.

    The adapters change no output at first: A is uniform, as that of a new linear layer, and B is 0. A depends on `seed`
    and the name of the layer only. Of a tensor parallel model, the adapters are split like the layers.

    Raises:
        ConfigError: a target is no linear layer of the model.
    """
    names = target_names(model, config.target_modules)
    model.requires_grad_(False)
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        layer.__class__ = LoraLinear  # in place, so that names and the hooks of tensor parallelism stay
        assert isinstance(layer, LoraLinear)
        a_RI, b_OR = _first_factors(layer.weight, config.rank, zlib.crc32(f"{seed} {name}".encode()))
        layer.lora_A, layer.lora_B = nn.Parameter(a_RI), nn.Parameter(b_OR)
        layer.scaling, layer.dropout, layer.strength, layer.is_merged = config.scaling, config.dropout, 1.0, False


def _first_factors(weight: torch.Tensor, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B on the device of a weight; as DTensors that fit the weight if it is one."""
    features_out, features_in = weight.shape
    a_RI = torch.empty(rank, features_in, device=weight.device, dtype=weight.dtype)
    b_OR = torch.zeros(features_out, rank, device=weight.device, dtype=weight.dtype)
    if not a_RI.is_meta:
        drawn = torch.rand(rank, features_in, generator=torch.Generator().manual_seed(seed))
        a_RI.copy_((2 * drawn - 1) / math.sqrt(features_in))
    if not isinstance(weight, DTensor):
        return a_RI, b_OR
    [split] = weight.placements  # split are outputs, and with them the rows of B, or inputs, the columns of A
    of_a = Shard(1) if split == Shard(1) else Replicate()
    of_b = Shard(0) if split == Shard(0) else Replicate()
    mesh = weight.device_mesh
    return (
        distribute_tensor(a_RI, mesh, [of_a], src_data_rank=None),
        distribute_tensor(b_OR, mesh, [of_b], src_data_rank=None),
    )


def target_names(model: nn.Module, targets: str | tuple[str, ...]) -> list[str]:
    """Return the names of the layers that `target_modules` selects, in the order of the model."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    modules = {name: module for name, module in model.named_modules() if name}
    linear = [name for name, module in modules.items() if type(module) is nn.Linear and module is not head]
    if not linear:
        raise ConfigError(
            f"{KEY}: {type(model).__name__} has no nn.Linear that an adapter can be added to; set policy.lora=null, or "
            "use another model"
        )
    if targets == ALL_LINEAR:
        return linear
    found: set[str] = set()
    for target in targets:
        matches = [name for name in modules if f".{name}".endswith(f".{target}")]
        if not matches:
            raise ConfigError(
                f"{KEY}: {target!r} matches no module of {type(model).__name__}; {_advice(target, linear)}"
            )
        for name in matches:
            if modules[name] is head:
                raise ConfigError(
                    f"{KEY}: {name} is the language model's head, whose logits are computed in chunks without an "
                    f"adapter; {_advice(target, linear)}"
                )
            if name not in linear:
                raise ConfigError(
                    f"{KEY}: {name} is a {type(modules[name]).__name__}, but only an nn.Linear can have an adapter; "
                    f"{_advice(target, linear)}"
                )
        found.update(matches)
    return [name for name in linear if name in found]


def _advice(target: str, linear: list[str]) -> str:
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    near = closest(target.rpartition(".")[2], [name for name in known if name != target])
    listed = ", ".join(known[:_MOST_NAMED])
    return f"did you mean {near}? Linear layers: {listed}" if near else f"choose {ALL_LINEAR} or some of {listed}"


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Return the layers with an adapter, by name; empty without LoRA."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


@contextmanager
def adapters_at(model: nn.Module, strength: float) -> Iterator[None]:
    """Context in which adapters have a strength; 0 is the model without them."""
    layers = list(adapted_layers(model).values())
    before = [layer.strength for layer in layers]
    try:
        for layer in layers:
            layer.strength = strength
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer.strength = value


@contextmanager
def merged_in_forward(model: nn.Module) -> Iterator[None]:
    """Context in which forward passes compute what the merged model computes, without a copy of the weights."""
    layers = list(adapted_layers(model).values())
    try:
        for layer in layers:
            layer.is_merged = True
        yield
    finally:
        for layer in layers:
            layer.is_merged = False


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add every adapter to the weight of its layer, which becomes a plain `nn.Linear` again."""
    for layer in adapted_layers(model).values():
        layer.weight.copy_(layer.merged())
        for name in (*FACTORS, "scaling", "dropout", "strength", "is_merged"):
            delattr(layer, name)
        layer.__class__ = nn.Linear  # type: ignore[assignment]  # the inverse of `add_adapters`
