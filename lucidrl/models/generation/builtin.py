"""The built-in engine: batched decoding with the forward pass and the weights that are trained.

Equal prompts are prefilled once, finished rows leave the batch, and each row has a separate random stream.

Shapes: B rows, P distinct prompts, T prompt tokens, N new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.packing import pack_rows
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.interfaces import GenerationDatumSpec, GenerationOutputSpec
from lucidrl.models.generation.kv_cache import KVCache, PrefillLayout
from lucidrl.models.generation.sampling import check_prompt_lengths, draw, prompts_of, uniforms, with_draw_keys
from lucidrl.models.loading import context_length, stop_token_ids
from lucidrl.models.logprobs import LogprobModel
from lucidrl.profiling.spans import span

COMPACT_BELOW = 7 / 8
"""Drop finished rows from the cache when at most this fraction of its rows is unfinished."""

BYTES_PER_CHARACTER = 4
"""A byte-level token may hold as little as a quarter of a character."""


class BuiltinGenerator:
    """Completes prompts with a `LogprobModel`, which may be trained between calls.

    Args:
        model: every call uses its current weights; the caller sets `policy_version`.
        seed: seed of the sampling of rows without `draw_keys`.
        whole_weights: context manager for each call, inside which the model has its full weights.
    """

    num_restarts = 0
    refit_gb_per_s = None

    def __init__(
        self,
        model: LogprobModel,
        tokenizer: PreTrainedTokenizerBase,
        config: GenerationConfig,
        seed: int = 0,
        whole_weights: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.policy_version = 0
        self._seed, self._whole_weights = seed, whole_weights
        self.calls = 0
        """Number of `generate` calls so far; with `seed`, it seeds the sampling of rows without `draw_keys`."""
        stop_ids = stop_token_ids(model.model, tokenizer) | set(config.stop_token_ids)
        self._stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64)

    def update_weights(self, version: int) -> None:
        """Set the version of the weights. Nothing is copied: generator and policy share the model."""
        self.policy_version = version

    @torch.no_grad()
    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Complete every prompt; see `GenerationDatumSpec` and `GenerationOutputSpec`."""
        with self._whole_weights(), span("generate"), _evaluating(self.model):
            device = next(self.model.parameters()).device
            context = context_length(self.model.model.config)
            prompts = _Prompts.of(data, device, context, self.config.max_new_tokens)
            keys_B = with_draw_keys(data, self._seed, self.calls)["draw_keys"].cpu()
            self.calls += 1
            own_stops = data["stop_strings"] if "stop_strings" in data else [None] * data.size
            stop_strings = [(*self.config.stop_strings, *(strings or ())) for strings in own_stops]
            completions = _Completions(prompts, int(self.tokenizer.pad_token_id), stop_strings)
            for rows_B in prompts.batches(self.config.max_concurrent_rows):
                self._decode(prompts, completions, rows_B, keys_B, greedy)
            return completions.output(self.policy_version)

    @torch.inference_mode()  # cheaper than no_grad; the output tensors are made outside, so that autograd may use them
    def _decode(
        self,
        prompts: _Prompts,
        completions: _Completions,
        rows_B: torch.Tensor,
        keys: torch.Tensor,
        greedy: bool,
    ) -> None:
        """Complete a batch of rows; write the tokens to `completions`."""
        config, device = self.config, prompts.input_ids.device
        chosen_P, prompt_of_row_B = torch.unique(prompts.prompt_of_row_B[rows_B], return_inverse=True)
        lengths_B = prompts.lengths[chosen_P][prompt_of_row_B]
        limits_B = prompts.limits[chosen_P][prompt_of_row_B]
        uniforms_BN = uniforms(keys[rows_B.cpu()], prompts.max_new_tokens).to(device)
        cache, logits_PV = self._prefill(prompts, chosen_P, prompt_of_row_B)
        logits_BV = logits_PV[prompt_of_row_B]
        is_active_B = torch.ones(len(rows_B), dtype=torch.bool, device=device)
        stop_ids = self._stop_ids.to(device)
        for position in range(int(limits_B.max())):
            tokens_B, logprobs_B = draw(
                logits_BV, uniforms_BN[:, position], greedy=greedy, top_k=config.top_k, top_p=config.top_p
            )
            completions.write(rows_B[is_active_B], position, tokens_B[is_active_B], logprobs_B[is_active_B])
            stopped_B = torch.isin(tokens_B, stop_ids)
            if any(completions.stop_strings):
                stopped_B |= self._reached_stop_string(completions, rows_B, position)
            cut_B = ~stopped_B & (position + 1 >= limits_B)
            completions.truncated[rows_B[cut_B & is_active_B]] = True
            is_active_B &= ~(stopped_B | cut_B)
            num_active = int(is_active_B.sum())
            if num_active == 0:
                return
            if num_active <= COMPACT_BELOW * len(rows_B):
                kept = is_active_B.nonzero()[:, 0]
                cache.keep_rows(kept)
                rows_B, tokens_B, lengths_B, limits_B, uniforms_BN, is_active_B = (
                    tensor[kept] for tensor in (rows_B, tokens_B, lengths_B, limits_B, uniforms_BN, is_active_B)
                )
            # Finished rows are decoded until they are dropped; their positions must stay within the context.
            positions_B = lengths_B + (limits_B - 1).clamp(max=position)
            hidden = self.model.hidden_states(tokens_B[:, None], positions_B[:, None], cache)
            cache.step_done()
            logits_BV = self.model.next_token_logits(hidden)

    def _reached_stop_string(self, completions: _Completions, rows_B: torch.Tensor, position: int) -> torch.Tensor:
        """[B] bool: whether the text up to the token at `position` contains one of the row's stop strings."""
        reached = []
        for row in rows_B.tolist():
            strings = completions.stop_strings[row]
            most_tokens = BYTES_PER_CHARACTER * (max(map(len, strings), default=0) + 1)
            text = self.tokenizer.decode(completions.newest_tokens(row, position, most_tokens)) if strings else ""
            reached.append(any(string in text for string in strings))
        return torch.tensor(reached, device=rows_B.device)

    def _prefill(
        self, prompts: _Prompts, chosen_P: torch.Tensor, prompt_of_row_B: torch.Tensor
    ) -> tuple[KVCache, torch.Tensor]:
        """Run the chosen prompts; return their cache and the logits of their next tokens [P, V]."""
        lengths_P = prompts.lengths[chosen_P]
        packed = pack_rows(prompts.input_ids[chosen_P, : int(lengths_P.max())], lengths_P)
        cache = KVCache(lengths_P, prompt_of_row_B, prompts.max_new_tokens)
        hidden = self.model.hidden_states(packed.input_ids, packed.position_ids, PrefillLayout(packed, cache))
        last_P = packed.cu_seqlens[1:].to(torch.int64) - 1
        return cache, self.model.next_token_logits(hidden[last_P])


@contextmanager
def _evaluating(model: LogprobModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@dataclass
class _Prompts:
    """The distinct prompts of a call, and the prompt of each row."""

    input_ids: torch.Tensor
    """[P, T]"""
    lengths: torch.Tensor
    """[P]"""
    limits: torch.Tensor
    """[P] maximum number of new tokens, within the context."""
    prompt_of_row_B: torch.Tensor

    @classmethod
    def of(
        cls, data: BatchedDataDict[GenerationDatumSpec], device: torch.device, context: int, max_new_tokens: int
    ) -> _Prompts:
        input_ids, lengths = data["input_ids"].cpu(), data["input_lengths"].cpu()
        contents = prompts_of(data)
        first_row: dict[bytes, int] = {}
        check_prompt_lengths(lengths.tolist(), context)
        for row, content in enumerate(contents):
            first_row.setdefault(content, row)
        number_of = {content: number for number, content in enumerate(first_row)}
        rows = list(first_row.values())
        lengths_P = lengths[rows].to(device)
        return cls(
            input_ids=input_ids[rows].to(device),
            lengths=lengths_P,
            limits=(context - lengths_P).clamp(max=max_new_tokens),
            prompt_of_row_B=torch.tensor(
                [number_of[content] for content in contents], dtype=torch.int64, device=device
            ),
        )

    @property
    def max_new_tokens(self) -> int:
        return int(self.limits.max()) if len(self.limits) else 0

    def batches(self, max_rows: int) -> Iterator[torch.Tensor]:
        """Yield batches of at most `max_rows` row indices, ordered by length and then by prompt."""
        order = torch.argsort(self.prompt_of_row_B, stable=True)
        order = order[torch.argsort(self.lengths[self.prompt_of_row_B[order]], descending=True, stable=True)]
        yield from order.split(max_rows) if len(order) else ()


class _Completions:
    """Prompts, each followed by the tokens sampled so far."""

    def __init__(self, prompts: _Prompts, pad_id: int, stop_strings: Sequence[Sequence[str]]):
        self.stop_strings = stop_strings
        self._starts = prompts.lengths[prompts.prompt_of_row_B]
        ids = F.pad(prompts.input_ids, (0, prompts.max_new_tokens))[prompts.prompt_of_row_B]
        position = torch.arange(ids.shape[1], device=ids.device)
        self._ids = ids.masked_fill_(position >= self._starts[:, None], pad_id)
        self._logprobs = torch.zeros(ids.shape, device=ids.device)
        self._lengths = torch.zeros_like(self._starts)
        self.truncated = torch.zeros_like(self._starts, dtype=torch.bool)

    def write(self, rows: torch.Tensor, position: int, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        column = self._starts[rows] + position
        self._ids[rows, column] = tokens
        self._logprobs[rows, column] = logprobs.to(torch.float32)
        self._lengths[rows] = position + 1

    def newest_tokens(self, row: int, position: int, most: int) -> torch.Tensor:
        """Return up to `most` sampled tokens of a row; the last one is at `position`."""
        end = int(self._starts[row]) + position + 1
        return self._ids[row, end - min(most, position + 1) : end]

    def output(self, policy_version: int) -> BatchedDataDict[GenerationOutputSpec]:
        totals = self._starts + self._lengths
        width = int(totals.max()) if len(totals) else 0
        return BatchedDataDict(
            {
                "output_ids": self._ids[:, :width].contiguous(),
                "generation_lengths": self._lengths,
                "unpadded_sequence_lengths": totals,
                "logprobs": self._logprobs[:, :width].contiguous(),
                "truncated": self.truncated,
                "policy_versions": torch.full_like(self._lengths, policy_version),
            }
        )
