"""Weights and optimizer resume bit-exactly from a Hugging Face folder; those of another model are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from lucidrl.errors import CheckpointError, ConfigError
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker
from lucidrl.models.policy.policy import Policy

TRAINING: dict[str, Any] = {
    "optimizer": {"kwargs": {"lr": 0.01}},
    "scheduler": {"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": 0.9}},
}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "phi_head_bias"])
def test_a_resumed_worker_continues_bit_exactly(make_worker, make_rows, weights_of, tmp_path, precision, architecture):
    options = {**TRAINING, "precision": precision}
    worker = make_worker(architecture, **options)
    for seed in range(3):
        worker.train(make_rows(seed=seed), NLLLoss())
    weights, optimizer = str(tmp_path / "weights"), str(tmp_path / "optimizer")
    worker.save_checkpoint(weights, optimizer)
    resumed = make_worker(architecture, **options, weights_path=weights, optimizer_path=optimizer)
    assert same(weights_of(resumed), weights_of(worker))
    for seed in range(3, 5):
        first, second = (each.train(make_rows(seed=seed), NLLLoss()) for each in (worker, resumed))
        assert torch.equal(first["global_loss"], second["global_loss"])
        assert first["metrics"]["lr"] == second["metrics"]["lr"]
    assert same(weights_of(resumed), weights_of(worker))


def test_weights_alone_start_a_new_optimizer(make_worker, make_rows, weights_of, tmp_path):
    worker = make_worker(**TRAINING, precision="bfloat16")
    worker.train(make_rows(), NLLLoss())
    worker.save_checkpoint(str(tmp_path))
    started = make_worker(**TRAINING, precision="bfloat16", weights_path=str(tmp_path))
    assert same(weights_of(started), weights_of(worker))
    for master, parameter in zip(started.optimizer.state_dict()["masters"], started.model.parameters(), strict=True):
        assert torch.equal(master, parameter.float())
    assert started.train(make_rows(), NLLLoss())["metrics"]["lr"] == 0.01


def test_transformers_loads_what_was_saved(every_model, tokenizer, make_rows, tmp_path):
    worker = DTensorPolicyWorker(PolicyConfig(model_name=every_model, **TRAINING), tokenizer)
    worker.train(make_rows(), NLLLoss())
    worker.save_checkpoint(str(tmp_path), tokenizer_path=str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    own = worker.model.model.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in loaded.state_dict().items())
    assert loaded.config._attn_implementation != "lucidrl"
    ids = torch.tensor([[5, 6, 7]])
    assert loaded.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > 3
    assert AutoTokenizer.from_pretrained(tmp_path).decode(ids[0]) == tokenizer.decode(ids[0])
    again = DTensorPolicyWorker(PolicyConfig(model_name=str(tmp_path)), tokenizer, init_optimizer=False)
    rows = make_rows()
    assert torch.equal(again.get_logprobs(rows)["logprobs"], worker.get_logprobs(rows)["logprobs"])


def test_optimizer_and_tokenizer_are_saved_only_with_a_path(make_worker, tmp_path):
    make_worker().save_checkpoint(str(tmp_path))
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "model.safetensors"} <= names
    assert not any("tokenizer" in name or "optimizer" in name for name in names)


def test_a_policy_saves_and_loads_one_folder(tiny_model, tokenizer, make_rows, tmp_path):
    config = PolicyConfig(model_name=tiny_model("llama"), **TRAINING)
    first, second = Policy(config, tokenizer), Policy(config, tokenizer)
    result = first.train(make_rows(), NLLLoss())
    assert result.loss > 0
    assert result.metrics["lr"] == 0.01
    first.save(tmp_path)
    second.load(tmp_path)
    for policy in (first, second):
        policy.train(make_rows(seed=1), NLLLoss())
    rows = [policy.with_scores(make_rows(), previous=True, reference=False) for policy in (first, second)]
    assert torch.equal(rows[0]["prev_logprobs"], rows[1]["prev_logprobs"])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("llama_untied", r"lm_head\.weight should have shape none, found \[102, 32\]"),
        ("gpt2_learned_positions", r"model\.embed_tokens\.weight should have shape \[102, 32\], found nothing"),
        ("wider", r"model\.layers\.0\.mlp\.gate_proj\.weight should have shape \[48, 32\], found \[64, 32\]"),
        ("deeper", r"model\.layers\.2\.\S+ should have shape none"),
    ],
)
def test_weights_of_another_model_are_refused(make_worker, tiny_model, save_model, weights_of, other, message):
    changes = {"wider": {"intermediate_size": 64}, "deeper": {"num_hidden_layers": 3}}
    worker = make_worker()
    if other in changes:
        config = LlamaConfig.from_pretrained(worker.config.model_name, **changes[other])
        folder = save_model(config, seed=1)
    else:
        folder = tiny_model(other)
    before = weights_of(worker)
    with pytest.raises(CheckpointError, match=rf"was saved from another model: {message}"):
        worker.load_checkpoint(folder)
    assert same(weights_of(worker), before)


def test_a_missing_checkpoint_is_named(make_worker, tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere/model\.safetensors cannot be used: it is missing"):
        make_worker().load_checkpoint(str(tmp_path / "nowhere"))


def test_an_optimizer_state_that_does_not_fit_is_refused(make_worker, tmp_path):
    weights, optimizer = str(tmp_path / "weights"), str(tmp_path / "optimizer")
    worker = make_worker()
    worker.save_checkpoint(weights, optimizer)
    for options, message in (
        (TRAINING, "does not fit this policy's optimizer .the file has no scheduler"),
        ({"precision": "bfloat16"}, "does not fit this policy's optimizer .the file has no master weight of model"),
        (
            {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}}},
            "the file was saved with AdamW, but this policy uses SGD",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            make_worker(**options).load_checkpoint(weights, optimizer)
    other = make_worker("qwen2")
    other.save_checkpoint(str(tmp_path / "own"))
    with pytest.raises(
        CheckpointError, match=r"optimizer was saved from another model: model\.layers\.0\.self_attn\.q_proj\.bias"
    ):
        other.load_checkpoint(str(tmp_path / "own"), optimizer)
    with pytest.raises(CheckpointError, match=r"optimizer\.json: it is missing"):
        worker.load_checkpoint(weights, str(tmp_path / "nowhere"))


OPTIMIZERS = {
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "SGD": {},
    "SGD with momentum": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {},
    "Rprop": {},
    "Adafactor": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_bit_exactly(make_worker, make_rows, weights_of, tmp_path, name):
    kwargs = {"lr": 0.01, **OPTIMIZERS[name]}
    options = {"optimizer": {"name": f"torch.optim.{name.partition(' ')[0]}", "kwargs": kwargs}}
    worker = make_worker(**options)
    for seed in range(2):
        worker.train(make_rows(seed=seed), NLLLoss())
    weights, optimizer = str(tmp_path / "weights"), str(tmp_path / "optimizer")
    worker.save_checkpoint(weights, optimizer)
    resumed = make_worker(**options, weights_path=weights, optimizer_path=optimizer)
    for each in (worker, resumed):
        each.train(make_rows(seed=2), NLLLoss())
    assert same(weights_of(resumed), weights_of(worker))


def test_a_weight_that_never_had_a_gradient_has_no_state_after_loading_either(make_worker, make_rows, tmp_path):
    worker = make_worker()
    worker.train(make_rows(), NLLLoss())
    state = worker.optimizer._optimizer.state
    state.pop(next(iter(state)))
    weights, optimizer = str(tmp_path / "weights"), str(tmp_path / "optimizer")
    worker.save_checkpoint(weights, optimizer)
    loaded = make_worker(weights_path=weights, optimizer_path=optimizer)
    expected, found = (each.optimizer.state_dict()["optimizer"]["state"] for each in (worker, loaded))
    assert 0 not in expected
    assert found.keys() == expected.keys()
    assert all(same(found[index], expected[index]) for index in expected)
    loaded.train(make_rows(), NLLLoss())


def test_a_checkpoint_before_the_first_step_can_be_resumed(make_worker, make_rows, weights_of, tmp_path):
    worker = make_worker()
    worker.save_checkpoint(str(tmp_path / "weights"), str(tmp_path / "optimizer"))
    started = make_worker(weights_path=str(tmp_path / "weights"), optimizer_path=str(tmp_path / "optimizer"))
    for each in (worker, started):
        each.train(make_rows(), NLLLoss())
    assert same(weights_of(started), weights_of(worker))


def test_saving_again_replaces_only_files_of_an_earlier_save(make_worker, make_rows, weights_of, tmp_path):
    worker = make_worker()
    folder = tmp_path / "trained"
    worker.save_checkpoint(str(folder), tokenizer_path=str(folder))
    assert (folder / "tokenizer.json").exists()
    worker.train(make_rows(), NLLLoss())
    worker.save_checkpoint(str(folder))
    assert not (folder / "tokenizer.json").exists()
    assert same(weights_of(make_worker(weights_path=str(folder))), weights_of(worker))
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"trained exists and holds files that .*so it is not replaced"):
        worker.save_checkpoint(str(folder))
    with pytest.raises(CheckpointError, match=r"new/optimizer is inside \S+new; use separate folders"):
        worker.save_checkpoint(str(tmp_path / "new"), str(tmp_path / "new" / "optimizer"))
    assert [path.name for path in tmp_path.iterdir()] == ["trained"]


def test_a_save_that_was_killed_is_cleaned_up_by_the_next(make_worker, tmp_path):
    (tmp_path / ".saving-trained-xyz").mkdir()
    (tmp_path / ".saving-other-xyz").mkdir()
    make_worker().save_checkpoint(str(tmp_path / "trained"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".saving-other-xyz", "trained"]


def test_a_policy_without_an_optimizer_saves_and_loads_weights_alone(make_worker, tmp_path):
    worker = make_worker(init_optimizer=False)
    worker.save_checkpoint(str(tmp_path / "weights"))
    worker.load_checkpoint(str(tmp_path / "weights"))
    for call in (worker.save_checkpoint, worker.checkpoints.begin, worker.load_checkpoint):
        with pytest.raises(
            ConfigError, match=r"with an optimizer_path needs an optimizer, but .* init_optimizer=False"
        ):
            call(str(tmp_path / "new"), str(tmp_path / "optimizer"))
