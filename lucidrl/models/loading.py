"""Models and tokenizers from a Hugging Face folder on disk, or the embedded ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import GENERATION_CONFIG_NAME

from lucidrl.errors import ConfigError
from lucidrl.models import attention, embedded
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.policy.config import EMBEDDED_MODELS, PolicyConfig

logger = logging.getLogger(__name__)

UNUSABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, SafetensorError)
"""What a damaged folder, or an architecture that was not written for other attention functions, raises."""
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class ModelFacts:
    """What can be known of a model without loading its weights."""

    architecture: str
    num_parameters: int
    context_length: int
    vocabulary: int
    hidden_size: int
    num_layers: int
    kv_elements_per_token: int
    """Elements that one cached token takes in all layers together."""


def load_tokenizer(
    model_name: str, pad_token: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; always with a pad token.

    Args:
        pad_token: pads instead of the tokenizer's own pad token. Where neither is named the end-of-sequence token
            pads: lengths, not pad ids, decide what is read, so that is safe.
    """
    tokenizer: Any = _own_tokenizer(model_name, trust_remote_code)
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise ConfigError(
                f"policy.pad_token={pad_token!r} is not a token of {model_name}; choose one of its vocabulary"
            )
        tokenizer.pad_token = pad_token
    elif tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigError(
                f"the tokenizer in {model_name} has neither a pad nor an end-of-sequence token; "
                "name one of its tokens with policy.pad_token=..."
            )
        logger.warning("the tokenizer in %s has no pad token; padding with its %r", model_name, tokenizer.eos_token)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def policy_tokenizer(config: PolicyConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that a policy's config names."""
    return load_tokenizer(config.tokenizer or config.model_name, config.pad_token, config.trust_remote_code)


def _own_tokenizer(model_name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    if model_name in EMBEDDED_MODELS:
        return embedded.embedded_tokenizer()
    folder = model_folder(model_name)
    with _refused(f"the tokenizer in {folder} cannot be loaded"):
        if get_tokenizer_config(folder, local_files_only=True).get("tokenizer_class") == "TokenizersBackend":
            # Its tokenizer.json says all; by the type of the model, another way to split text may be put in its place.
            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)


def load_model(
    model_name: str, dtype: torch.dtype, *, seed: int = 0, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The causal language model with our attention function, checked to compute what its own code computes."""
    if model_name in EMBEDDED_MODELS:
        warm = model_name == EMBEDDED_MODELS[0]
        model = embedded.embedded_model(warm=warm, seed=seed, attn_implementation=attention.NAME).to(dtype)
    else:
        folder = model_folder(model_name)
        with _refused(f"the model in {folder} cannot be loaded"):
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=attention.NAME,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
            )
    model.eval()
    check_against_own_forward(model)
    return model


def empty_model(model_name: str, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model that `load_model` gives, with shapes but without weights; only its two configs are read."""
    with _refused(f"the model {model_name} cannot be read"):
        config = model_config(model_name, trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention.NAME, trust_remote_code=trust_remote_code
            )
        if model_name not in EMBEDDED_MODELS:
            folder = model_folder(model_name)
            if (folder / GENERATION_CONFIG_NAME).is_file():  # it may name further tokens that end an answer
                model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.eval()


def model_facts(model_name: str, trust_remote_code: bool = False) -> ModelFacts:
    """Built on the meta device: reads config.json only."""
    with _refused(f"the model {model_name} cannot be read"), torch.device("meta"):
        config = model_config(model_name, trust_remote_code)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelFacts(
        architecture=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        context_length=context_length(config),
        vocabulary=text.vocab_size,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        kv_elements_per_token=2 * heads * head_size * text.num_hidden_layers,
    )


def model_config(model_name: str, trust_remote_code: bool) -> Any:
    if model_name in EMBEDDED_MODELS:
        return embedded.embedded_config()
    return AutoConfig.from_pretrained(
        model_folder(model_name), trust_remote_code=trust_remote_code, local_files_only=True
    )


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of a model, each of them what transformers says should not be taken apart.

    Raises:
        ConfigError: if it says so of none. To shard or to checkpoint the model as one piece would save nothing.
    """
    kinds = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} does not say which of its modules are layers (_no_split_modules), which several "
            "ranks and activation checkpointing need; set cluster.num_workers=1 and "
            "policy.dtensor_cfg.activation_checkpointing=false, or take another model"
        )
    return layers


def context_length(config: Any) -> int:
    """Most tokens the model was made for; unlimited where the config does not say.

    Rotary embeddings that change with the longest row of a call would make a row's log-probabilities depend on its
    neighbours; such models are held to the context in which they do not.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or 2**31 - 1
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        original = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        return min(limit, original or limit)
    return limit


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that the model or its tokenizer declares as an end."""
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = declared if isinstance(declared, list) else [declared]
    return frozenset(int(token) for token in [*ids, tokenizer.eos_token_id] if token is not None)


def model_folder(model_name: str) -> Path:
    """The folder of a model on disk."""
    folder = Path(model_name).expanduser()
    if not (folder / "config.json").is_file():
        found = "has no config.json" if folder.is_dir() else "does not exist"
        raise ConfigError(
            f"policy.model_name={model_name!r}: that folder {found}; give a Hugging Face model folder on disk, "
            f"or one of {', '.join(EMBEDDED_MODELS)}"
        )
    return folder


@torch.no_grad()
def check_against_own_forward(model: PreTrainedModel) -> None:
    """Refuse an architecture whose attention or logits do something that our log-probability path does not know."""
    vocabulary = model.config.get_text_config().vocab_size
    device = next(model.parameters()).device
    ids = torch.arange(1, 25, device=device).remainder(vocabulary).view(2, 12)
    lengths = torch.full((2,), 12, device=device)
    with _refused(f"{type(model).__name__} does not accept an attention function of ours"):
        # Packed, because a model that mixes tokens by other means than attention would mix those of different rows.
        ours = LogprobModel(model, temperature=1.0)(ids, lengths, frozenset({"logits"}), packed=True).logits
    assert ours is not None
    tolerance = 0.05 if model.dtype in (torch.bfloat16, torch.float16) else 1e-3
    # In half precision the model's own implementations differ from each other by more than that, and the fused one
    # leaves out what it does not know, such as soft caps: agreeing with either will do.
    own = ("sdpa", "eager") if model._supports_sdpa else ("eager",)
    difference = min(
        (ours.log_softmax(-1) - _own_logits(model, ids, name).log_softmax(-1)).abs().mean().item() for name in own
    )
    if not difference <= tolerance:
        raise ConfigError(
            f"{type(model).__name__} computes other logits than our log-probability path (by {difference:.3g}); "
            "this architecture is not supported"
        )


def _own_logits(model: PreTrainedModel, ids: torch.Tensor, attn_implementation: str) -> torch.Tensor:
    model.config._attn_implementation = attn_implementation
    try:
        return model(input_ids=ids, use_cache=False).logits.float()
    finally:
        model.config._attn_implementation = attention.NAME


@contextmanager
def _refused(sentence: str) -> Iterator[None]:
    """Turn what a model or a folder that cannot be used raises into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except UNUSABLE as error:
        raise ConfigError(f"{sentence}: {type(error).__name__}: {error}") from error
