"""A model by its folder, run, checkpoint or name on the hub."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.errors import CheckpointError, ConfigError
from lucidrl.models.loading import load_model, load_tokenizer, model_facts
from lucidrl.models.policy import PolicyConfig
from lucidrl.models.sources import model_folder, resolved_name, with_resolved_names
from tests.hub import COMMIT, served_hub, use_hub

REWARDS = {10: 0.9, 20: 0.5, 30: 0.7}


@pytest.fixture
def run(embedded_folder, tmp_path) -> Path:
    """A run with three checkpoints."""
    run = tmp_path / "run"
    manager = CheckpointManager(run / "checkpoints", keep_last=3)
    for step, reward in REWARDS.items():
        with manager.saving(step, metrics={"reward": reward}) as folder:
            shutil.copytree(embedded_folder, folder / "policy")
    (run / "config.yaml").write_text("grpo: {max_steps: 30}\n")
    return run


def weights_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step}" / "policy"


def test_a_run_stands_for_its_newest_checkpoint(run):
    assert model_folder(str(run)) == weights_of(run, 30)
    assert model_folder(f"{run}@newest") == weights_of(run, 30)
    assert resolved_name(str(run)) == str(weights_of(run, 30))


def test_the_best_checkpoint_is_the_one_that_the_settings_of_the_run_prefer(run):
    assert model_folder(f"{run}@best") == weights_of(run, 10)
    (run / "config.yaml").write_text("checkpoint: {metric: reward, mode: min}\n")
    assert model_folder(f"{run}@best") == weights_of(run, 20)
    (run / "config.yaml").write_text("checkpoint: {metric: accuracy}\n")
    with pytest.raises(CheckpointError, match=r"metric 'accuracy', so there is no best one; write .*@newest"):
        model_folder(f"{run}@best")


def test_a_checkpoint_stands_for_its_model(run):
    assert model_folder(str(run / "checkpoints/step_20")) == weights_of(run, 20)
    assert model_folder(str(weights_of(run, 20))) == weights_of(run, 20)


def test_a_folder_whose_name_has_an_at_sign_is_a_folder(embedded_folder, tmp_path):
    folder = tmp_path / "model@best"
    shutil.copytree(embedded_folder, folder)
    assert model_folder(str(folder)) == folder


def test_damage_is_found_before_a_checkpoint_is_used(run):
    weights = weights_of(run, 30) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(CheckpointError, match="does not match its SHA-256"):
        model_folder(str(run / "checkpoints/step_30"))
    assert model_folder(str(run)) == weights_of(run, 20), "the newest valid one"


def test_a_run_of_another_kind_is_refused(tmp_path):
    with CheckpointManager(tmp_path / "checkpoints").saving(1) as folder:
        (folder / "policy").mkdir()
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match="has no language model; choose a run of `lucidrl grpo` or `lucidrl sft`"):
        model_folder(str(tmp_path))


def test_model_tokenizer_and_facts_come_from_a_run(run):
    original = load_model("embedded", torch.float32)
    model = load_model(str(run), torch.float32)
    for name, weights in model.named_parameters():
        torch.testing.assert_close(weights, original.get_parameter(name), rtol=0, atol=0)
    assert load_tokenizer(str(run)).encode("1+1=") == load_tokenizer("embedded").encode("1+1=")
    assert model_facts(str(run)) == model_facts("embedded")


def test_the_settings_of_a_policy_get_names_that_stay(run):
    policy = with_resolved_names(PolicyConfig(model_name=str(run), tokenizer=f"{run}@best"))
    assert (policy.model_name, policy.tokenizer) == (str(weights_of(run, 30)), str(weights_of(run, 10)))
    assert with_resolved_names(PolicyConfig()) == PolicyConfig()
    assert with_resolved_names(policy) == policy


def test_a_model_of_the_hub_is_loaded_and_pinned(embedded_folder, monkeypatch, tmp_path):
    with served_hub() as hub:
        hub.add("models/org/tiny", embedded_folder)
        use_hub(monkeypatch, hub.url, tmp_path)
        name = with_resolved_names(PolicyConfig(model_name="hub:org/tiny")).model_name
        assert name == f"hub:org/tiny@{COMMIT}"
        assert model_facts(name) == model_facts("embedded")
        load_model(name, torch.float32)
        assert load_tokenizer(name).encode("1+1=") == load_tokenizer("embedded").encode("1+1=")


def test_a_model_in_a_folder_of_a_repository_is_found_there(embedded_folder, monkeypatch, tmp_path):
    with served_hub() as hub:
        hub.add("models/org/several", {f"small/{path.name}": path.read_bytes() for path in embedded_folder.iterdir()})
        use_hub(monkeypatch, hub.url, tmp_path)
        assert model_facts("hub:org/several@v1/small") == model_facts("embedded")
