"""Run tasks of lm-evaluation-harness on runs, checkpoints and models.

    python -m lucidrl.lm_eval --model lucidrl --model_args pretrained=runs/grpo/exp_001 --tasks hellaswag

The command takes all arguments of `lm_eval`. The harness finds only models that are registered in its process, so this
module registers the model `lucidrl` before it starts the harness. Needs the extra `eval`.

Shapes: B rows, N scored tokens, V vocabulary.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.packing import pack_rows
from lucidrl.errors import ConfigError, LucidError
from lucidrl.models.attention import PackedLayout
from lucidrl.models.generation.builtin import BuiltinGenerator
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.loading import DTYPES, context_length, load_model, load_tokenizer
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.sources import resolved_name
from lucidrl.utils.device import default_device
from lucidrl.utils.imports import require_package
from lucidrl.utils.suggestions import closest

NAME = "lucidrl"
ROWS_AT_ONCE = 64
LOGITS_AT_ONCE = 1024
"""Tokens whose logits are in memory at a time."""
DEFAULT_NEW_TOKENS = 256
_SAMPLING = {"top_k", "top_p"}
_MODEL_ARGS = ("pretrained", "dtype", "max_length")
_HARNESS_ARGS = ("batch_size", "max_batch_size", "device", "trust_remote_code")
"""Names that the harness adds to `--model_args`; they have no effect."""


class Backend:
    """Scores and completes token ids with a model.

    Args:
        pretrained: a run folder, RUN@best, a checkpoint or a model.
        max_length: tokens per row; default: the context of the model.
    """

    def __init__(self, pretrained: str, dtype: str = "float32", max_length: int | None = None) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"dtype={dtype} is not known; use one of {', '.join(DTYPES)}")
        self.name = resolved_name(str(pretrained), "pretrained")
        self.tokenizer: Any = load_tokenizer(self.name)
        self._logprobs = LogprobModel(load_model(self.name, DTYPES[dtype]), temperature=1.0).to(default_device())
        self._model = self._logprobs.model
        self.max_length = int(max_length or context_length(self._model.config))

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        first = self.tokenizer.bos_token_id
        return int(self.tokenizer.eos_token_id if first is None else first)

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the token ids; by default with the tokenizer's special tokens, unless the text begins with them."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (bos and text.startswith(bos))
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def loglikelihoods(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """For each (context, continuation), return the log-probability of the continuation, and whether greedy decoding
        would produce it.

        If context and continuation are too long together, the first tokens are dropped.
        """
        order = sorted(range(len(pairs)), key=lambda row: -len(pairs[row][0]) - len(pairs[row][1]))
        found: dict[int, tuple[float, bool]] = {}
        for start in range(0, len(order), ROWS_AT_ONCE):
            rows = order[start : start + ROWS_AT_ONCE]
            found |= zip(rows, self._scored([pairs[row] for row in rows]), strict=True)
        return [found[row] for row in range(len(pairs))]

    @torch.inference_mode()
    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        device = next(self._model.parameters()).device
        kept = [
            ([*context, *continuation][-self.max_length - 1 :], len(continuation)) for context, continuation in pairs
        ]
        inputs = [torch.tensor(ids[:-1]) for ids, _ in kept]
        lengths_B = torch.tensor([len(ids) for ids in inputs], device=device)
        packed = pack_rows(torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True).to(device), lengths_B)
        hidden = self._logprobs.hidden_states(packed.input_ids, packed.position_ids, PackedLayout(packed))
        # The last `count` positions of a row predict its continuation.
        ends = packed.cu_seqlens[1:].tolist()
        counts = [min(count, len(ids) - 1) for ids, count in kept]
        predictors = [at for end, count in zip(ends, counts, strict=True) for at in range(end - count, end)]
        targets = [token for (ids, _), count in zip(kept, counts, strict=True) for token in ids[len(ids) - count :]]
        logprobs, is_best = self._chosen(hidden[torch.tensor(predictors, device=device)], torch.tensor(targets))
        return [
            (float(row.sum()), bool(best.all()))
            for row, best in zip(logprobs.split(counts), is_best.split(counts), strict=True)
        ]

    def _chosen(self, hidden_ND: torch.Tensor, targets_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities of the targets [N], and whether each is the likeliest token [N]."""
        logprobs, is_best = [], []
        for hidden, targets in zip(hidden_ND.split(LOGITS_AT_ONCE), targets_N.split(LOGITS_AT_ONCE), strict=True):
            logprobs_NV = torch.log_softmax(self._logprobs.next_token_logits(hidden), dim=-1).cpu()
            logprobs.append(logprobs_NV.gather(1, targets[:, None])[:, 0])
            is_best.append(logprobs_NV.argmax(dim=-1) == targets)
        return torch.cat(logprobs), torch.cat(is_best)

    def generate(self, prompts: Sequence[list[int]], config: GenerationConfig, *, greedy: bool) -> list[str]:
        """Return the completions, without special tokens."""
        model = LogprobModel(self._model, config.temperature)
        generator = BuiltinGenerator(model, self.tokenizer, config)
        texts: list[str] = []
        for start in range(0, len(prompts), ROWS_AT_ONCE):
            rows = [torch.tensor(ids) for ids in prompts[start : start + ROWS_AT_ONCE]]
            lengths = torch.tensor([len(row) for row in rows])
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            data: BatchedDataDict[Any] = BatchedDataDict({"input_ids": ids, "input_lengths": lengths})
            output = generator.generate(data, greedy=greedy).to("cpu")
            ends = output["unpadded_sequence_lengths"].tolist()
            sampled = [ids[start:end] for ids, start, end in zip(output["output_ids"], lengths, ends, strict=True)]
            texts += self.tokenizer.batch_decode(sampled, skip_special_tokens=True)
        return texts


def rolling_loglikelihoods(backend: Backend, texts: Sequence[str]) -> list[float]:
    """Return the log-probability of each whole text; a text longer than the context is scored in windows."""
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    windows = [
        [
            make_disjoint_window(window)
            for window in get_rolling_token_windows(
                backend.encode(text), backend.prefix_token_id, backend.max_length, context_len=1
            )
        ]
        for text in texts
    ]
    scores = iter(backend.loglikelihoods([window for of_text in windows for window in of_text]))
    return [sum(next(scores)[0] for _ in of_text) for of_text in windows]


def completions(backend: Backend, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return the completion of each (prompt, generation arguments); requests with equal arguments are one batch."""
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

    rows_of: dict[str, list[int]] = {}
    for row, (_, arguments) in enumerate(requests):
        rows_of.setdefault(repr(sorted(arguments.items())), []).append(row)
    found: dict[int, str] = {}
    for rows in rows_of.values():
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(requests[rows[0]][1], DEFAULT_NEW_TOKENS))
        until = handle_stop_sequences(kwargs.pop("until", None), eos=backend.tokenizer.eos_token)
        config = generation_config(kwargs, until, backend.max_length)
        most = backend.max_length - config.max_new_tokens
        prompts = [(backend.encode(requests[row][0]) or [backend.prefix_token_id])[-most:] for row in rows]
        texts = backend.generate(prompts, config, greedy=not kwargs.get("do_sample"))
        found |= {row: postprocess_generated_text(text, until, None) for row, text in zip(rows, texts, strict=True)}
    return [found[row] for row in range(len(requests))]


def generation_config(kwargs: dict[str, Any], until: Sequence[str], max_length: int) -> GenerationConfig:
    """Return the config of requests with the normalised arguments `kwargs`.

    Raises:
        ConfigError: for an argument that the generator does not have, or if the context is too short.
    """
    rest = {name: value for name, value in kwargs.items() if name not in ("max_gen_toks", "temperature", "do_sample")}
    if unknown := sorted(rest.keys() - _SAMPLING):
        raise ConfigError(
            f"{unknown[0]}={rest[unknown[0]]} is not an argument of the generator; use until, max_gen_toks, do_sample, "
            "temperature, top_k or top_p"
        )
    if kwargs["max_gen_toks"] >= max_length:
        raise ConfigError(
            f"max_gen_toks={kwargs['max_gen_toks']} leaves no space for a prompt in a context of {max_length} tokens; "
            "lower it with --gen_kwargs max_gen_toks=..."
        )
    temperature = kwargs.get("temperature") or 1.0  # 0 means greedy, where the temperature changes nothing
    stops = tuple(string for string in until if string)
    return GenerationConfig(max_new_tokens=kwargs["max_gen_toks"], temperature=temperature, stop_strings=stops, **rest)


def checked_model_args(model_args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Backend`, without those that the harness adds.

    Raises:
        ConfigError: for another argument, or without `pretrained`.
    """
    given = {name: value for name, value in model_args.items() if name not in _HARNESS_ARGS}
    for name, value in given.items():
        if name not in _MODEL_ARGS:
            similar = closest(name, _MODEL_ARGS)
            remedy = f"did you mean {similar}?" if similar else "use pretrained, dtype or max_length"
            raise ConfigError(f"{name}={value} in --model_args is not an argument of the model {NAME}; {remedy}")
    if not given.get("pretrained"):
        raise ConfigError("--model_args has no pretrained; add pretrained=..., a run folder, a checkpoint or a model")
    return given


@cache
def registered_class() -> type[Any]:
    """Register the model `lucidrl` in lm-evaluation-harness, and return its class."""
    require_package("lm_eval", "lucidrl.lm_eval", "eval")
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model

    importlib.import_module("lm_eval.models")  # registers its own models, which lm_eval skips once any is registered

    class LucidLM(TemplateLM):
        """A run, checkpoint or model of Lucid RL as a model of lm-evaluation-harness."""

        def __init__(self, **model_args: Any):
            super().__init__()
            self._backend = Backend(**checked_model_args(model_args))
            self.tokenizer, self.max_length = self._backend.tokenizer, self._backend.max_length

        @property
        def tokenizer_name(self) -> str:
            return self._backend.name.replace("/", "__")

        @property
        def eot_token_id(self) -> int:
            return int(self.tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            return self._backend.prefix_token_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
            return self._backend.encode(string, add_special_tokens)

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> Any:
            kept = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
            return self.tokenizer.apply_chat_template(chat_history, tokenize=False, **kept)

        def _loglikelihood_tokens(self, requests: Any, **ignored: Any) -> list[tuple[float, bool]]:
            return self._backend.loglikelihoods([(context, continuation) for _, context, continuation in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            return rolling_loglikelihoods(self._backend, [request.args[0] for request in requests])

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return completions(self._backend, [request.args for request in requests])

    return register_model(NAME)(LucidLM)


def main() -> None:
    """Start lm-evaluation-harness with the model `lucidrl` registered."""
    try:
        registered_class()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except LucidError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
