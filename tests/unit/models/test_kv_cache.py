"""The cache stores each prompt once and grows with its rows; attention over it is causal attention."""

from __future__ import annotations

import pytest
import torch

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.packing import pack_rows
from lucidrl.models.attention import AttentionCall, causal_attention
from lucidrl.models.generation import kv_cache
from lucidrl.models.generation.builtin import BuiltinGenerator
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.kv_cache import KVCache, PrefillLayout
from lucidrl.models.loading import load_model
from lucidrl.models.logprobs import LogprobModel

QUERY_HEADS, HEADS, SIZE = 4, 2, 6
PROMPT_LENGTHS = torch.tensor([5, 2, 7])
NEW = 6


def call_of(query, key, value, window=None, softcap=None) -> AttentionCall:
    return AttentionCall(query, key, value, 0, scaling=0.5, dropout=0.0, window=window, softcap=softcap)


def rows_of(generator: torch.Generator, prompt_of_row: list[int]) -> list[tuple[torch.Tensor, ...]]:
    """Query, key and value [1, H, length, D] of each whole row; rows of a prompt begin with the same ones."""

    def normal(heads: int, length: int) -> torch.Tensor:
        return torch.randn(1, heads, length, SIZE, generator=generator, dtype=torch.float64)

    heads = (QUERY_HEADS, HEADS, HEADS)
    prompts = [[normal(count, length) for count in heads] for length in PROMPT_LENGTHS.tolist()]
    return [
        tuple(
            torch.cat((start, normal(count, NEW)), dim=2) for start, count in zip(prompts[prompt], heads, strict=True)
        )
        for prompt in prompt_of_row
    ]


def prefilled(rows: list[tuple[torch.Tensor, ...]], prompt_of_row: list[int]) -> KVCache:
    cache = KVCache(PROMPT_LENGTHS, torch.tensor(prompt_of_row), max_new_tokens=NEW)
    width = int(PROMPT_LENGTHS.max())
    packed = pack_rows(torch.zeros(len(PROMPT_LENGTHS), width, dtype=torch.int64), PROMPT_LENGTHS)
    firsts = [rows[prompt_of_row.index(prompt)] for prompt in range(len(PROMPT_LENGTHS))]
    streams = [
        torch.cat(
            [row[part][:, :, :length] for row, length in zip(firsts, PROMPT_LENGTHS.tolist(), strict=True)], dim=2
        )
        for part in range(3)
    ]
    PrefillLayout(packed, cache).attend(call_of(*streams))
    return cache


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("growth", [1, 4, 64])
def test_decoding_with_the_cache_is_causal_attention(monkeypatch, window, softcap, growth):
    """Rows of a prompt are not adjacent, and some rows (among them all rows of one prompt) finish early."""
    monkeypatch.setattr(kv_cache, "GROWTH", growth)
    prompt_of_row = [2, 0, 1, 2, 0, 2]
    rows = rows_of(torch.Generator().manual_seed(0), prompt_of_row)
    expected = [causal_attention(call_of(*row, window=window, softcap=softcap)).transpose(1, 2) for row in rows]
    cache = prefilled(rows, prompt_of_row)
    alive = list(range(len(rows)))
    for step in range(NEW):
        if step == 2:
            cache.keep_rows(torch.tensor([0, 3, 4, 5]))
            alive = [0, 3, 4, 5]
        if step == 4:
            cache.keep_rows(torch.tensor([1, 3]))
            alive = [3, 5]
        places = [int(PROMPT_LENGTHS[prompt_of_row[row]]) + step for row in alive]
        newest = [
            torch.cat([rows[row][part][:, :, place : place + 1] for row, place in zip(alive, places, strict=True)])
            for part in range(3)
        ]
        output = cache.attend(call_of(*newest, window=window, softcap=softcap))
        cache.step_done()
        for number, (row, place) in enumerate(zip(alive, places, strict=True)):
            torch.testing.assert_close(output[number, 0], expected[row][0, place], rtol=0, atol=1e-12)


def test_prompts_are_stored_once_and_dropped_with_their_last_row():
    prompt_of_row = [2, 0, 1, 2, 0, 2]
    cache = prefilled(rows_of(torch.Generator().manual_seed(0), prompt_of_row), prompt_of_row)
    assert cache.prompt_keys[0].shape == cache.prompt_values[0].shape == (3, HEADS, 7, SIZE)
    cache.keep_rows(torch.tensor([0, 1]))
    assert len(cache.prompt_keys[0]) == len(cache.prompt_values[0]) == 2
    cache.keep_rows(torch.tensor([1]))
    assert len(cache.prompt_keys[0]) == 1


def test_completions_may_exceed_the_first_allocation(tiny_model, tokenizer):
    model = LogprobModel(load_model(tiny_model("qwen2"), torch.float64), 1.0)
    count = 110
    assert count > 2 * kv_cache.GROWTH
    generator = BuiltinGenerator(model, tokenizer, GenerationConfig(max_new_tokens=count))
    generator._stop_ids = torch.tensor([], dtype=torch.int64)
    prompts = BatchedDataDict({"input_ids": torch.tensor([[5, 6], [7, 8]]), "input_lengths": torch.tensor([2, 1])})
    output = generator.generate(prompts)
    assert output["generation_lengths"].tolist() == [count, count]
    with torch.no_grad():
        scored = model(output["output_ids"], output["unpadded_sequence_lengths"]).logprobs.float()
    torch.testing.assert_close(output["logprobs"][0, 2:], scored[0, 2:], rtol=0, atol=1e-6)
    torch.testing.assert_close(output["logprobs"][1, 1:], scored[1, 1:], rtol=0, atol=1e-6)
