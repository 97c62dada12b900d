"""Architectures are accepted if our paths give the logits of the original code, for any scale of the weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    DiffLlamaConfig,
    DogeConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RwkvConfig,
    SmolLM3Config,
    StableLmConfig,
    T5Config,
)

from lucidrl.errors import ConfigError
from lucidrl.models import attention
from lucidrl.models import model_checks as architecture_check
from lucidrl.models.loading import load_model, model_facts
from lucidrl.models.model_checks import check_against_own_forward

TINY = {
    "vocab_size": 102,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {
    **TINY,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}
"""Values narrower than keys."""
SUPPORTED: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": partial(LlamaConfig, **TINY),
    "qwen2": partial(Qwen2Config, **TINY),
    "qwen3": partial(Qwen3Config, **TINY, head_dim=8),
    "qwen3_moe": partial(Qwen3MoeConfig, **TINY, **EXPERTS, head_dim=8),
    "gemma2": partial(Gemma2Config, **TINY, head_dim=8, sliding_window=5),
    "gemma3": partial(Gemma3TextConfig, **TINY, head_dim=8, sliding_window=5),
    "mistral": partial(MistralConfig, **TINY, head_dim=8, sliding_window=5),
    "mixtral": partial(MixtralConfig, **TINY, num_local_experts=4),
    "gpt2": partial(GPT2Config, vocab_size=102, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "smollm3": partial(SmolLM3Config, **TINY),
    "phi3": partial(Phi3Config, **TINY),
    "olmo": partial(OlmoConfig, **TINY),
    "olmo2": partial(Olmo2Config, **TINY),
    "deepseek_v3": partial(DeepseekV3Config, **DEEPSEEK),
}
REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "biased_by_distance": (
        partial(BloomConfig, vocab_size=102, hidden_size=32, n_layer=2, n_head=4),
        "logits differ from the logits of our .* forward pass by .* of their spread",
    ),
    "linear_attention": (
        partial(Qwen3NextConfig, **TINY, **EXPERTS, head_dim=8, shared_expert_intermediate_size=16),
        "layers of type linear_attention",
    ),
    "attention_and_state_space": (
        partial(JambaConfig, **TINY, num_experts=2, attn_layer_period=2, attn_layer_offset=1),
        "layers of type linear_attention",
    ),
    "chunked_attention": (
        partial(Llama4TextConfig, **TINY, intermediate_size_mlp=48, num_local_experts=2, head_dim=8),
        "layers of type chunked_attention",
    ),
    "state_space": (
        partial(MambaConfig, vocab_size=102, hidden_size=32, num_hidden_layers=2),
        "layers of type linear_attention",
    ),
    "recurrent": (
        partial(RwkvConfig, vocab_size=102, hidden_size=32, num_hidden_layers=2),
        "a recurrent state",
    ),
    "attention_sinks": (
        partial(GptOssConfig, **TINY, head_dim=8, num_local_experts=2, num_experts_per_tok=1),
        "logits differ",
    ),
    "two_attentions": (partial(DiffLlamaConfig, **TINY), "logits differ from the logits of our decoding forward pass"),
    "makes_a_mask": (partial(DogeConfig, **TINY), "creates an attention mask"),
    "fixed_functions": (
        partial(FalconConfig, vocab_size=102, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
        "model_type='falcon' is not supported: its code allows only a fixed list of attention functions",
    ),
    "arguments_not_passed_on": (
        partial(StableLmConfig, **TINY),
        "does not pass the keyword arguments of `forward` on to the attention function",
    ),
}


def tiny(config: PreTrainedConfig, scale: float) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).eval()
    for parameter in model.parameters():
        parameter.data *= scale
    return model


@pytest.mark.parametrize("scale", [0.3, 1, 3])
@pytest.mark.parametrize("config", SUPPORTED.values(), ids=SUPPORTED)
def test_a_causal_transformer_is_accepted_at_any_scale_of_its_weights(config, scale):
    check_against_own_forward(tiny(config(), scale))


@pytest.mark.parametrize("scale", [0.3, 1, 3])
@pytest.mark.parametrize(
    ("config", "reason"),
    [case for name, case in REFUSED.items() if name != "fixed_functions"],
    ids=lambda case: "",
)
def test_other_ways_to_mix_tokens_are_refused_at_any_scale_of_the_weights(config, reason, scale):
    with pytest.raises(ConfigError, match=f"is not supported: .*{reason}.*; use a model with causal attention"):
        check_against_own_forward(tiny(config(), scale))


def test_packed_rows_and_decoding_reveal_mixing_outside_of_attention(monkeypatch):
    monkeypatch.setattr(architecture_check, "check_architecture", lambda model: None)
    for name in ("linear_attention", "state_space"):
        for scale in (1, 3):
            with pytest.raises(ConfigError, match=r"the logits of our (packed|decoding) forward pass"):
                check_against_own_forward(tiny(REFUSED[name][0](), scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_changes_neither_the_result_nor_the_weights(dtype):
    model = tiny(SUPPORTED["qwen3"](), 3).to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check_against_own_forward(model)
    assert all(
        tensor.dtype == dtype and torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()
    )
    with pytest.raises(ConfigError, match="logits differ"):
        check_against_own_forward(tiny(REFUSED["biased_by_distance"][0](), 0.3).to(dtype))


@pytest.mark.parametrize("name", ["fixed_functions", "chunked_attention", "linear_attention"])
def test_unsupported_configs_are_refused_without_weights(name, tmp_path):
    config, reason = REFUSED[name]
    config().save_pretrained(tmp_path)
    for load in (model_facts, lambda folder: load_model(folder, torch.float32)):
        with pytest.raises(ConfigError, match=reason):
            load(str(tmp_path))


def test_an_encoder_decoder_is_refused(tmp_path):
    T5Config(d_model=32, num_layers=2, num_heads=4).save_pretrained(tmp_path)
    for load in (model_facts, lambda folder: load_model(folder, torch.float32)):
        with pytest.raises(ConfigError, match=r"model_type='t5' is not a causal language model; use a decoder-only"):
            load(str(tmp_path))


class ScaledLogits(LlamaForCausalLM):
    """Scales its logits by a factor that is not in its config."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output


def test_unknown_logit_scaling_is_refused(tiny_model):
    folder = tiny_model("llama")
    check_against_own_forward(LlamaForCausalLM.from_pretrained(folder, attn_implementation="lucidrl"))
    model = ScaledLogits.from_pretrained(folder, attn_implementation="lucidrl")
    with pytest.raises(ConfigError, match=r"ScaledLogits is not supported: its logits differ .* by 0\.3\d of"):
        check_against_own_forward(model)
    assert model.config._attn_implementation == "lucidrl"


def test_cached_elements_are_counted_where_values_are_narrower_than_keys(save_model):
    facts = model_facts(save_model(SUPPORTED["deepseek_v3"]()))
    assert facts.kv_elements_per_token == 2 * 4 * (8 + 4 + 6)


@pytest.mark.parametrize(("sensitive", "is_accepted"), [(5, True), (4, False)])
def test_only_a_token_that_amplifies_rounding_errors_may_differ_more(monkeypatch, sensitive, is_accepted):
    """Token 5 of the first row differs by 1e-3 of the spread; the logits of one token react to tiny changes."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).eval()
    model.config._attn_implementation = attention.NAME
    noise_V = torch.randn(TINY["vocab_size"])
    perturbed, forward = architecture_check._perturbed_logits, architecture_check.LogprobModel.forward

    def add(logits_BTV, token, fraction):
        logits_BTV[0, token] += fraction * logits_BTV[0].std() * noise_V
        return logits_BTV

    def changed_forward(self, *args, **kwargs):
        outputs = forward(self, *args, **kwargs)
        add(outputs.logits, 5, 1e-3)
        return outputs

    monkeypatch.setattr(architecture_check, "_perturbed_logits", lambda *args: add(perturbed(*args), sensitive, 1e-2))
    monkeypatch.setattr(architecture_check.LogprobModel, "forward", changed_forward)
    if is_accepted:
        check_against_own_forward(model)
    else:
        with pytest.raises(ConfigError, match="padded forward pass"):
            check_against_own_forward(model)
