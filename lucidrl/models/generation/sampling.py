"""Sampling of tokens: the random numbers of a row depend only on its draw key.

A hash of (row key, position) gives one uniform number per token, which picks the token by inverse CDF. Rows share no
random stream, so that a completion does not depend on the rest of its batch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import DataError
from lucidrl.models.generation.interfaces import GenerationDatumSpec, GenerationRequest

BLOCK = 256


def draw_key(*parts: int | str) -> int:
    """Return the draw key of a row, which seeds its random numbers, from seed, step, prompt, sample and turn.

    Example:
        >>> draw_key(0, 7, "12+30", 3) == draw_key(0, 7, "12+30", 3) != draw_key(0, 7, "12+30", 4)
        True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def prompts_of(data: BatchedDataDict[GenerationDatumSpec]) -> list[bytes]:
    """Return the prompt of each row as bytes, to compare prompts."""
    rows = zip(data["input_ids"].cpu().numpy(), data["input_lengths"].tolist(), strict=True)
    return [tokens[:length].tobytes() for tokens, length in rows]


def check_requests(requests: Iterable[GenerationRequest], context: int) -> None:
    """Raise DataError if a prompt is empty or leaves no space for a token in the model's context, or if a request asks
    for no token."""
    for request in requests:
        length, limit = len(request.prompt_ids), request.max_new_tokens
        if not 0 < length < context:
            raise DataError(
                f"the prompt of {request.request_id} has {length} tokens; give it at least 1 and at most {context - 1} "
                f"tokens, as the model's context has {context}"
            )
        if limit is not None and limit < 1:
            raise DataError(f"{request.request_id} has max_new_tokens={limit}; allow it at least 1 new token")


def with_draw_keys(
    data: BatchedDataDict[GenerationDatumSpec], seed: int, call: int
) -> BatchedDataDict[GenerationDatumSpec]:
    """Add the column `draw_keys` if the batch has none. A key depends on the prompt and on the number of earlier rows
    with the same prompt.

    Call this before rows are split over workers: in a part of the rows, these numbers would differ.
    """
    if "draw_keys" in data:
        return data
    seen: Counter[bytes] = Counter()
    keys = []
    for prompt in prompts_of(data):
        keys.append(draw_key(seed, call, prompt.hex(), seen[prompt]))
        seen[prompt] += 1
    data = data.copy()
    data["draw_keys"] = torch.tensor(keys, dtype=torch.int64)
    return data


def uniforms(keys_B: torch.Tensor, count: int) -> torch.Tensor:
    """[B, count] float64 in [0, 1): the uniform numbers of the first `count` positions of each key."""
    return torch.from_numpy(uniforms_at(keys_B.cpu().numpy()[:, None], np.arange(count)[None, :]))


def uniforms_at(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the uniform numbers of int64 keys at int64 positions, as float64 in [0, 1)."""
    counters = (positions + 1).astype(np.uint64)
    with np.errstate(over="ignore"):
        # The splitmix64 generator.
        bits = keys.astype(np.int64).view(np.uint64) + counters * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits = bits ^ (bits >> np.uint64(31))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(
    logits_BV: torch.Tensor, uniform_B: torch.Tensor, *, greedy: bool = False, top_k: int = 0, top_p: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose one token per row.

    Args:
        logits_BV: float32, divided by the temperature.
        uniform_B: one number in [0, 1) per row; unused if greedy.

    Returns:
        (tokens [B], log-probabilities of these tokens [B] under the full distribution, without top-k and top-p)
    """
    probs_BV = torch.softmax(logits_BV, dim=-1)
    if greedy:
        tokens_B = logits_BV.argmax(dim=-1)
    else:
        tokens_B = _inverse_cdf(_truncated(probs_BV, top_k, top_p) if top_k or top_p < 1.0 else probs_BV, uniform_B)
    return tokens_B, torch.log(probs_BV.gather(1, tokens_B[:, None])[:, 0])


def _inverse_cdf(weights_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Return the first token at which the cumulative sum exceeds u times the total.

    Search the block that contains the token first, then the token inside the block.
    """
    rows, vocabulary = weights_BV.shape
    padded = F.pad(weights_BV, (0, -vocabulary % BLOCK)) if vocabulary % BLOCK else weights_BV
    blocks = padded.view(rows, -1, BLOCK)
    block_ends = blocks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    goal_B1 = (uniform_B.to(block_ends.device) * block_ends[:, -1])[:, None]
    block_B1 = torch.searchsorted(block_ends, goal_B1, right=True).clamp_(max=blocks.shape[1] - 1)
    before_B1 = torch.where(block_B1 > 0, block_ends.gather(1, (block_B1 - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(rows, device=blocks.device), block_B1[:, 0]].to(torch.float64)
    running = inside.cumsum(dim=-1)
    # The two sums differ by rounding; keep the goal below the end of its block.
    below_end = running[:, -1:] * (1 - 2.0**-40)
    offset_B1 = torch.searchsorted(running, torch.minimum(goal_B1 - before_B1, below_end), right=True)
    return (block_B1 * BLOCK + offset_B1)[:, 0].clamp_(max=vocabulary - 1)


def _truncated(weights_BV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Keep the k largest weights, then the smallest set of largest weights that reaches `top_p`; zero all others."""
    count = min(top_k, weights_BV.shape[-1]) if top_k else weights_BV.shape[-1]
    ordered, index = weights_BV.topk(count, dim=-1)
    if top_p < 1.0:
        running = ordered.cumsum(dim=-1, dtype=torch.float64)
        before = running - ordered
        ordered = ordered.masked_fill(before >= top_p * running[:, -1:], 0.0)
    return torch.zeros_like(weights_BV).scatter_(1, index, ordered)
