"""Loading of models and tokenizers; test_model_files has the damaged folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config

from lucidrl.errors import ConfigError
from lucidrl.models.embedded import END, PAD, embedded_tokenizer
from lucidrl.models.loading import (
    context_length,
    load_model,
    load_tokenizer,
    model_facts,
    model_folder,
    stop_token_ids,
)
from lucidrl.models.policy import PolicyConfig


@pytest.fixture
def own_folder(tiny_model, tmp_path) -> Path:
    """A model and its tokenizer in a folder that a test may change."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), folder)
    embedded_tokenizer().save_pretrained(folder)
    return folder


def without_special_tokens(folder: Path, *names: str) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in names}))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_missing_folder_is_named():
    with pytest.raises(ConfigError, match=r"'/no/such/model': this folder does not exist; use .* embedded"):
        load_model("/no/such/model", torch.float32)


def test_a_folder_without_config_is_named(tmp_path):
    for load in (model_folder, model_facts, load_tokenizer, lambda name: load_model(name, torch.float32)):
        with pytest.raises(ConfigError, match=r"this folder has no config\.json"):
            load(str(tmp_path))


def test_a_folder_without_tokenizer_is_a_config_error(tiny_model):
    with pytest.raises(ConfigError, match=r"the tokenizer in .* cannot be loaded"):
        load_tokenizer(tiny_model("llama"))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2_learned_positions"])
def test_a_saved_tokenizer_splits_text_as_before(tiny_model, tmp_path, name):
    """For every architecture of the model in its folder."""
    shutil.copytree(tiny_model(name), tmp_path, dirs_exist_ok=True)
    own = embedded_tokenizer()
    own.save_pretrained(tmp_path)
    text = "<|user|>12+30 = ?\n  don't, é!<|assistant|>42<|end|>"
    loaded = load_tokenizer(str(tmp_path))
    assert loaded(text)["input_ids"] == own(text)["input_ids"]
    assert loaded.decode(own(text)["input_ids"]) == own.decode(own(text)["input_ids"])


def test_the_tokenizers_own_pad_token_is_kept(own_folder, caplog):
    assert load_tokenizer(str(own_folder)).pad_token == PAD
    assert not caplog.records


def test_without_pad_token_the_end_token_pads_with_a_warning(own_folder, caplog):
    without_special_tokens(own_folder, "pad_token")
    assert load_tokenizer(str(own_folder)).pad_token == END
    assert "has no pad token; padding with its end-of-sequence token '<|end|>'" in caplog.text


def test_with_neither_pad_nor_end_token_the_remedy_is_named(own_folder):
    without_special_tokens(own_folder, "pad_token", "eos_token")
    with pytest.raises(ConfigError, match=r"neither a pad nor an end-of-sequence token.*policy\.pad_token"):
        load_tokenizer(str(own_folder))
    assert load_tokenizer(str(own_folder), pad_token="#").pad_token == "#"


def test_a_configured_pad_token_wins(own_folder):
    for name in (str(own_folder), "embedded"):
        assert load_tokenizer(name, pad_token="~").pad_token == "~"


def test_a_pad_token_outside_the_vocabulary_is_refused(own_folder):
    for name in (str(own_folder), "embedded"):
        with pytest.raises(ConfigError, match=r"policy\.pad_token='<nope>' is not a token of"):
            load_tokenizer(name, pad_token="<nope>")


def test_facts_need_no_weights(every_model, tmp_path):
    loaded = load_model(every_model, torch.float32)
    shutil.copy(Path(every_model) / "config.json", tmp_path)
    facts = model_facts(str(tmp_path))
    assert facts.num_parameters == sum(parameter.numel() for parameter in loaded.parameters())
    assert facts.architecture == type(loaded).__name__
    assert (facts.hidden_size, facts.num_layers, facts.context_length) == (32, 2, 128)
    assert facts.vocabulary == len(embedded_tokenizer())


@pytest.mark.parametrize(
    ("name", "key_value_heads"), [("llama", 2), ("gemma2_sliding_capped", 2), ("gpt2_learned_positions", 4)]
)
def test_cache_size_counts_key_and_value_of_every_layer(tiny_model, name, key_value_heads):
    assert model_facts(tiny_model(name)).kv_elements_per_token == 2 * key_value_heads * 8 * 2


def test_facts_of_the_embedded_model_match_the_model():
    model = load_model("embedded-untrained", torch.float32)
    assert model_facts("embedded").num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_model_is_loaded_in_the_given_precision_and_in_evaluation_mode(tiny_model, dtype):
    model = load_model(tiny_model("llama"), dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not model.training


def test_code_in_the_model_folder_is_not_run_unless_trusted(own_folder):
    ran = own_folder / "ran"
    (own_folder / "own_code.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(ran)!r}).touch()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    change_config(
        own_folder,
        model_type="own",
        auto_map={"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"},
    )
    assert PolicyConfig().trust_remote_code is False
    for load in (model_facts, lambda name: load_model(name, torch.float32)):
        with pytest.raises(ConfigError, match="trust_remote_code"):
            load(str(own_folder))
    assert not ran.exists()


def test_stop_tokens_are_those_of_model_and_tokenizer(tiny_model, tokenizer):
    model = load_model(tiny_model("llama"), torch.float32)
    assert stop_token_ids(model, tokenizer) == {1}
    model.generation_config.eos_token_id = [5, 9]
    assert stop_token_ids(model, tokenizer) == {1, 5, 9}
    model.generation_config.eos_token_id = None
    assert stop_token_ids(model, tokenizer) == {1}


def test_a_model_without_a_causal_head_is_refused(own_folder):
    change_config(own_folder, model_type="vit")
    for load in (model_facts, lambda name: load_model(name, torch.float32)):
        with pytest.raises(ConfigError, match="model_type='vit' is not a causal language model"):
            load(str(own_folder))


def test_loading_does_not_change_weights(tiny_model):
    folder = tiny_model("qwen3")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    ours = load_model(folder, torch.float32).state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_rotary_embeddings_that_depend_on_the_batch_are_limited_to_their_original_context():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=1,
        intermediate_size=32,
        vocab_size=64,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        rope_parameters=rope,
        pad_token_id=0,
    )
    assert context_length(config) == 32


def test_a_hostile_chat_template_is_refused_at_load(own_folder):
    (own_folder / "chat_template.jinja").write_text("{{ 'x' * 10 ** 10 }}")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja needs more than 512 MB"):
        load_tokenizer(str(own_folder))
