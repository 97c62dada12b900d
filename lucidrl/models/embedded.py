"""The embedded model: a tiny chat model with a character tokenizer, built in code.

`policy.model_name=embedded` loads `embedded.safetensors`, made by `lucidrl sft --preset embedded-warm-start`;
`policy.model_name=embedded-untrained` has random weights.
"""

from __future__ import annotations

import string
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

WARM_START = Path(__file__).with_name("embedded.safetensors")

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def embedded_config() -> LlamaConfig:
    """Return the config of a model with about 0.8 million parameters."""
    tokens = embedded_tokenizer()
    return LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokens.pad_token_id,
        eos_token_id=tokens.eos_token_id,
        bos_token_id=None,
    )


def embedded_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, pad, end-of-turn and role tokens, and a chat template."""
    specials = [PAD, END, UNKNOWN, *ROLES]
    vocabulary = {token: number for number, token in enumerate([*specials, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        extra_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def embedded_model(*, warm: bool, seed: int, attn_implementation: str) -> PreTrainedModel:
    """Return the model in float32. Random weights depend on `seed` only; the global random state does not change."""
    config = embedded_config()
    config._attn_implementation = attn_implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    if warm:
        found = model.load_state_dict(load_file(WARM_START), strict=False)
        # The file has no head: the head is tied to the embedding.
        assert found.missing_keys == ["lm_head.weight"], found
        assert not found.unexpected_keys, found
        model.tie_weights()
    return model
