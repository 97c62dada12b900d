"""Runs with policy.lora, from the check to a merged model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lucidrl.errors import ConfigError
from lucidrl.models.loading import load_model
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.recipes.configs import GRPORunConfig
from lucidrl.recipes.preflight import preflight
from lucidrl.utils.config import load_config

SMALL = [
    "env.kwargs={operations: ['+'], max_operand: 9}",
    "collector={prompts_per_step: 4, samples_per_prompt: 4}",
    "validation.num_prompts=8",
    "tracking.tensorboard=false",
    "report.enabled=false",
]
LORA = ["policy.lora.rank=4", "policy.lora.dropout=0.1", "lr=0.01", "grpo.loss.kl_coefficient=0.01"]


def settings(tmp_path: Path, *overrides: str) -> GRPORunConfig:
    small = {"run": {"root": str(tmp_path / "runs")}, "env": {"name": "arithmetic", "kwargs": {"max_operand": 9}}}
    return load_config(GRPORunConfig, small, overrides=overrides)


def test_the_check_counts_what_is_trained(tmp_path):
    full = preflight(settings(tmp_path, "grpo.loss.kl_coefficient=0.1"))
    adapted = preflight(settings(tmp_path, "policy.lora.rank=8", "grpo.loss.kl_coefficient=0.1"))
    assert full.num_trained is None
    # Four layers, each with four matrices of 128 x 128 and three of 128 x 352.
    assert adapted.num_trained == 4 * 8 * (4 * 256 + 3 * 480)
    share = adapted.num_trained / full.facts.num_parameters
    for what in ("gradients", "optimizer (AdamW)"):
        assert adapted.memory_gib[what] == pytest.approx(share * full.memory_gib[what])
    assert "reference weights" in full.memory_gib
    assert "reference weights" not in adapted.memory_gib
    assert float(adapted.checkpoint.split()[0]) < 0.12 * float(full.checkpoint.split()[0])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.lora.rank=0", "policy.lora.rank: 0 is not a rank; set a positive integer such as 8"),
        ("policy.lora.target_modules=[q_prj]", "'q_prj' matches no module of LlamaForCausalLM; did you mean q_proj?"),
        ("policy.lora.ranks=3", "unknown key policy.lora.ranks; did you mean policy.lora.rank?"),
        ("policy.lora.target_modules=lm_head", "lm_head is the language model's head"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_run(tmp_path, override, message):
    with pytest.raises(ConfigError) as caught:
        preflight(settings(tmp_path, "policy.lora.alpha=16", override))
    assert message in str(caught.value)


def test_null_turns_adapters_off():
    assert PolicyConfig(lora=None).lora is None
    assert PolicyConfig(lora={}).lora is not None


@pytest.mark.slow
def test_a_run_resumes_generates_evaluates_and_merges(lucidrl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, errors = lucidrl("grpo", "run.name=first", "grpo.max_steps=2", *LORA, *SMALL)
    assert code == 0, errors
    code, _, errors = lucidrl("grpo", "--resume", "runs/first", "grpo.max_steps=3")
    assert code == 0, errors
    code, _, errors = lucidrl("grpo", "run.name=whole", "grpo.max_steps=3", *LORA, *SMALL)
    assert code == 0, errors
    file = "checkpoints/step_3/policy/adapter_model.safetensors"
    resumed, whole = (load_file(Path("runs", name, file)) for name in ("first", "whole"))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    base = json.loads(Path("runs/first/checkpoints/step_3/policy/base.json").read_text())
    assert base["model_name"] == "embedded"

    code, completion, errors = lucidrl("generate", "runs/first", "12+30=")
    assert code == 0, errors
    code, output, errors = lucidrl("merge", "runs/first", "merged")
    assert code == 0, errors
    assert "merge gap: " in output
    assert load_file("merged/model.safetensors")
    code, of_merged, errors = lucidrl("generate", "merged", "12+30=")
    assert (code, of_merged) == (0, completion), errors
    code, _, errors = lucidrl("merge", "runs/first", "merged")
    assert code == 2
    assert "OUT=merged exists; choose a new folder" in errors
    code, _, errors = lucidrl("merge", "merged", "again")
    assert code == 2
    assert "RUN=merged holds a full model, not an adapter" in errors
    code, _, errors = lucidrl("eval", "runs/first", *SMALL[:1], "validation.num_prompts=8")
    assert code == 0, errors
    code, _, errors = lucidrl("grpo", "policy.model_name=runs/first", "run.name=next", "grpo.max_steps=1", *SMALL)
    assert code == 0, errors


@pytest.mark.slow
def test_a_moved_base_can_be_named_and_another_is_refused(lucidrl, tmp_path, monkeypatch, embedded_folder):
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base"
    load_model(str(embedded_folder), torch.float32).save_pretrained(base)
    for path in embedded_folder.glob("tokenizer*"):
        (base / path.name).write_bytes(path.read_bytes())
    command = ["grpo", "run.name=first", "grpo.max_steps=1", f"policy.model_name={base}", *LORA[:1], *SMALL]
    code, _, errors = lucidrl(*command)
    assert code == 0, errors
    base.rename(tmp_path / "moved")
    code, _, errors = lucidrl("merge", "runs/first", "merged")
    assert code == 2
    assert "merge with --base FOLDER" in errors
    code, _, errors = lucidrl("merge", "runs/first", "merged", "--base", "embedded-untrained")
    assert code == 2
    assert f"holds an adapter of {base} (checksum" in errors
    assert "but this base is embedded-untrained (checksum" in errors
    code, _, errors = lucidrl("merge", "runs/first", "merged", "--base", "moved")
    assert code == 0, errors
