"""Settings of vLLM are checked before vLLM is imported, and without it."""

from __future__ import annotations

import sys

import pytest

from lucidrl.errors import ConfigError
from lucidrl.models.generation import vllm_settings
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.vllm_settings import check_vllm
from lucidrl.models.policy.config import PolicyConfig
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
        ({**SEPARATE, "vllm": {"max_model_len": None}}, "max_model_len=None is not a whole number of at least 64"),
        ({**SEPARATE, "vllm": {"max_model_len": 16}}, "max_model_len=16 is not a whole number of at least 64 tokens"),
        ({"engine": "sglang"}, "'builtin' or 'vllm'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        validate(GenerationConfig, settings)


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
