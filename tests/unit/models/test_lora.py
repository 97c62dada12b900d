"""LoRA layers: outputs and gradients equal PEFT's, targets are chosen as PEFT chooses them."""

from __future__ import annotations

import copy
import re
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from lucidrl.errors import ConfigError
from lucidrl.models.loading import load_model
from lucidrl.models.lora import (
    adapted_layers,
    adapters_at,
    add_adapters,
    merge_adapters,
    merged_in_forward,
    target_names,
)
from lucidrl.models.policy.config import ALL_LINEAR, LoraConfig
from tests.tiers import slow_except

TARGETS = {
    "all": ALL_LINEAR,
    "attention": ("q_proj", "v_proj"),
    "one_layer": ("layers.1.mlp.down_proj", "o_proj"),
}
IDS = torch.arange(2, 32).view(3, 10)


def plain(folder: str, dtype: torch.dtype = torch.float64) -> Any:
    """The model with an attention function that takes whole rows."""
    model = load_model(folder, dtype)
    model.config._attn_implementation = "eager"
    return model


def with_adapters(folder: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """A model whose adapters change its output."""
    model = plain(folder, dtype)
    add_adapters(model, LoraConfig(**settings), seed=3)
    generator = torch.Generator().manual_seed(5)
    for layer in adapted_layers(model).values():
        layer.lora_B.data.copy_(0.3 * torch.randn(layer.lora_B.shape, generator=generator))
    return model


def as_peft(model: Any, folder: str, **settings: Any) -> Any:
    """PEFT's model with the same weights and adapters."""
    targets = settings["target_modules"]
    config = peft.LoraConfig(
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=settings.get("dropout", 0.0),
        task_type="CAUSAL_LM",
    )
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    theirs = peft.get_peft_model(base, config, autocast_adapter_dtype=False).eval()
    ours = {
        f"base_model.model.{name}.default.weight": parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    trained = {name: parameter for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    assert trained.keys() == ours.keys()
    for name, parameter in trained.items():
        parameter.data.copy_(ours[name])
    return theirs


def loss_of(model: Any) -> torch.Tensor:
    logits = model(input_ids=IDS, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("architecture", slow_except(["qwen2", "llama", "phi_head_bias"], "qwen2"))
def test_loss_and_gradients_equal_those_of_peft(tiny_model, architecture, targets):
    if architecture == "phi_head_bias" and targets == "one_layer":
        pytest.skip("Phi names its layers differently")
    settings = {"rank": 4, "alpha": 10.0, "target_modules": TARGETS[targets]}
    folder = tiny_model(architecture)
    ours = with_adapters(folder, **settings)
    theirs = as_peft(ours, folder, **settings)
    losses = loss_of(ours), loss_of(theirs)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=0, atol=1e-10)
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(
                parameter.grad, expected[f"base_model.model.{name}.default.weight"], rtol=0, atol=1e-10
            )
        else:
            assert parameter.grad is None


def test_new_adapters_change_nothing_and_depend_on_the_seed_alone(tiny_model):
    model = plain(tiny_model("llama"), torch.float32)
    names = [name for name, _ in model.named_parameters()]
    before = model(input_ids=IDS).logits
    other = copy.deepcopy(model)
    state = torch.get_rng_state()
    add_adapters(model, LoraConfig(), seed=1)
    add_adapters(other, LoraConfig(target_modules=("up_proj",)), seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model(input_ids=IDS).logits, before)
    own, others = adapted_layers(model), adapted_layers(other)
    assert torch.equal(own["model.layers.0.mlp.up_proj"].lora_A, others["model.layers.0.mlp.up_proj"].lora_A)
    assert not torch.equal(own["model.layers.0.mlp.up_proj"].lora_A, own["model.layers.1.mlp.up_proj"].lora_A)
    assert [name for name, weight in model.named_parameters() if not weight.requires_grad] == names


def test_without_adapters_it_is_the_base_and_strength_scales_them(tiny_model):
    base = plain(tiny_model("llama"))
    model = with_adapters(tiny_model("llama"), rank=2, alpha=3.0)
    twice = with_adapters(tiny_model("llama"), rank=2, alpha=6.0)
    with adapters_at(model, 0):
        assert torch.equal(model(input_ids=IDS).logits, base(input_ids=IDS).logits)
        with adapters_at(model, 2):
            torch.testing.assert_close(model(input_ids=IDS).logits, twice(input_ids=IDS).logits)
    assert not torch.allclose(model(input_ids=IDS).logits, base(input_ids=IDS).logits)


def test_a_merged_model_is_a_plain_model_with_the_same_output(tiny_model):
    names = [name for name, _ in load_model(tiny_model("llama"), torch.float64).named_parameters()]
    model = with_adapters(tiny_model("llama"), rank=2)
    expected = model(input_ids=IDS).logits
    with merged_in_forward(model):
        in_forward = model(input_ids=IDS).logits
    merge_adapters(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert not adapted_layers(model)
    assert torch.equal(model(input_ids=IDS).logits, in_forward)
    torch.testing.assert_close(in_forward, expected)


def test_dropout_acts_only_where_gradients_are_computed(tiny_model):
    model = with_adapters(tiny_model("llama"), dropout=0.5)
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, model(input_ids=IDS).logits)
    torch.manual_seed(0)
    first = model(input_ids=IDS).logits
    assert not torch.equal(model(input_ids=IDS).logits, first)
    torch.manual_seed(0)
    assert torch.equal(model(input_ids=IDS).logits, first)


def test_dropout_equals_that_of_peft(tiny_model):
    settings = {"rank": 4, "alpha": 10.0, "target_modules": ("q_proj", "v_proj"), "dropout": 0.3}
    ours = with_adapters(tiny_model("llama"), **settings)
    theirs = as_peft(ours, tiny_model("llama"), **settings).train()
    losses = []
    for model in (ours, theirs):
        torch.manual_seed(0)
        losses.append(loss_of(model))
    torch.testing.assert_close(*losses, rtol=0, atol=1e-10)


def test_adapters_of_all_layers_at_rank_8_are_less_than_2_percent_of_smollm2():
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    add_adapters(model, LoraConfig(rank=8))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained == 2_442_240
    assert trained / total < 0.02


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("q_prj", "'q_prj' matches no module of LlamaForCausalLM; did you mean q_proj"),
        ("query", "'query' matches no module of LlamaForCausalLM; choose all-linear or some of q_proj, k_proj"),
        ("lm_head", "lm_head is the language model's head"),
        ("self_attn", "model.layers.0.self_attn is a LlamaAttention, but only an nn.Linear can have an adapter"),
        ("embed_tokens", "model.embed_tokens is a Embedding, but only an nn.Linear"),
    ],
)
def test_targets_that_cannot_have_an_adapter_are_refused(tiny_model, target, message):
    with pytest.raises(ConfigError, match=r"policy\.lora\.target_modules: ") as caught:
        target_names(load_model(tiny_model("llama_untied"), torch.float32), (target,))
    assert message in str(caught.value)


def test_a_model_without_linear_layers_is_refused(tiny_model):
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel has no nn\.Linear that an adapter can be added to"):
        add_adapters(load_model(tiny_model("gpt2_learned_positions"), torch.float32), LoraConfig())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"rank": 0}, "0 is not a rank; set a positive integer such as 8"),
        ({"rank": -4}, "-4 is not a rank"),
        ({"alpha": 0}, "0.0 is not a scale; set a positive number"),
        ({"dropout": 1.0}, "1.0 is not a dropout probability; set a number from 0 to below 1"),
        ({"target_modules": ""}, "no layers are named; set all-linear"),
    ],
)
def test_settings_that_make_no_adapter_are_refused(setting, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LoraConfig(**setting)
