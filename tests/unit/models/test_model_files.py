"""A damaged or incomplete model folder is refused with an error that names the problem."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.errors import CheckpointError, ConfigError
from lucidrl.models.loading import empty_model, load_model, model_facts


@pytest.fixture
def folder(tiny_model, tmp_path) -> Path:
    """A copy of a model folder that a test may damage."""
    shutil.copytree(tiny_model("llama_untied"), tmp_path / "model")
    return tmp_path / "model"


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, removed: tuple[str, ...] = (), **changed: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if name not in removed}
    save_file(kept | changed, path, metadata={"format": "pt"})


def load(folder: Path) -> Any:
    return load_model(str(folder), torch.float32)


def test_missing_unexpected_and_wrongly_shaped_tensors_are_named(folder):
    change_weights(
        folder,
        removed=("model.layers.1.mlp.up_proj.weight",),
        **{"model.layers.7.extra": torch.zeros(2), "model.norm.weight": torch.ones(31)},
    )
    with pytest.raises(ConfigError) as refusal:
        load(folder)
    assert str(refusal.value) == (
        f"the weights in {folder} do not match its config.json: missing: model.layers.1.mlp.up_proj.weight; "
        "unexpected: model.layers.7.extra; wrongly shaped: model.norm.weight (file [31], model [32]); restore the "
        "files of the model"
    )


def test_each_kind_of_mismatch_is_refused(folder):
    original = (folder / "model.safetensors").read_bytes()
    for removed, changed in (
        (("lm_head.weight",), {}),
        ((), {"extra": torch.zeros(2)}),
        ((), {"model.norm.weight": torch.ones(31)}),
    ):
        change_weights(folder, removed, **changed)
        with pytest.raises(ConfigError, match="do not match"):
            load(folder)
        (folder / "model.safetensors").write_bytes(original)
    load(folder)


def test_a_long_list_of_tensors_is_shortened(folder):
    names = tuple(name for name in load_file(folder / "model.safetensors") if name.startswith("model.layers.1."))
    change_weights(folder, names)
    with pytest.raises(ConfigError, match=r"missing: model\.layers\.1\.input_layernorm\.weight, .* and 4 more;"):
        load(folder)


def test_a_tied_head_may_be_stored_or_not_and_old_buffers_are_ignored(tiny_model, tmp_path):
    folder = tmp_path / "tied"
    shutil.copytree(tiny_model("llama"), folder)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    load(folder)
    change_weights(
        folder, **{"lm_head.weight": embedding.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    )
    load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(folder, value):
    name = "model.layers.0.mlp.down_proj.weight"
    weights = load_file(folder / "model.safetensors")[name]
    weights[3, 5] = value
    change_weights(folder, **{name: weights})
    with pytest.raises(ConfigError, match=f"are NaN or infinite in {name}; restore"):
        load(folder)


def test_pickled_weights_are_refused_with_the_command_that_converts_them(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin, a pickle, .*; convert it with: python -c") as refusal:
        load(folder)
    command = str(refusal.value).partition('python -c "')[2].removesuffix('"')
    exec(command, {})
    load(folder)


def test_missing_or_truncated_weights_are_named(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a readable safetensors file"):
        load(folder)
    weights.unlink()
    with pytest.raises(ConfigError, match=r"has no weights; use a folder with model\.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": 10**12}, "hidden_size=1000000000000 is not an integer from 0 to"),
        ({"vocab_size": 10**30}, "vocab_size=1000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is not an integer"),
        ({"num_hidden_layers": -2}, "num_hidden_layers=-2 is not an integer"),
        ({"hidden_size": "wide"}, "hidden_size='wide' is not an integer"),
        ({"num_attention_heads": 4.5}, r"num_attention_heads=4\.5 is not an integer"),
        ({"num_attention_heads": 0}, "cannot be"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "cannot be"),
        ({"rope_parameters": "none"}, "cannot be"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings='long' is not an integer"),
        ({"hidden_act": "no-such-function"}, "cannot be"),
        ({"model_type": "no-such-model"}, "cannot be"),
        ({"model_type": 7}, "cannot be"),
        ({"max_position_embeddings": -5}, "max_position_embeddings=-5 is not an integer"),
        ({"pad_token_id": 10**9}, "cannot be"),
    ],
    ids=str,
)
def test_a_config_with_absurd_values_is_refused(folder, changes, complaint):
    change_config(folder, **changes)
    for read in (load, lambda path: model_facts(str(path)), lambda path: empty_model(str(path), torch.float32)):
        with pytest.raises(ConfigError, match=complaint):
            read(folder)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000], ids=["cut", "list", "bytes", "deep"])
def test_a_config_that_is_not_a_json_object_is_refused(folder, content):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json (is not readable JSON|holds a list)"):
        load(folder)


@pytest.mark.slow
def test_a_config_of_a_larger_model_is_refused_before_anything_is_allocated(folder):
    change_config(folder, num_hidden_layers=1000, intermediate_size=2**20)
    with pytest.raises(ConfigError, match=r"a model of [\d,]{15,} parameters, but the safetensors files have"):
        load(folder)


def test_a_changed_bit_in_the_policy_folder_of_a_checkpoint_is_found(folder, tmp_path):
    manager = CheckpointManager(tmp_path / "checkpoints")
    with manager.saving(3) as saved:
        shutil.copytree(folder, saved / "policy")
    policy = tmp_path / "checkpoints" / "step_3" / "policy"
    load(policy)
    content = bytearray((policy / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (policy / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"policy/model\.safetensors: its content does not match its SHA-256"):
        load(policy)


def test_an_unrelated_manifest_next_to_a_model_folder_is_ignored(folder):
    (folder.parent / "manifest.json").write_text("not ours")
    load(folder)
