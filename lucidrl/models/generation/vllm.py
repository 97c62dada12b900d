"""vLLM as an engine, in this process; the only module that imports vLLM.

vLLM gets logits that are divided by the temperature already, and samples at temperature 1. Its raw log-probabilities
are then those of the full distribution at the configured temperature, as in the built-in engine, whatever top-k, top-p
and greedy decoding do.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import ConfigError
from lucidrl.models.adapter_folder import is_adapter
from lucidrl.models.generation.interfaces import (
    Completion,
    GenerationDatumSpec,
    GenerationOutputSpec,
    GenerationRequest,
)
from lucidrl.models.generation.sampling import check_requests
from lucidrl.models.generation.synchronous import complete_batch
from lucidrl.models.generation.vllm_settings import check_vllm, engine_arguments
from lucidrl.models.loading import DTYPES, context_length, empty_model, load_model, stop_token_ids
from lucidrl.models.policy.config import EMBEDDED_MODELS, PolicyConfig
from lucidrl.models.sources import model_folder
from lucidrl.profiling.spans import span

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine shares this process, and so its memory, with the receiver
    "VLLM_NO_USAGE_STATS": "1",
}
_LARGEST_SEED = 2**63 - 1
_STOPPED_BY_LIMIT = "length"
_PROBE = "probe"
"""Id of the request that scores a text."""


class VllmEngine:
    """Completes requests with a copy of the policy's weights; see `Engine`. The loaded weights are version 0.

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
        # Without this variable, vLLM lowers the threads of torch in this process to 1.
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        model = empty_model(config.model_name, DTYPES[config.precision], config.trust_remote_code)
        self.policy_version = 0
        self._config, self._seed, self._num_calls = config.generation, seed, 0
        self.tokenizer = tokenizer
        self._stop_ids = sorted(stop_token_ids(model, tokenizer) | set(config.generation.stop_token_ids))
        with _saved_model(config, seed) as folder:
            arguments = engine_arguments(config, str(folder), context_length(model.config), gpu)
            if arguments.get("enforce_eager"):
                torch._dynamo.config.disable = True  # vLLM compiles some functions even then, at the first call
            with _as_config_error():
                self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._engine.set_weight_version("0")
        self._requests: dict[str, GenerationRequest] = {}
        """Unfinished requests, by id."""
        self._finished: list[Completion] = []
        """Completions that no `step` has returned yet."""
        self._context = int(self._engine.model_config.max_model_len)
        self._engine.output_processor.tokenizer = tokenizer  # finds stop strings with the tokenizer of the policy
        if config.generation.temperature != 1.0:
            self._engine.apply_model(partial(_divide_logits, config.generation.temperature))

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting or running, or whose completions were not returned yet."""
        return len(self._requests) + len(self._finished)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; see `Engine.submit`."""
        check_requests(requests, self._context)
        for request in requests:
            self._requests[request.request_id] = request
            self._engine.add_request(
                request.request_id, self._prompt(request.prompt_ids.tolist()), self._parameters(request)
            )

    def step(self) -> list[Completion]:
        """Add a token to the running rows; return the requests that finished."""
        finished, self._finished = self._finished, []
        return finished + (self._advance() if self._requests else [])

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; unknown ids are ignored."""
        aborted = set(request_ids)
        self._engine.abort_request([name for name in aborted if name in self._requests])
        self._requests = {name: request for name, request in self._requests.items() if name not in aborted}
        self._finished = [completion for completion in self._finished if completion.request_id not in aborted]

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Context inside which the caller replaces the weights with `load`; see `Engine.updating`."""
        in_flight, again = self._config.in_flight, []
        if in_flight == "finish":
            again = self._withdrawn(with_started=False)
            while self._requests:
                self._finished += self._advance()
        try:
            yield
            self.policy_version = version
            self._engine.set_weight_version(str(version))
            if in_flight in ("keep", "abort"):
                again = self._withdrawn(with_started=in_flight == "abort")
            # vLLM frees its prefix cache only if no row runs; the salt keeps new requests from using it anyway.
            if in_flight == "recompute" or not self._requests:
                self._engine.reset_prefix_cache(reset_running_requests=True)
        finally:
            self.submit(again)

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every prompt; see `GenerationDatumSpec` and `GenerationOutputSpec`."""
        pad_id = int(self.tokenizer.pad_token_id)
        with span("generate"):
            output = complete_batch(self, data, pad_id=pad_id, seed=self._seed, call=self._num_calls, greedy=greedy)
        self._num_calls += 1
        return output

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights, inside `updating`; names are those of the Hugging Face model.

        Raises:
            Exception: of vLLM; the engine then holds a mixture of weights and must not be used any more.
        """
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})

    def shutdown(self) -> None:
        """Stop the engine; may be called twice."""
        self._engine.engine_core.shutdown()

    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the log-probabilities of all tokens but the first, at the configured temperature."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        self._engine.add_request(_PROBE, self._prompt(tokens), parameters)
        output = None
        while output is None:  # rows in flight go on
            finished = {one.request_id: one for one in self._engine.step() if one.finished}
            output = finished.pop(_PROBE, None)
            self._finished += map(self._completion, finished.values())
        _, *found = output.prompt_logprobs
        return torch.tensor([found[i][token].logprob for i, token in enumerate(tokens[1:])])

    def _advance(self) -> list[Completion]:
        return [self._completion(one) for one in self._engine.step() if one.finished]

    def _withdrawn(self, *, with_started: bool) -> list[GenerationRequest]:
        """Abort the requests that have no token yet, or all; return them."""
        states = self._engine.output_processor.request_states.values()
        names = {state.external_req_id for state in states if with_started or state.is_prefilling}
        withdrawn = [request for name, request in self._requests.items() if name in names]
        self.abort(names)
        return withdrawn

    def _prompt(self, tokens: Sequence[int]) -> Any:
        """Return a prompt for vLLM, which shares cached keys and values with prompts of the same version only."""
        from vllm.inputs import tokens_input

        return tokens_input(list(tokens), cache_salt=str(self.policy_version))

    def _parameters(self, request: GenerationRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        stop_strings = [*self._config.stop_strings, *request.stop_strings]
        limits = (self._config.max_new_tokens, self._context - len(request.prompt_ids), request.max_new_tokens)
        return SamplingParams(
            temperature=0.0 if request.greedy else 1.0,
            top_k=0 if request.greedy else self._config.top_k,
            top_p=1.0 if request.greedy else self._config.top_p,
            seed=request.draw_key & _LARGEST_SEED,
            max_tokens=min(limit for limit in limits if limit is not None),
            stop=stop_strings,
            stop_token_ids=self._stop_ids,
            ignore_eos=True,  # the list above has all end tokens
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            detokenize=bool(stop_strings),
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, output: Any) -> Completion:
        [found], request = output.outputs, self._requests.pop(output.request_id)
        versions = torch.full((len(found.token_ids),), self.policy_version)
        for part in found.weight_versions or ():
            versions[part.start : part.end] = int(part.version)
        # The first log-probability of each position is that of the sampled token.
        logprobs = [found.logprobs.logprobs[first] for first in found.logprobs.start_indices]
        return Completion(
            request_id=request.request_id,
            token_ids=torch.tensor(found.token_ids, dtype=torch.int64),
            logprobs=torch.tensor(logprobs, dtype=torch.float32),
            policy_versions=versions,
            truncated=found.finish_reason == _STOPPED_BY_LIMIT,
        )


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
