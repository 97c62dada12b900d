"""A model on ranks is the one that a single rank loads, with its tensors where they are computed with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BioGptConfig

from lucidrl.distributed import process_group
from lucidrl.errors import ConfigError
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.loading import checkpoint_activations, decoder_layers, empty_model, load_model, stop_token_ids
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker, offload_policy
from lucidrl.models.policy.policy import worker_class_of
from lucidrl.models.policy.sharding import give_memory


@pytest.fixture
def many_ends(tiny_model, tmp_path) -> str:
    """The folder of a model whose generation config names more ends than its config."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5, 7]}))
    return str(folder)


def start_and_save(model: str, folder: Path) -> frozenset[int]:
    """The tokens at which a worker stops; what it saves is to name them too."""
    worker = DTensorPolicyWorker(PolicyConfig(model_name=model), embedded_tokenizer(), init_optimizer=False)
    worker.save_checkpoint(str(folder))
    return stop_token_ids(worker.model.model, worker.tokenizer)


def test_ranks_stop_at_every_end_that_the_model_names_and_save_them_all(two_ranks, many_ends, tmp_path):
    one = start_and_save(many_ends, tmp_path / "one")
    assert one >= {1, 5, 7}
    assert two_ranks(start_and_save, many_ends, tmp_path / "two") == [one, one]
    for saved in ("one", "two"):
        assert json.loads((tmp_path / saved / "generation_config.json").read_text())["eos_token_id"] == [1, 5, 7]


def test_an_empty_model_generates_as_the_loaded_one(many_ends):
    loaded, empty = load_model(many_ends, torch.float32), empty_model(many_ends, torch.float32)
    assert empty.generation_config.to_dict() == loaded.generation_config.to_dict()


def test_a_generation_config_that_cannot_be_read_is_a_sentence(many_ends):
    Path(many_ends, "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"the model .* cannot be read: .*generation_config\.json"):
        empty_model(many_ends, torch.float32)


def test_buffers_are_on_the_device_while_weights_wait_in_host_memory(tiny_model):
    model = empty_model(tiny_model("llama"), torch.float32)
    # A device that is not the host's, as far as this needs one.
    give_memory(model, torch.device("cpu"), torch.device("meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}


@pytest.mark.parametrize(("device", "is_pinned"), [("cuda", True), ("cpu", False)])
def test_what_waits_for_a_gpu_is_in_pinned_memory(device, is_pinned):
    assert offload_policy(torch.device(device)).pin_memory is is_pinned


def start_with_a_group_for_gpus_alone(enabled: bool) -> str:
    config = PolicyConfig(dtensor_cfg={"enabled": enabled, "cpu_offload": True})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group.dist, "get_backend_config", lambda: "cuda:nccl")
        with pytest.raises(ConfigError) as refused:
            worker_class_of(config)(config, embedded_tokenizer())
    return str(refused.value)


@pytest.mark.parametrize("enabled", [True, False], ids=["fsdp2", "fsdp1"])
def test_offloading_needs_a_group_for_cpu_tensors(two_ranks, enabled):
    for sentence in two_ranks(start_with_a_group_for_gpus_alone, enabled):
        assert sentence.startswith("policy.dtensor_cfg.cpu_offload=true exchanges tensors in host memory, but")


def test_checkpointed_layers_keep_no_state_of_random_numbers(monkeypatch, make_worker, make_rows):
    def refuse() -> Any:
        raise AssertionError("dropout is off; there is nothing to draw again")

    worker = make_worker(dtensor_cfg={"activation_checkpointing": True})
    monkeypatch.setattr(torch, "get_rng_state", refuse)
    assert worker.train(make_rows(), NLLLoss())["global_loss"].isfinite().all()


def test_a_model_that_names_no_layers_is_neither_sharded_nor_checkpointed():
    config = BioGptConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for use in (decoder_layers, checkpoint_activations):
        with pytest.raises(
            ConfigError, match=r"BioGptForCausalLM does not name its layers .* set cluster\.num_workers=1 and"
        ):
            use(model)
