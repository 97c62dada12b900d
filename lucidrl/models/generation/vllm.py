"""vLLM as an engine; the only module, with `vllm_rank`, that imports vLLM.

vLLM gets logits that are divided by the temperature already, and samples at temperature 1. Its raw log-probabilities
are then those of the full distribution at the configured temperature, as in the built-in engine, whatever top-k, top-p
and greedy decoding do.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.workers.place import LOOPBACK, interface_of
from lucidrl.errors import ConfigError, RefitError
from lucidrl.models.adapter_folder import is_adapter
from lucidrl.models.generation.interfaces import (
    Completion,
    GenerationDatumSpec,
    GenerationOutputSpec,
    GenerationRequest,
)
from lucidrl.models.generation.sampling import check_requests
from lucidrl.models.generation.synchronous import complete_batch
from lucidrl.models.generation.vllm_rank import unlink_rings
from lucidrl.models.generation.vllm_settings import check_tensor_parallel_size, check_vllm, engine_arguments
from lucidrl.models.loading import DTYPES, context_length, empty_model, load_model, stop_token_ids
from lucidrl.models.policy.config import EMBEDDED_MODELS, PolicyConfig
from lucidrl.models.sources import model_folder
from lucidrl.profiling.spans import span

_log = logging.getLogger(__name__)

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler, and a single rank, share this process
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_HOST_IP": LOOPBACK,  # the ranks of a replica are on one machine
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",  # of the ranks, before vLLM terminates them
    "VLLM_NO_USAGE_STATS": "1",
}
_RANK_CLASS = "lucidrl.models.generation.vllm_rank.VllmRank"
_RANK_LOST = 71
"""Exit code of a process whose engine lost a tensor parallel rank."""
_LARGEST_SEED = 2**63 - 1
_STOPPED_BY_LIMIT = "length"
_WEIGHTS, _CACHE = _SLEEPERS = ("weights", "kv_cache")
"""What vLLM frees when it sleeps, by its own names."""
_PROBE = "probe"
"""Id of the request that scores a text."""


class VllmEngine:
    """Completes requests with a copy of the policy's weights; see `Engine`. The loaded weights are version 0.

    Args:
        config: config of the policy.
        seed: seed of the weights of an untrained model, and of the sampling of rows without `draw_keys`.
        gpus: indices of the GPUs of the tensor parallel ranks among the visible GPUs; None on a machine without GPUs.

    Raises:
        ConfigError: vLLM cannot start with these settings.
    """

    def __init__(self, config: PolicyConfig, tokenizer: PreTrainedTokenizerBase, seed: int, gpus: Sequence[int] | None):
        check_vllm(config)
        model = empty_model(config.model_name, DTYPES[config.precision], config.trust_remote_code)
        check_tensor_parallel_size(config.generation.ranks_per_replica, model.config)
        self.policy_version = 0
        self._config, self._seed, self._num_calls = config.generation, seed, 0
        self.tokenizer = tokenizer
        self._stop_ids = sorted(stop_token_ids(model, tokenizer) | set(config.generation.stop_token_ids))
        with _saved_model(config, seed) as folder:
            arguments = engine_arguments(config, str(folder), context_length(model.config), gpus)
            self._engine: Any = _started(arguments, config.generation.ranks_per_replica)
        self._ranks = _rank_processes(self._engine)
        is_main = threading.current_thread() is threading.main_thread()
        with _as_config_error():
            self._engine.collective_rpc("prepare_rank", args=(config, os.getpid(), is_main))
            if self._ranks:
                unlink_rings()
        self._engine.set_weight_version("0")
        self._requests: dict[str, GenerationRequest] = {}
        """Unfinished requests, by id."""
        self._is_shut_down = False
        self._can_sleep = config.generation.sleep and gpus is not None
        self._asleep: set[str] = set()
        """What the engine has no GPU memory for: some of `_SLEEPERS`."""
        if config.generation.sleep and gpus is None:
            _log.warning("policy.generation.sleep has no effect, because vLLM cannot free the memory of a CPU")
        self._finished: list[Completion] = []
        """Completions that no `step` has returned yet."""
        self._context = int(self._engine.model_config.max_model_len)
        self._engine.output_processor.tokenizer = tokenizer  # finds stop strings with the tokenizer of the policy

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting or running, or whose completions were not returned yet."""
        return len(self._requests) + len(self._finished)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; see `Engine.submit`."""
        check_requests(requests, self._context)
        if requests:
            self._wake(*_SLEEPERS)
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
            self._wake(_WEIGHTS)
            yield
            self.policy_version = version
            self._engine.set_weight_version(str(version))
            if in_flight in ("keep", "abort"):
                again = self._withdrawn(with_started=in_flight == "abort")
            # vLLM frees its prefix cache only if no row runs; the salt keeps new requests from using it anyway.
            if in_flight == "recompute" or not self._requests:
                self._engine.reset_prefix_cache(reset_running_requests=True)
            self._wake(_CACHE)  # after the load, whose staged weights need memory too
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

    def on_ranks(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `RefitRank` on all tensor parallel ranks at the same time; return the results, by rank.

        Raises:
            RefitError: of a rank, if all problems are of this type.
            RuntimeError: another problem of a rank.
        """
        if self._is_shut_down:
            return []
        with self._exiting_without_ranks():
            results = self._engine.collective_rpc("call_rank", args=(method, args))
        for result in sorted((result for result in results if result.problem), key=attrgetter("is_refit_error")):
            raise (RefitError if result.is_refit_error else RuntimeError)(result.problem)
        return [result.value for result in results]

    def sleep(self) -> None:
        """Move the weights to host memory and drop the cache, until a refit or a request needs them.

        Does nothing without the setting, on a CPU, or while there are unfinished requests.
        """
        if self._can_sleep and not self._asleep and not self.num_unfinished:
            self.on_ranks("free_copies")
            with self._exiting_without_ranks():
                self._engine.sleep(level=1)
            self._asleep = set(_SLEEPERS)

    def shutdown(self) -> None:
        """Stop the engine; may be called twice."""
        self._is_shut_down = True
        self._engine.engine_core.shutdown()

    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the log-probabilities of all tokens but the first, at the configured temperature."""
        from vllm import SamplingParams

        self._wake(*_SLEEPERS)
        parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        self._engine.add_request(_PROBE, self._prompt(tokens), parameters)
        output = None
        while output is None:  # rows in flight go on
            finished = {one.request_id: one for one in self._step()}
            output = finished.pop(_PROBE, None)
            self._finished += map(self._completion, finished.values())
        _, *found = output.prompt_logprobs
        return torch.tensor([found[i][token].logprob for i, token in enumerate(tokens[1:])])

    def _wake(self, *what: str) -> None:
        """Bring some of `_SLEEPERS` back to the GPU, in this order."""
        if tags := [tag for tag in what if tag in self._asleep]:
            with self._exiting_without_ranks():
                self._engine.wake_up(tags)
            self._asleep.difference_update(tags)

    def _advance(self) -> list[Completion]:
        return [self._completion(one) for one in self._step()]

    def _step(self) -> list[Any]:
        """Add a token to the running rows; return vLLM's outputs of the requests that finished."""
        with self._exiting_without_ranks():
            return [one for one in self._engine.step() if one.finished]

    @contextmanager
    def _exiting_without_ranks(self) -> Iterator[None]:
        """Let this process exit if a call of vLLM fails because a rank has exited; the driver then restarts it."""
        try:
            yield
        except Exception:  # vLLM raises errors of many types
            if all(process.is_alive() for process in self._ranks):
                raise
            _log.exception("a tensor parallel rank of vLLM has exited; this process exits too")
            logging.shutdown()
            os._exit(_RANK_LOST)

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


def _started(arguments: dict[str, Any], num_ranks: int) -> Any:
    """Start an engine of vLLM, and a process for each tensor parallel rank if there are several."""
    os.environ.update(_ENVIRONMENT)
    # Without this variable, vLLM lowers the threads of torch in this process to 1.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    if num_ranks > 1:
        os.environ["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // num_ranks))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM's default needs a NUMA node per rank
        if name := interface_of(LOOPBACK):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if arguments.get("enforce_eager"):
        # vLLM compiles some functions even then, at the first call.
        torch._dynamo.config.disable = True
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    with _as_config_error():
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        return LLMEngine.from_engine_args(EngineArgs(**arguments, worker_extension_cls=_RANK_CLASS))


def _rank_processes(engine: Any) -> list[BaseProcess]:
    """Return the processes of the tensor parallel ranks; [] if the only rank is in this process."""
    executor = engine.engine_core.engine_core.model_executor
    return [worker.proc for worker in getattr(executor, "workers", ())]


@contextmanager
def _as_config_error() -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # vLLM raises errors of many types
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"vLLM cannot start: {type(error).__name__}: {reason}; change policy.generation.vllm or the model, or set "
            "policy.generation.engine=builtin"
        ) from error
