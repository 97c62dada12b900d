"""Which rows of a call have the same prompt, what each of them draws, and how rows are shared out."""

from __future__ import annotations

from collections.abc import Sequence

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.models.generation.interfaces import GenerationDatumSpec
from lucidrl.models.generation.sampling import draw_keys


def prompts_of(data: BatchedDataDict[GenerationDatumSpec]) -> list[bytes]:
    """The prompt of each row, as something that can be compared."""
    rows = zip(data["input_ids"].cpu().numpy(), data["input_lengths"].tolist(), strict=True)
    return [tokens[:length].tobytes() for tokens, length in rows]


def with_draw_keys(
    data: BatchedDataDict[GenerationDatumSpec], seed: int, call: int
) -> BatchedDataDict[GenerationDatumSpec]:
    """The same rows, each with a key of its draws; to be made before it is known who answers which row."""
    if "draw_keys" in data:
        return data
    data = data.copy()
    data["draw_keys"] = draw_keys(seed, call, prompts_of(data))
    return data


def prompt_chunks(prompts: Sequence[bytes], most: int) -> list[list[int]]:
    """Rows that are answered together, about equally many in each of at most so many chunks; at least one chunk.

    Rows with the same prompt share its computation and stay together. What is in a chunk depends on nothing but the
    arguments, and with it the answers: these may differ in the last bits if rows are batched differently.
    """
    rows_of: dict[bytes, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(prompt, []).append(row)
    most = min(most, len(rows_of))
    if most <= 1:
        return [list(range(len(prompts)))]
    chunks: list[list[int]] = [[] for _ in range(most)]
    done = 0
    for rows in rows_of.values():
        chunks[done * most // len(prompts)] += rows
        done += len(rows)
    return [chunk for chunk in chunks if chunk]
