"""Settings of vLLM are checked before vLLM is imported, and without it."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import LlamaConfig

from lucidrl.errors import ConfigError
from lucidrl.models.generation import vllm_settings
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.replica import check_gpus
from lucidrl.models.generation.separate import generator_hostings
from lucidrl.models.generation.vllm_settings import check_tensor_parallel_size, check_vllm, engine_arguments
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.recipes.configs import GRPORunConfig
from lucidrl.utils.config import validate

SEPARATE = {"engine": "vllm", "placement": "separate"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "vllm"}, "engine=vllm generates in separate processes, but placement=policy; set placement="),
        ({"vllm": {"enforce_eager": True}}, "vllm.enforce_eager is for engine=vllm, but engine=builtin"),
        ({**SEPARATE, "vllm": {"dtype": "half"}}, "vllm.dtype is not passed on to vLLM: set policy.precision"),
        ({**SEPARATE, "vllm": {"seed": 1}}, "vllm.seed is not passed on to vLLM: set seed"),
        (
            {**SEPARATE, "vllm": {"tensor_parallel_size": 0}},
            "tensor_parallel_size=0 is not a whole number of at least 1",
        ),
        ({**SEPARATE, "vllm": {"tensor_parallel_size": "two"}}, "tensor_parallel_size=two is not a whole number of at"),
        ({**SEPARATE, "vllm": {"tensor_parallel_size": True}}, "tensor_parallel_size=True is not a whole number of at"),
        (
            {**SEPARATE, "vllm": {"distributed_executor_backend": "ray"}},
            "the ranks of its engine; set tensor_parallel_",
        ),
        (
            {**SEPARATE, "vllm": {"prefill_context_parallel_size": 2}},
            "prefill_context_parallel_size is not passed on to vLLM: set tensor_parallel_size, or policy",
        ),
        ({**SEPARATE, "vllm": {"nnodes": 2}}, "vllm.nnodes is not passed on to vLLM: the ranks of a replica are on"),
        ({**SEPARATE, "vllm": {"node_rank": 1}}, "vllm.node_rank is not passed on to vLLM: the ranks of a replica are"),
        ({**SEPARATE, "vllm": {"master_addr": "a"}}, "vllm.master_addr is not passed on to vLLM: the ranks of a repl"),
        ({**SEPARATE, "vllm": {"master_port": 1}}, "vllm.master_port is not passed on to vLLM: the ranks of a replica"),
        ({**SEPARATE, "vllm": {"worker_cls": "a.B"}}, "vllm.worker_cls is not passed on to vLLM: a refit needs the"),
        (
            {**SEPARATE, "vllm": {"worker_extension_cls": "a.B"}},
            "vllm.worker_extension_cls is not passed on to vLLM: Lucid RL sets it to receive refits; remove it",
        ),
        ({**SEPARATE, "vllm": {"max_model_len": None}}, "max_model_len=None is not a whole number of at least 64"),
        ({**SEPARATE, "vllm": {"max_model_len": 16}}, "max_model_len=16 is not a whole number of at least 64 tokens"),
        ({"sleep": True}, "sleep=true is for engine=vllm, but engine=builtin frees its cache by itself"),
        (
            {**SEPARATE, "sleep": True, "refit": "collective"},
            "with refit=collective the replicas use other GPUs; set refit=auto or refit=ipc, or remove sleep",
        ),
        ({**SEPARATE, "vllm": {"enable_sleep_mode": True}}, "enable_sleep_mode is not passed on to vLLM: set policy.g"),
        ({"engine": "sglang"}, "'builtin' or 'vllm'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        validate(GenerationConfig, settings)


def test_a_generator_that_never_stops_cannot_sleep():
    generation = {"placement": "separate", "engine": "vllm", "sleep": True}
    settings = {"policy": {"generation": generation}, "grpo": {"async": {"max_staleness": 1}}}
    with pytest.raises(ConfigError, match=r"sleep=true frees GPU memory .*max_staleness=1 generation never stops"):
        validate(GRPORunConfig, settings)


@pytest.mark.parametrize(
    ("size", "heads", "key_value_heads", "message"),
    [
        (2, 4, 2, None),
        (4, 4, 2, None),  # each key-value head is on two ranks
        (
            3,
            4,
            2,
            "tensor_parallel_size=3 must divide the model's num_attention_heads=4; set another size, or",
        ),
        (
            4,
            12,
            6,
            "=4 must divide the model's num_key_value_heads=6 or be a multiple of it; set another size, or",
        ),
    ],
)
def test_a_tensor_parallel_size_must_fit_the_attention_heads(size, heads, key_value_heads, message):
    config = LlamaConfig(hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=key_value_heads)
    if message is None:
        check_tensor_parallel_size(size, config)
        return
    with pytest.raises(ConfigError, match=message):
        check_tensor_parallel_size(size, config)


@pytest.mark.parametrize(
    ("first", "count", "message"),
    [
        (0, 4, None),
        (2, 2, None),
        (4, 1, "a generator needs GPU 4, counted from 0, but this machine has 4; .* lower policy.generation.num_work"),
        (2, 4, "a generator needs GPUs 2 to 5, counted from 0, but this machine has 4; "),
    ],
)
def test_a_replica_needs_a_gpu_for_each_rank(first, count, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    if message is None:
        check_gpus(first, count)
        return
    with pytest.raises(ConfigError, match=message):
        check_gpus(first, count)


def test_each_rank_gets_the_next_gpu_and_the_ranks_are_processes_of_vllm():
    config = config_with(tensor_parallel_size=2)
    arguments = engine_arguments(config, "folder", 512, range(2, 4))
    assert arguments["device_ids"] == [2, 3]
    assert arguments["distributed_executor_backend"] == "mp"
    assert arguments["tensor_parallel_size"] == 2
    assert "distributed_executor_backend" not in engine_arguments(config_with(), "folder", 512, range(1))
    assert [hosting.num_ranks for hosting in generator_hostings(config.generation)] == [2]


def test_vllm_may_sleep_on_gpus_only_if_asked():
    asleep = PolicyConfig(generation={**SEPARATE, "sleep": True})
    assert engine_arguments(asleep, "folder", 512, [0])["enable_sleep_mode"] is True
    assert "enable_sleep_mode" not in engine_arguments(asleep, "folder", 512, None)
    assert "enable_sleep_mode" not in engine_arguments(config_with(), "folder", 512, [0])


def test_vllm_has_no_float64():
    with pytest.raises(ConfigError, match="precision=float64 is not a precision of vLLM; set precision=float32"):
        validate(PolicyConfig, {"precision": "float64", "generation": SEPARATE})


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package that looks like vLLM from outside, and fails when it is imported."""
    package = tmp_path / "vllm"
    (package / "engine").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    fields = "    enforce_eager: bool = False\n    gpu_memory_utilization: float = 0.9\n    _hidden: int = 0\n"
    (package / "engine" / "arg_utils.py").write_text(f"class EngineArgs:\n{fields}")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(vllm_settings, "_installed_version", lambda: "0.32.1")


def config_with(**arguments: object) -> PolicyConfig:
    return PolicyConfig(generation={**SEPARATE, "vllm": arguments})


def test_known_arguments_are_accepted_and_others_get_a_suggestion(installed):
    check_vllm(config_with(enforce_eager=False))
    with pytest.raises(ConfigError) as error:
        check_vllm(config_with(enforce_eagr=True, gpu_memory=0.5))
    first, second = str(error.value).splitlines()
    known = "policy.generation.vllm."
    assert first == f"unknown key {known}enforce_eagr; did you mean {known}enforce_eager?"
    assert second == f"unknown key {known}gpu_memory; did you mean {known}gpu_memory_utilization?"


@pytest.mark.parametrize("version", ["0.31.2", "0.320.1", "1.0"])
def test_another_version_is_one_sentence(installed, monkeypatch, version):
    monkeypatch.setattr(vllm_settings, "_installed_version", lambda: version)
    with pytest.raises(ConfigError, match=f"needs vLLM 0.32, but {version} is installed; pip install"):
        check_vllm(config_with())


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setattr(vllm_settings, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"needs vLLM, which is not installed; pip install .*lucidrl\[vllm\].*"):
        check_vllm(config_with())
