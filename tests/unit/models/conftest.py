"""Tiny random models of many architectures in temporary folders, and batches of rows of very different lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.models.embedded import embedded_tokenizer

VOCABULARY = len(embedded_tokenizer())
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Wide enough for distributions that are far from flat, so that a wrong scale or cap is seen.
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": partial(LlamaConfig, **TINY, tie_word_embeddings=True),
    "llama_untied": partial(LlamaConfig, **TINY, tie_word_embeddings=False),
    "qwen2": partial(Qwen2Config, **TINY),
    "qwen3": partial(Qwen3Config, **TINY, head_dim=8),
    "mistral_sliding": partial(MistralConfig, **TINY, head_dim=8, sliding_window=5),
    "gemma2_sliding_capped": partial(
        Gemma2Config,
        **TINY,
        head_dim=8,
        sliding_window=5,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
    ),
    "phi_head_bias": partial(PhiConfig, **TINY),
    "granite_scaled": partial(
        GraniteConfig, **TINY, logits_scaling=3.0, embedding_multiplier=2.0, attention_multiplier=0.3
    ),
    "cohere_scaled": partial(CohereConfig, **TINY, logit_scale=0.25),
    "deepseek_narrow_values": partial(
        DeepseekV3Config,
        **TINY | {"num_key_value_heads": 4},
        first_k_dense_replace=2,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
    ),
    "gpt2_learned_positions": partial(
        GPT2Config,
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    ),
}
LENGTHS = (7, 1, 5, 12, 3, 9, 2, 12)


@pytest.fixture(scope="session")
def save_model(tmp_path_factory) -> Callable[..., str]:
    """Writes a model of a config with random weights, head bias included, to a new folder."""

    def save(config: PreTrainedConfig, seed: int = 0) -> str:
        folder = str(tmp_path_factory.mktemp("model"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config)
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def tiny_model(save_model) -> Callable[[str], str]:
    """The folder of the tiny model of an architecture; made once, not to be changed."""
    return cache(lambda name: save_model(ARCHITECTURES[name]()))


@pytest.fixture(params=ARCHITECTURES)
def every_model(request, tiny_model) -> str:
    """The folder of each architecture in turn."""
    return tiny_model(request.param)


@pytest.fixture
def tokenizer():
    return embedded_tokenizer()


@pytest.fixture
def make_rows() -> Callable[..., BatchedDataDict[Any]]:
    """Random rows, one of them of a single token, padded beyond the longest row.

    Padding holds random tokens: no result may depend on them.
    """

    def make(lengths: tuple[int, ...] = LENGTHS, seed: int = 0, width: int = 16) -> BatchedDataDict[Any]:
        generator = torch.Generator().manual_seed(seed)
        lengths_B = torch.tensor(lengths)
        position_T = torch.arange(width)
        completion_BT = (position_T >= lengths_B[:, None] // 3) & (position_T < lengths_B[:, None])
        return BatchedDataDict(
            {
                "input_ids": torch.randint(2, VOCABULARY, (len(lengths), width), generator=generator),
                "input_lengths": lengths_B,
                "token_mask": completion_BT.long(),
                "sample_mask": torch.ones(len(lengths)),
            }
        )

    return make
