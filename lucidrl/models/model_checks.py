"""Checks a model's files before large allocations, and compares our forward passes with the model's original code.

Shapes: B rows, T tokens, V vocabulary.
"""

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
from transformers import PreTrainedModel

from lucidrl.distributed.packing import pack_rows
from lucidrl.errors import ConfigError, LucidError
from lucidrl.models import attention
from lucidrl.models.generation.decode_layout import DecodeLayout
from lucidrl.models.generation.kv_cache import CachedRow, Chunk, PrefillBatch
from lucidrl.models.generation.pages import PagedTokens, PagePool
from lucidrl.models.logprobs import LogprobModel

LIMITS = {
    re.compile(r"(num|n)_.*layers?"): 2048,
    re.compile(r"(vocab|hidden|intermediate|ffn)_size|head_dim|d_model|n_embd|n_inner|(num|n)_.*(heads?|experts)"): 2
    ** 24,
    re.compile(r"max_position_embeddings|n_positions"): 2**31 - 1,
}
"""Largest valid sizes in a config, by patterns of the setting names."""
MOST_NAMED = 5
"""Maximum number of tensor names in a message."""


@contextmanager
def as_config_error(message: str) -> Iterator[None]:
    """Turn library errors about a damaged folder or an unusable model into a ConfigError."""
    try:
        yield
    except (LucidError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).partition("\n\n")[0].split())  # later paragraphs give advice that does not apply
        raise ConfigError(f"{message}: {type(error).__name__}: {reason}") from error


def check_config_file(path: Path) -> None:
    """Refuse a config.json with absurd sizes, before a library allocates lists or tensors of these sizes."""
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
                raise ConfigError(f"{path}: {name}={value!r} is not an integer from 0 to {largest}; restore the file")


def check_weight_files(folder: Path, model: nn.Module) -> None:
    """Refuse a folder without safetensors files, or with too few weights for the model.

    Args:
        model: may be on the meta device.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
        if pickled:
            raise ConfigError(
                f"{folder} has its weights in {pickled[0]}, a pickle, which is not loaded because it can run code; "
                'convert it with: python -c "from transformers import AutoModelForCausalLM as M; '
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
            f"{folder / 'config.json'} describes a model of {needed:,} parameters, but the safetensors files have "
            f"{stored:,}; restore the files of the model"
        )


def describe_mismatch(found: Mapping[str, Any]) -> str:
    """List missing, unexpected and wrongly shaped tensors in the loader's report; empty if the files fit the model."""
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


TOLERANCE = 3e-4
"""Largest allowed difference of a token's logits, relative to the spread of the logits. Rounding in float32 causes
differences of about 1e-7, at most 3e-5 in 48 layers with large weights. Unsupported architectures differ by 4e-4 or
more, even with small weights."""
_PERTURBATION = 1e-5
"""Relative change of the embeddings that shows how much rounding errors grow. The logits of single tokens of trained
models can change by 7e-3 of the spread; such tokens may differ by twice as much."""
LENGTHS = (8, 5)
"""Lengths of the compared rows."""
KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Types of layers that attend to all earlier tokens, or to a window of earlier tokens."""


def check_architecture(model: PreTrainedModel) -> None:
    """Refuse layer types that `check_against_own_forward` may not detect, because its rows are short.

    This check needs no weights.
    """
    text: Any = model.config.get_text_config()
    if unknown := sorted(set(getattr(text, "layer_types", None) or ()) - KNOWN_LAYER_TYPES):
        raise _unsupported(model, f"it has layers of type {', '.join(unknown)}")
    if model._is_stateful:
        raise _unsupported(model, "it carries a recurrent state")


@torch.no_grad()
def check_against_own_forward(model: PreTrainedModel) -> None:
    """Refuse a model whose logits in our forward passes differ from the logits of its original code.

    The check compares every token in padded rows, in packed rows and in decoding with a cache. Differences are relative
    to the spread of the logits and computed in at least float32, so that the scale and precision of the weights do not
    matter.

    Raises:
        ConfigError: the logits differ; the message names the forward pass and the difference.
    """
    check_architecture(model)
    with in_float32(model):
        try:
            differences = _differences(model)
        except ConfigError as error:
            raise _unsupported(model, str(error)) from error
        except Exception as error:  # third-party code may raise anything
            raise _unsupported(
                model, f"its code fails with our attention function ({type(error).__name__}: {error})"
            ) from error
    path, worst = max(differences.items(), key=lambda item: item[1])
    if not worst <= TOLERANCE:
        raise _unsupported(
            model,
            f"its logits differ from the logits of our {path} forward pass by {worst:.2g} of their spread at the worst "
            "token",
        )


def _differences(model: PreTrainedModel) -> dict[str, float]:
    """Return, by forward pass, the root mean square difference over V at the worst token, relative to the spread.

    The difference of a token that amplifies rounding errors is scaled down to the tolerance of other tokens.
    """
    device = next(model.parameters()).device
    lengths_B = torch.tensor(LENGTHS, device=device)
    rows, width = len(LENGTHS), max(LENGTHS)
    ids_BT = torch.arange(1, rows * width + 1, device=device).view(rows, width)
    ids_BT %= model.config.get_text_config().vocab_size
    is_token_BT = torch.arange(width, device=device) < lengths_B[:, None]
    own_BTV = _centred(_own_logits(model, ids_BT))
    spread = own_BTV[is_token_BT].square().mean().sqrt()

    allowed_BT = 2 * (_centred(_perturbed_logits(model, ids_BT)) - own_BTV).square().mean(dim=-1).sqrt() / spread
    allowed_BT = allowed_BT.clamp(min=TOLERANCE)
    wrapped, prompt_lengths_B = LogprobModel(model, temperature=1.0), lengths_B - 1
    padded_BTV = wrapped(ids_BT, lengths_B, frozenset({"logits"})).logits
    # Pack the prompts: a model that mixes tokens outside of attention then mixes rows, and the logits differ.
    packed = pack_rows(ids_BT, prompt_lengths_B)
    pools = PagePool(width), PagePool(width)
    cached = [CachedRow(*(PagedTokens(pool) for pool in pools)) for _ in range(rows)]
    prefill = PrefillBatch.of(
        [
            Chunk(ids[:length].cpu().numpy(), row.prefix)
            for ids, length, row in zip(ids_BT, prompt_lengths_B, cached, strict=True)
        ],
        device,
    )
    prompts = wrapped.hidden_states(prefill.input_ids, prefill.position_ids, prefill.layout)
    decode = DecodeLayout(cached, device)
    decoded = wrapped.hidden_states(ids_BT.gather(1, prompt_lengths_B[:, None]), decode.position_ids, decode)

    last = torch.arange(rows, device=device), prompt_lengths_B

    def worst(logits: torch.Tensor, own: torch.Tensor, allowed: torch.Tensor) -> float:
        difference = (_centred(logits) - own).square().mean(dim=-1).sqrt()
        excess = torch.where(difference == 0, 0.0, difference / spread * (TOLERANCE / allowed))
        return float(excess.max())

    packed_allowed = packed.pack(allowed_BT[..., None]).squeeze(-1)
    return {
        "padded": worst(padded_BTV[is_token_BT], own_BTV[is_token_BT], allowed_BT[is_token_BT]),
        "packed": worst(wrapped.next_token_logits(prompts), packed.pack(own_BTV), packed_allowed),
        "decoding": worst(wrapped.next_token_logits(decoded), own_BTV[last], allowed_BT[last]),
    }


def _centred(logits: torch.Tensor) -> torch.Tensor:
    """Subtract the mean of each token's logits, which does not affect probabilities."""
    logits = logits.double()
    return logits - logits.mean(dim=-1, keepdim=True)


def _own_logits(model: PreTrainedModel, ids_BT: torch.Tensor) -> torch.Tensor:
    # Fused implementations ignore features such as soft caps and attention sinks.
    model.config._attn_implementation = "eager"
    try:
        return model(input_ids=ids_BT, use_cache=False).logits
    finally:
        model.config._attn_implementation = attention.NAME


def _perturbed_logits(model: PreTrainedModel, ids_BT: torch.Tensor) -> torch.Tensor:
    """Logits of the model's original code with slightly changed embeddings."""

    def perturb(module: nn.Module, inputs: Any, embeddings: torch.Tensor) -> torch.Tensor:
        signs = torch.arange(embeddings.shape[-1], device=embeddings.device) % 2 * 2 - 1
        return embeddings * (1 + _PERTURBATION * signs)

    hook = model.get_input_embeddings().register_forward_hook(perturb)
    try:
        return _own_logits(model, ids_BT)
    finally:
        hook.remove()


@contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: inside it, half-precision tensors of the model are float32. The exit restores every bit."""
    halves = [
        (tensor, tensor.dtype)
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.dtype in (torch.bfloat16, torch.float16)
    ]
    try:
        for tensor, _ in halves:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, dtype in halves:
            tensor.data = tensor.data.to(dtype)


def _unsupported(model: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} is not supported: {reason}; use a model with causal attention in every layer, such as "
        "Llama, Qwen3 or Gemma (docs/models.md)"
    )
