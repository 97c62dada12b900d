"""The built-in engine: continuous batching with the forward pass that is trained.

A step starts waiting requests where rows have finished, computes a bounded number of prompt tokens, and adds a token to
every running row. Rows are independent: each has a separate random stream, and batching changes rounding only.

Shapes: B rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from lucidrl.errors import DataError
from lucidrl.models.generation.cache_space import CacheSpace
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.decode_layout import DecodeLayout
from lucidrl.models.generation.interfaces import Completion, GenerationRequest
from lucidrl.models.generation.kv_cache import Chunk, PrefillBatch
from lucidrl.models.generation.rows import Prefix, Row
from lucidrl.models.generation.sampling import check_requests, draw, uniforms_at
from lucidrl.models.loading import context_length, stop_token_ids
from lucidrl.models.logprobs import LogprobModel

BYTES_PER_CHARACTER = 4
"""A byte-level token may hold as little as a quarter of a character."""


class BuiltinEngine:
    """Completes requests with a `LogprobModel`; see `Engine`.

    Args:
        model: a caller that changes its weights does so inside `updating`, or calls `forget` before the next step.
    """

    def __init__(self, model: LogprobModel, tokenizer: PreTrainedTokenizerBase, config: GenerationConfig):
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.policy_version = 0
        self._context = context_length(model.model.config)
        self._stop_ids = stop_token_ids(model.model, tokenizer) | set(config.stop_token_ids)
        self._space = self._new_space()
        self._waiting: deque[Row] = deque()
        self._prefilling: list[Row] = []
        """Running rows with prompt tokens that are not computed yet."""
        self._decoding: list[Row] = []
        """Running rows whose newest token is the only one that is not computed yet."""
        self._finished: list[Row] = []
        """Rows that finished while the weights were replaced."""
        self._layout: DecodeLayout | None = None
        """Layout of the last decoding step, while its pages are in use."""

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting or running, or whose completions were not returned yet."""
        return len(self._waiting) + len(self._running) + len(self._finished)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens for whose keys and values memory is allocated."""
        return self._space.num_allocated

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; see `Engine.submit`."""
        check_requests(requests, self._context)
        for request in requests:
            limit = self._limit(request)
            if not self._space.fits_alone(len(request.prompt_ids), limit):
                raise DataError(
                    f"{request.request_id} needs {self._space.needed(len(request.prompt_ids), limit)} tokens of cache "
                    f"for its prompt of {len(request.prompt_ids)} and {limit} new tokens, but "
                    f"policy.generation.cache_tokens={self.config.cache_tokens}; raise it, or lower "
                    "policy.generation.max_new_tokens"
                )
        self._waiting += [self._new_row(request) for request in requests]

    def step(self) -> list[Completion]:
        """Start waiting requests, add a token to the running rows, and return the requests that finished."""
        finished, self._finished = self._finished, []
        with evaluating(self.model):
            finished += self._step()
        return [row.completion() for row in finished]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; unknown ids are ignored."""
        aborted = set(request_ids)

        def split(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
            kept: list[Row] = []
            dropped: list[Row] = []
            for row in rows:
                (dropped if row.request.request_id in aborted else kept).append(row)
            return kept, dropped

        waiting, dropped_waiting = split(self._waiting)
        self._waiting = deque(waiting)
        self._prefilling, dropped_prefilling = split(self._prefilling)
        self._decoding, dropped_decoding = split(self._decoding)
        self._finished, _ = split(self._finished)
        for row in dropped_waiting:
            self._space.leave(row.prefix)
        for row in (*dropped_prefilling, *dropped_decoding):
            self._space.release(row)

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Context inside which the caller replaces the weights; see `Engine.updating`."""
        in_flight = self.config.in_flight
        if in_flight == "finish":
            with evaluating(self.model):
                while self._running:
                    self._finished += self._step(is_admitting=False)
        yield
        self.policy_version, self._layout = version, None
        if in_flight != "keep":
            self._space.release_held()
        if in_flight == "abort":
            self._restart_running()
        self._space.drop_idle()
        for row in self._running:
            row.version = version
            if in_flight == "recompute":
                row.prefix.rewind()
                row.own.rewind()
            elif row.prefix.num_missing:
                row.prefix.rewind()  # a prompt is computed with one version
        if in_flight == "recompute":
            self._prefilling, self._decoding = self._running, []
        self._space.renew_prefixes()
        for row in self._waiting:
            row.version = version
            self._space.leave(row.prefix)
            row.prefix = self._space.prefix_of(row.ids[: row.num_tokens])

    def forget(self) -> None:
        """Drop the keys and values of finished rows; if no request is unfinished, free the memory of the cache."""
        self._space.release_held()
        if not self.num_unfinished:
            self._space, self._layout = self._new_space(), None

    @property
    def _running(self) -> list[Row]:
        return self._prefilling + self._decoding

    def _new_space(self) -> CacheSpace:
        config = self.config
        return CacheSpace(config.max_concurrent_rows, config.cache_tokens, config.max_new_tokens)

    def _limit(self, request: GenerationRequest) -> int:
        limits = (request.max_new_tokens, self.config.max_new_tokens, self._context - len(request.prompt_ids))
        return min(limit for limit in limits if limit is not None)

    def _new_row(self, request: GenerationRequest) -> Row:
        limit, prompt = self._limit(request), request.prompt_ids.cpu().numpy().astype(np.int64)
        return Row(
            prefix=self._space.prefix_of(prompt),
            own=self._space.new_own(),
            request=request,
            limit=limit,
            ids=np.concatenate((prompt, np.zeros(limit, dtype=np.int64))),
            num_tokens=len(prompt),
            version=self.policy_version,
        )

    def _restart_running(self) -> None:
        """Make the running rows wait again, before all others."""
        for row in reversed(self._running):
            row.prefix.num_rows += 1  # it waits for its prompt now
            self._space.release(row)
            row.restart()
            self._waiting.appendleft(row)
        self._prefilling, self._decoding = [], []

    @torch.inference_mode()
    def _step(self, is_admitting: bool = True) -> list[Row]:
        """Add a token to every running row; return the rows that finished."""
        device = next(self.model.parameters()).device
        while is_admitting and self._waiting and self._space.start(self._waiting[0], len(self._running)):
            self._prefilling.append(self._waiting.popleft())
        self._space.tidy()
        first: dict[Row, torch.Tensor] = {}
        while self._prefilling and not first:
            first = self._prefill(device)
            if self._decoding:
                break
        hidden = [self._decode(device)] if self._decoding else []
        self._decoding += first
        if not self._decoding:
            return []
        if first:
            hidden.append(torch.stack(list(first.values())))
        return self._draw(self.model.next_token_logits(torch.cat(hidden)))

    def _prefill(self, device: torch.device) -> dict[Row, torch.Tensor]:
        """Compute a bounded number of prompt tokens; return the rows whose prompt is complete, with the last hidden
        state of each. Rows that need one decoding step instead become decoding rows."""
        chunks = self._next_chunks()
        last_hidden: dict[Prefix | Row, torch.Tensor] = {}
        # Whole prompts are computed together; other chunks each need the keys and values before them.
        whole = {owner: chunk for owner, chunk in chunks.items() if not chunk.start}
        for group in (whole, {owner: chunk for owner, chunk in chunks.items() if owner not in whole}):
            if group:
                batch = PrefillBatch.of(list(group.values()), device)
                hidden = self.model.hidden_states(batch.input_ids, batch.position_ids, batch.layout)
                last_hidden |= zip(group, hidden[batch.last], strict=True)
        for owner, hidden in last_hidden.items():
            if isinstance(owner, Prefix) and not owner.num_missing:
                owner.last_hidden = hidden
        ready = [row for row in self._prefilling if not row.prefix.num_missing and row.num_pending <= 1]
        self._prefilling = [row for row in self._prefilling if row.prefix.num_missing or row.num_pending > 1]
        self._decoding += [row for row in ready if row.num_pending]
        first = {}
        for row in ready:
            if not row.num_pending:
                last = last_hidden.get(row, row.prefix.last_hidden)
                assert last is not None
                first[row] = last
        return first

    def _next_chunks(self) -> dict[Prefix | Row, Chunk]:
        """Return the next prompt tokens to compute, by the prompt or row that they belong to."""
        chunks: dict[Prefix | Row, Chunk] = {}
        remaining = self.config.prefill_tokens
        for row in self._prefilling:
            if not remaining:
                break
            if row.prefix.num_missing:
                if row.prefix in chunks:
                    continue
                ids = row.prefix.token_ids[row.prefix.num_cached :][:remaining]
                chunks[row.prefix] = Chunk(ids, row.prefix)
            elif row.num_pending > 1:
                ids = row.ids[row.num_cached : row.num_tokens][:remaining]
                chunks[row] = Chunk(ids, row.own, row.prefix)
            else:
                continue
            remaining -= len(ids)
        return chunks

    def _decode(self, device: torch.device) -> torch.Tensor:
        """Compute the newest token of the decoding rows; return their hidden states [B, D]."""
        if self._layout is None or not self._layout.advance(self._decoding):
            self._layout = DecodeLayout(self._decoding, device)
        newest_B1 = torch.tensor([[row.newest] for row in self._decoding], device=device)
        return self.model.hidden_states(newest_B1, self._layout.position_ids, self._layout)

    def _draw(self, logits_BV: torch.Tensor) -> list[Row]:
        """Draw the next token of each decoding row; return the rows that finished."""
        rows = self._decoding
        keys = np.array([row.request.draw_key for row in rows], dtype=np.int64)
        uniform_B = torch.from_numpy(uniforms_at(keys, np.array([row.num_sampled for row in rows])))
        top_k, top_p = self.config.top_k, self.config.top_p
        is_greedy = [row.request.greedy for row in rows]
        tokens_B, logprobs_B = draw(logits_BV, uniform_B, greedy=all(is_greedy), top_k=top_k, top_p=top_p)
        if any(is_greedy) and not all(is_greedy):
            is_greedy_B = torch.tensor(is_greedy, device=logits_BV.device)
            best_B, best_logprobs_B = draw(logits_BV, uniform_B, greedy=True)
            tokens_B = torch.where(is_greedy_B, best_B, tokens_B)
            logprobs_B = torch.where(is_greedy_B, best_logprobs_B, logprobs_B)
        for row, token, logprob in zip(rows, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            row.add(token, logprob)
        finished = [row for row in rows if self._is_finished(row)]
        if finished:
            is_done = set(finished)
            self._decoding = [row for row in rows if row not in is_done]
            for row in finished:
                (self._space.hold if row.request.may_continue else self._space.release)(row)
        return finished

    def _is_finished(self, row: Row) -> bool:
        if row.newest in self._stop_ids:
            return True
        if strings := self.config.stop_strings + row.request.stop_strings:
            most_tokens = BYTES_PER_CHARACTER * (max(map(len, strings)) + 1)
            text = self.tokenizer.decode(row.newest_tokens(most_tokens))
            if any(string in text for string in strings):
                return True
        row.truncated = row.num_sampled == row.limit
        return row.truncated


@contextmanager
def evaluating(model: LogprobModel) -> Iterator[None]:
    """Context inside which the model is in evaluation mode."""
    if not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()
