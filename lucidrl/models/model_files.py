"""Checks of the files of a model folder, before anything large is allocated."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from lucidrl.errors import ConfigError, LucidError

LIMITS = {
    re.compile(r"(num|n)_.*layers?"): 2048,
    re.compile(r"(vocab|hidden|intermediate|ffn)_size|head_dim|d_model|n_embd|n_inner|(num|n)_.*(heads?|experts)"): 2
    ** 24,
    re.compile(r"max_position_embeddings|n_positions"): 2**31 - 1,
}
"""Largest valid sizes in a config, by patterns of their names."""
MOST_NAMED = 5
"""Maximum number of tensor names in a message."""


@contextmanager
def as_config_error(message: str) -> Iterator[None]:
    """Turn errors of the libraries about a damaged folder or unusable model into a ConfigError."""
    try:
        yield
    except (LucidError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).partition("\n\n")[0].split())  # later paragraphs give advice that does not apply
        raise ConfigError(f"{message}: {type(error).__name__}: {reason}") from error


def check_config_file(path: Path) -> None:
    """Refuse a config.json with absurd sizes, before a library allocates lists or tensors of such sizes."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable JSON ({error}); restore the file") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}, not a JSON object; restore the file")
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name, value in section.items():
            largest = next((limit for pattern, limit in LIMITS.items() if pattern.fullmatch(name)), None)
            if largest is None or value is None or isinstance(value, list | dict):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
                raise ConfigError(
                    f"{path}: {name}={value!r} is not valid: it must be an integer from 0 to {largest}; restore it"
                )


def check_weight_files(folder: Path, model: nn.Module) -> None:
    """Refuse a folder without safetensors, or with too few weights for the model, which is on the meta device."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
        if pickled:
            raise ConfigError(
                f"{folder} has its weights in {pickled[0]}, a pickle, which can run code and is not loaded; convert "
                'it with: python -c "from transformers import AutoModelForCausalLM as M; '
                f"M.from_pretrained('{folder}').save_pretrained('{folder}', safe_serialization=True)\""
            )
        raise ConfigError(f"{folder} has no weights; use a folder with model.safetensors")
    stored = 0
    for path in files:
        with as_config_error(f"{path} is not a readable safetensors file"), safe_open(path, framework="pt") as file:
            stored += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no mapping
    needed = sum(parameter.numel() for parameter in model.parameters())
    if needed > 2 * stored:
        raise ConfigError(
            f"{folder / 'config.json'} describes a model of {needed:,} parameters, but its safetensors files hold "
            f"{stored:,}; restore the files of the model"
        )


def describe_mismatch(found: Mapping[str, Any]) -> str:
    """Missing, unexpected and wrongly shaped tensors in the loader's report; empty if the files fit the model."""
    shapes = {f"{name} (file {list(theirs)}, model {list(ours)})" for name, theirs, ours in found["mismatched_keys"]}
    wrong = {"missing": found["missing_keys"], "unexpected": found["unexpected_keys"], "wrongly shaped": shapes}
    return "; ".join(f"{kind}: {_named(names)}" for kind, names in wrong.items() if names)


def check_finite(model: nn.Module, folder: Path) -> None:
    """Refuse weights that are NaN or infinite."""
    wrong = [name for name, weights in model.named_parameters() if not _is_finite(weights.detach())]
    if wrong:
        raise ConfigError(
            f"the weights in {folder} are NaN or infinite in {_named(wrong)}; restore the files, or use a checkpoint "
            "from before training diverged"
        )


def _is_finite(weights: torch.Tensor) -> bool:
    # One pass without a copy: the extremes reveal both NaN and infinity.
    return weights.numel() == 0 or bool(torch.stack(weights.aminmax()).isfinite().all())


def _named(names: Collection[str]) -> str:
    listed = sorted(names)
    rest = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return ", ".join(listed[:MOST_NAMED]) + rest
