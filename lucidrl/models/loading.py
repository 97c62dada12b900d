"""Loads models and tokenizers from a Hugging Face folder, or the embedded model and tokenizer."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import GENERATION_CONFIG_NAME

from lucidrl.checkpoint.manager import verify_part
from lucidrl.data.chat_template import check_chat_template
from lucidrl.errors import ConfigError
from lucidrl.models import attention, embedded
from lucidrl.models.adapter_folder import base_name, is_adapter, load_adapter
from lucidrl.models.lora import merge_adapters
from lucidrl.models.model_checks import (
    as_config_error,
    check_against_own_forward,
    check_architecture,
    check_config_file,
    check_finite,
    check_weight_files,
    describe_mismatch,
)
from lucidrl.models.policy.config import EMBEDDED_MODELS, PolicyConfig, Precision
from lucidrl.models.sources import model_folder

logger = logging.getLogger(__name__)

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in get_args(Precision)}


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model that can be read without its weights."""

    architecture: str
    num_parameters: int
    context_length: int
    vocabulary: int
    hidden_size: int
    num_layers: int
    kv_elements_per_token: int
    """Elements of the key-value cache per token, over all layers."""


def load_tokenizer(
    model_name: str, pad_token: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model and make sure that it has a pad token.

    The pad token is `pad_token`, else the tokenizer's pad token, else its end-of-sequence token. Any token is safe:
    `input_lengths`, not pad ids, mark the end of a row.
    """
    tokenizer: Any = _own_tokenizer(model_name, trust_remote_code)
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise ConfigError(
                f"policy.pad_token={pad_token!r} is not a token of {model_name}; choose a token of its vocabulary"
            )
        tokenizer.pad_token = pad_token
    elif tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigError(
                f"the tokenizer in {model_name} has neither a pad nor an end-of-sequence token; "
                "set policy.pad_token to one of its tokens"
            )
        logger.warning(
            "the tokenizer in %s has no pad token; padding with its end-of-sequence token %r",
            model_name,
            tokenizer.eos_token,
        )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def policy_tokenizer(config: PolicyConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer that a policy's config names."""
    return load_tokenizer(config.tokenizer or config.model_name, config.pad_token, config.trust_remote_code)


def _own_tokenizer(model_name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    if model_name in EMBEDDED_MODELS:
        return embedded.embedded_tokenizer()
    folder = model_folder(model_name)
    if is_adapter(folder) and not (folder / TOKENIZER_CONFIG_FILE).is_file():
        return _own_tokenizer(base_name(folder), trust_remote_code)
    with as_config_error(f"the tokenizer in {folder} cannot be loaded"):
        if get_tokenizer_config(folder, local_files_only=True).get("tokenizer_class") == "TokenizersBackend":
            # AutoTokenizer may choose another pre-tokenizer by model type; tokenizer.json alone is complete.
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
        check_chat_template(tokenizer, folder)
    return tokenizer


def load_model(
    model_name: str, dtype: torch.dtype, *, seed: int = 0, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a causal language model with our attention function; an adapter is merged into its base.

    Raises:
        ConfigError: the model cannot be loaded, or its logits differ from those of its original code.
    """
    if model_name in EMBEDDED_MODELS:
        warm = model_name == EMBEDDED_MODELS[0]
        model: Any = embedded.embedded_model(warm=warm, seed=seed, attn_implementation=attention.NAME)
        model = model.to(dtype)
    elif is_adapter(folder := model_folder(model_name)):
        model = load_with_adapter(folder, dtype, trust_remote_code=trust_remote_code)
        merge_adapters(model)
        return model
    else:
        model = _load_folder(folder, dtype, trust_remote_code)
    model.eval()
    check_against_own_forward(model)
    return model


def load_with_adapter(
    folder: Path, dtype: torch.dtype, *, base: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load the base of an adapter with the adapter, not merged.

    Args:
        base: name of the base, if it is no longer where the folder says.
    """

    def load_base(name: str, seed: int) -> PreTrainedModel:
        return load_model(name, dtype, seed=seed, trust_remote_code=trust_remote_code)

    model: PreTrainedModel = load_adapter(folder, load_base, dtype, base)
    return model.eval()


def _load_folder(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    verify_part(folder)
    config = model_config(str(folder), trust_remote_code)
    if is_reward_model(config):
        raise ConfigError(
            f"{folder} is a reward model, which scores rows and has no head for tokens; choose a language model, or "
            f"score completions with reward=model:{folder}"
        )
    empty = _meta_model(config, dtype, trust_remote_code)
    check_architecture(empty)
    check_weight_files(folder, empty)
    return weights_of(folder, AutoModelForCausalLM, config, dtype, trust_remote_code)


def weights_of(folder: Path, loader: Any, config: Any, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Load the model of a folder with its weights.

    Args:
        loader: an `AutoModel` class of transformers.

    Raises:
        ConfigError: a tensor is missing, unexpected, of another shape or not finite.
    """
    with as_config_error(f"the model in {folder} cannot be loaded"):
        model, found = loader.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attention.NAME,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, with missing tensors
            output_loading_info=True,
        )
    if mismatch := describe_mismatch(found):
        raise ConfigError(
            f"the weights in {folder} do not match its config.json: {mismatch}; restore the files of the model"
        )
    check_finite(model, folder)
    loaded: PreTrainedModel = model
    return loaded


def empty_model(model_name: str, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the model of `load_model` on the meta device; read only its config files."""
    with as_config_error(f"the model {model_name} cannot be read"):
        model = _meta_model(model_config(model_name, trust_remote_code), dtype, trust_remote_code)
        if model_name not in EMBEDDED_MODELS:
            folder = model_folder(model_name)
            if (folder / GENERATION_CONFIG_NAME).is_file():  # this file may name more stop tokens
                model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.eval()


def model_facts(model_name: str, trust_remote_code: bool = False) -> ModelFacts:
    """Read the facts about a model from its config.json.

    Raises:
        ConfigError: `load_model` would refuse the model for a reason that its config.json shows.
    """
    config = model_config(model_name, trust_remote_code)
    model = _meta_model(config, torch.float32, trust_remote_code)
    check_architecture(model)
    text = config.get_text_config()
    return ModelFacts(
        architecture=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        context_length=context_length(config),
        vocabulary=text.vocab_size,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        kv_elements_per_token=_kv_elements_per_token(text),
    )


def _kv_elements_per_token(text: Any) -> int:
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if getattr(text, "v_head_dim", None):  # keys consist of two parts, and values have another size
        size = text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim
    else:
        size = 2 * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return heads * size * text.num_hidden_layers


def model_config(model_name: str, trust_remote_code: bool) -> Any:
    """Read the config of a causal language model.

    Raises:
        ConfigError: config.json is unreadable, has absurd sizes, or describes another kind of model.
    """
    if model_name in EMBEDDED_MODELS:
        return embedded.embedded_config()
    folder = model_folder(model_name)
    if is_adapter(folder) and not (folder / "config.json").is_file():
        return model_config(base_name(folder), trust_remote_code)
    check_config_file(folder / "config.json")
    with as_config_error(f"{folder / 'config.json'} cannot be used"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    own_code = getattr(config, "auto_map", None) or {}
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in own_code:
        raise ConfigError(
            f"{folder / 'config.json'}: model_type={config.model_type!r} is not a causal language model; use a "
            "decoder-only model such as Llama, Qwen3 or Gemma"
        )
    return config


def is_reward_model(config: Any) -> bool:
    """Whether a config describes a model with a score head."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def _meta_model(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Create the model on the meta device."""
    kind = f"model_type={config.model_type!r}"
    with as_config_error(f"a model of {kind} cannot be built from its config.json"), torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention.NAME, trust_remote_code=trust_remote_code
            )
        except KeyError as error:
            if error.args != (attention.NAME,):
                raise
            raise ConfigError(
                f"{kind} is not supported: its code allows only a fixed list of attention functions; "
                "use a model such as Llama, Qwen3 or Gemma (docs/models.md)"
            ) from error


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers of a model, the modules whose classes `_no_split_modules` names.

    Raises:
        ConfigError: the model names none; without layers, sharding and activation checkpointing would save no memory.
    """
    kinds = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} does not name its layers (_no_split_modules), which several ranks and activation "
            "checkpointing need; set cluster.num_workers=1 and policy.dtensor_cfg.activation_checkpointing=false, or "
            "use another model"
        )
    return layers


def checkpoint_activations(model: PreTrainedModel, *, draws: bool = False) -> None:
    """Make every decoder layer recompute its activations in the backward pass; call this before sharding.

    Args:
        draws: whether layers draw random numbers, which the recomputation must repeat: those of adapters with dropout.
    """
    for layer in decoder_layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=draws)


def context_length(config: Any) -> int:
    """Return the maximum number of tokens per row; 2**31 - 1 if the config sets no maximum.

    Some rotary embeddings change with the longest row of a call beyond a certain length, so log-probabilities would
    depend on the batch. Models with such embeddings are limited to that length.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or 2**31 - 1
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        key = "original_max_position_embeddings"
        return min(limit, rope.get(key) or getattr(text, key, None) or limit)
    return limit


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of all end tokens that the model or its tokenizer declares."""
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = declared if isinstance(declared, list) else [declared]
    return frozenset(int(token) for token in [*ids, tokenizer.eos_token_id] if token is not None)
