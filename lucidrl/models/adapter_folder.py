"""Folders of adapters in the format of PEFT, and the base model that an adapter belongs to.

A folder has `adapter_config.json` and `adapter_model.safetensors`, as `peft` writes and reads them, and `base.json`,
our record of the base: its name and a checksum of its weights. Folders that `peft` wrote have no `base.json`; their
base is the `base_model_name_or_path` of the config.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lucidrl.checkpoint.manager import verify_part
from lucidrl.checkpoint.manifest import read_json
from lucidrl.checkpoint.tensors import open_tensors
from lucidrl.distributed.checksums import checksums_of
from lucidrl.errors import CheckpointError, ConfigError, LucidError
from lucidrl.models import embedded
from lucidrl.models.lora import FACTORS, adapted_layers, add_adapters
from lucidrl.models.policy.config import EMBEDDED_MODELS, LoraConfig
from lucidrl.models.sources import ADAPTER_CONFIG_NAME, model_folder
from lucidrl.utils.config import validate
from lucidrl.utils.hub import is_hub_id

STEM, BASE_NAME = "adapter_model", "base.json"
_PREFIX = "base_model.model."
_UNSUPPORTED = (
    "use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform",
    "layer_replication", "fan_in_fan_out", "target_parameters", "trainable_token_indices", "lora_bias", "use_qalora",
)  # fmt: skip
"""Settings of PEFT's LoRA that would change the result."""
_SHOWN_DIGITS = 12


@dataclass(frozen=True)
class Base:
    """The model that an adapter belongs to."""

    model_name: str
    """A resolved name; see `lucidrl.models.sources`."""
    seed: int
    """Seed of the weights, if the model is untrained."""
    checksum: str
    """Depends on the names and elements of all weights in the model's files, not on how they are split over files."""

    def __str__(self) -> str:
        return f"{self.model_name} (checksum {self.checksum[:_SHOWN_DIGITS]})"


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter instead of a model."""
    return (folder / ADAPTER_CONFIG_NAME).is_file()


def base_of(model_name: str, seed: int) -> Base:
    """Return the record of a model that adapters are trained on; it reads all weights.

    Args:
        seed: seed of the weights, if the model is untrained.
    """
    lines = sorted(f"{name} {checksum}\n" for name, checksum in checksums_of(_weights_of(model_name, seed)).items())
    if model_name not in EMBEDDED_MODELS and not is_hub_id(model_name):
        model_name = str(Path(model_name).expanduser().absolute())  # the adapter may be used from another folder
    return Base(model_name, seed, hashlib.sha256("".join(lines).encode()).hexdigest())


def _weights_of(model_name: str, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    if model_name in EMBEDDED_MODELS:
        is_warm = model_name == EMBEDDED_MODELS[0]
        yield from embedded.embedded_model(warm=is_warm, seed=seed, attn_implementation="eager").named_parameters()
        return
    folder = model_folder(model_name)
    if is_adapter(folder):  # this model is its base with the adapter merged in
        yield from _weights_of(*_base_name(folder))
        yield "scaling", torch.tensor(_read_config(folder).scaling)
    for path in sorted(folder.glob("*.safetensors")):
        yield from open_tensors(folder, path.stem).items()


def peft_name(name: str) -> str:
    """Return PEFT's name of a factor, such as `model.layers.0.mlp.up_proj.lora_A`."""
    return f"{_PREFIX}{name}.weight"


def adapter_files(model: nn.Module, config: LoraConfig, base: Base) -> dict[str, bytes]:
    """Return the small files of an adapter's folder, by name; the tensors are named by `peft_name`."""
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.model_name,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha.is_integer() else config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": _peft_targets(model),
        "bias": "none",
        "inference_mode": True,
    }
    files = {ADAPTER_CONFIG_NAME: content, BASE_NAME: asdict(base)}
    return {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in files.items()}


def _peft_targets(model: nn.Module) -> list[str]:
    """Return the last parts of the layers' names if they select the same layers, else the whole names."""
    layers = adapted_layers(model)
    last = sorted({name.rpartition(".")[2] for name in layers})
    selected = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in last]
    return last if len(selected) == len(layers) else list(layers)


def open_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """Open the tensors of an adapter lazily; return them under our names."""
    found = {}
    for name, tensor in open_tensors(folder, STEM).items():
        own = name.removeprefix(_PREFIX).removesuffix(".weight")
        if own == name or not own.endswith(FACTORS) or not tensor.is_floating_point():
            raise CheckpointError(
                f"{folder / STEM}.safetensors has {name} ({tensor.dtype}), which is no floating-point factor of a LoRA "
                f"of linear layers, such as {peft_name('model.layers.0.mlp.up_proj.lora_A')}; use another adapter"
            )
        found[own] = tensor
    return found


def check_adapter(folder: Path, config: LoraConfig | None, base: Callable[[], Base]) -> None:
    """Refuse a folder that a policy cannot load, before its tensors are read.

    Args:
        config: adapters of the policy; None if it trains all weights.
        base: returns the base of the policy.

    Raises:
        CheckpointError: the folder holds an adapter of another base or scale, or no adapter, or the policy has none.
    """
    if config is None:
        if is_adapter(folder):
            raise CheckpointError(
                f"{folder} holds an adapter, but this policy trains all weights (policy.lora=null); set policy.lora as "
                f"in its run, or start a run with policy.model_name={folder}, which merges it"
            )
        return
    if not is_adapter(folder):
        raise CheckpointError(
            f"{folder} holds no adapter (no {ADAPTER_CONFIG_NAME}), but this policy trains one (policy.lora.rank="
            f"{config.rank}); set policy.lora=null, or set policy.model_name={folder} to train an adapter of it"
        )
    saved = _read_config(folder)
    if (saved.rank, saved.alpha) != (config.rank, config.alpha):
        raise CheckpointError(
            f"{folder} holds an adapter of rank {saved.rank} and alpha {saved.alpha:g}, but policy.lora has rank "
            f"{config.rank} and alpha {config.alpha:g}; set policy.lora.rank={saved.rank} "
            f"policy.lora.alpha={saved.alpha:g}"
        )
    check_base(folder, base())


def check_base(folder: Path, base: Base) -> None:
    """Raise CheckpointError if the adapter in a folder belongs to another base; folders of `peft` do not say."""
    recorded = _read_base(folder)
    if recorded is not None and recorded.checksum != base.checksum:
        raise CheckpointError(
            f"{folder} holds an adapter of {recorded}, but this base is {base}; an adapter fits only the weights that "
            "it was trained on, so restore them, or set policy.model_name to them"
        )


def load_adapter(
    folder: Path, load_base: Callable[[str, int], nn.Module], dtype: torch.dtype, base_name: str | None = None
) -> Any:
    """Return the base of an adapter with the adapter, not merged; verify the files and the base.

    Args:
        load_base: loads a model by name and seed.
        base_name: name of the base, if it is no longer where the folder says.
    """
    verify_part(folder)
    config, (recorded_name, seed) = _read_config(folder), _base_name(folder)
    name = base_name or recorded_name
    try:
        model = load_base(name, seed)
    except LucidError as error:
        error.add_note(f"{folder} is an adapter of {recorded_name}; restore that model, or merge with --base FOLDER")
        raise
    if _read_base(folder) is not None:
        check_base(folder, base_of(name, seed))
    add_adapters(model, config, seed)
    saved, factors = open_adapter(folder), _factors(model)
    for name in sorted(factors.keys() ^ saved.keys()):
        problem = "missing" if name in factors else "unexpected"
        raise CheckpointError(
            f"{folder} does not fit its {ADAPTER_CONFIG_NAME}: {name} is {problem}; restore the files of the adapter"
        )
    with torch.no_grad():
        for name, factor in factors.items():
            if factor.shape != saved[name].shape:
                raise CheckpointError(
                    f"{folder} does not fit {recorded_name}: {name} should have shape {list(factor.shape)}, found "
                    f"{list(saved[name].shape)}; use the base that the adapter was trained on"
                )
            # Factors keep their precision, as in PEFT: merging rounds only once.
            factor.data = saved[name].to(factor.device, torch.promote_types(saved[name].dtype, dtype))
    return model


def _factors(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        f"{name}.{factor}": getattr(layer, factor)
        for name, layer in adapted_layers(model).items()
        for factor in FACTORS
    }


def base_name(folder: Path) -> str:
    """Return the name of the base of an adapter."""
    return _base_name(folder)[0]


def _base_name(folder: Path) -> tuple[str, int]:
    """Return name and seed of the base of an adapter."""
    if (recorded := _read_base(folder)) is not None:
        return recorded.model_name, recorded.seed
    name = read_json(folder, ADAPTER_CONFIG_NAME).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{folder / ADAPTER_CONFIG_NAME} names no base (base_model_name_or_path={name!r}); set it to the "
            "folder of the model that the adapter was trained on"
        )
    return name, 0


def _read_base(folder: Path) -> Base | None:
    if not (folder / BASE_NAME).exists():
        return None
    content = read_json(folder, BASE_NAME)
    try:
        return Base(str(content["model_name"]), int(content["seed"]), str(content["checksum"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / BASE_NAME} is not a record of a base ({error!r}); restore the file"
        ) from error


def _read_config(folder: Path) -> LoraConfig:
    """Read PEFT's config; refuse kinds of adapters that our layers do not compute."""
    path, content = folder / ADAPTER_CONFIG_NAME, read_json(folder, ADAPTER_CONFIG_NAME)
    if not isinstance(content, Mapping) or content.get("peft_type") != "LORA":
        kind = content.get("peft_type") if isinstance(content, Mapping) else type(content).__name__
        raise ConfigError(f"{path}: peft_type={kind!r} is not supported; use a LORA adapter, or merge it with peft")
    unsupported = [name for name in _UNSUPPORTED if content.get(name)]
    if content.get("bias", "none") != "none":
        unsupported.append("bias")
    if unsupported:
        raise ConfigError(
            f"{path} sets {', '.join(unsupported)}, which this LoRA does not have; merge the adapter with peft, and "
            "use the merged model"
        )
    settings = {
        "rank": content.get("r"),
        "alpha": content.get("lora_alpha"),
        "dropout": content.get("lora_dropout", 0.0),
        "target_modules": content.get("target_modules"),
    }
    return validate(LoraConfig, settings, str(path))
