"""Synchronous generation: turns a batch into requests, runs an engine until all are complete, and makes a batch of
their completions.

Shapes: B rows, T prompt tokens, T' tokens of prompt and completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.models.generation.interfaces import (
    Completion,
    Engine,
    GenerationDatumSpec,
    GenerationOutputSpec,
    GenerationRequest,
)
from lucidrl.models.generation.sampling import prompts_of, with_draw_keys


def complete_batch(
    engine: Engine,
    data: BatchedDataDict[GenerationDatumSpec],
    *,
    pad_id: int,
    seed: int = 0,
    call: int = 0,
    greedy: bool = False,
) -> BatchedDataDict[GenerationOutputSpec]:
    """Complete every row of a batch with an engine that has no other requests.

    Args:
        pad_id: token on the padding of the output.
        seed: seeds the sampling of rows without `draw_keys`, together with `call`, the number of earlier calls.
    """
    assert not engine.num_unfinished, "an engine with unfinished requests cannot complete a batch"
    requests = requests_of(with_draw_keys(data, seed, call), greedy)
    engine.submit([requests[row] for row in admission_order(data)])
    completions: dict[str, Completion] = {}
    try:
        while engine.num_unfinished:
            completions |= {completion.request_id: completion for completion in engine.step()}
    except BaseException:
        engine.abort([request.request_id for request in requests])
        raise
    return output_of(requests, completions, pad_id)


def requests_of(data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False) -> list[GenerationRequest]:
    """Return the rows of a batch with `draw_keys` as requests, whose ids name the rows."""
    ids, nothing = data["input_ids"].cpu(), [None] * data.size
    lengths, keys = data["input_lengths"].tolist(), data["draw_keys"].tolist()
    limits = data["max_new_tokens"].tolist() if "max_new_tokens" in data else nothing
    stops = data.get("stop_strings", nothing)
    may_continue = data["may_continue"].tolist() if "may_continue" in data else nothing
    return [
        GenerationRequest(
            request_id=f"row {row}",
            prompt_ids=ids[row, : lengths[row]],
            draw_key=keys[row],
            max_new_tokens=limits[row],
            stop_strings=tuple(stops[row] or ()),
            greedy=greedy,
            may_continue=bool(may_continue[row]),
        )
        for row in range(data.size)
    ]


def admission_order(data: BatchedDataDict[GenerationDatumSpec]) -> list[int]:
    """Return the rows, long prompts first, rows of the same prompt together: the order depends on the data only."""
    prompts, lengths = prompts_of(data), data["input_lengths"].tolist()
    first_row: dict[bytes, int] = {}
    for row, prompt in enumerate(prompts):
        first_row.setdefault(prompt, row)
    return sorted(range(len(prompts)), key=lambda row: (-lengths[row], first_row[prompts[row]], row))


def output_of(
    requests: Sequence[GenerationRequest], completions: Mapping[str, Completion], pad_id: int
) -> BatchedDataDict[GenerationOutputSpec]:
    """Return the completions as a batch, in the order of the requests."""
    found = [completions[request.request_id] for request in requests]
    rows = [torch.cat((request.prompt_ids, one.token_ids)) for request, one in zip(requests, found, strict=True)]
    logprobs = [
        torch.cat((torch.zeros(len(request.prompt_ids)), one.logprobs))
        for request, one in zip(requests, found, strict=True)
    ]
    lengths = torch.tensor([len(one.token_ids) for one in found], dtype=torch.int64)
    starts = torch.tensor([len(request.prompt_ids) for request in requests], dtype=torch.int64)
    empty = torch.zeros(0, 0)
    return BatchedDataDict(
        {
            "output_ids": pad_sequence(rows, batch_first=True, padding_value=pad_id) if rows else empty.long(),
            "generation_lengths": lengths,
            "unpadded_sequence_lengths": starts + lengths,
            "logprobs": pad_sequence(logprobs, batch_first=True) if rows else empty,
            "truncated": torch.tensor([one.truncated for one in found], dtype=torch.bool),
            # Weights change between calls only, so all tokens of a row have one version.
            "policy_versions": torch.tensor([int(one.policy_versions[0]) for one in found], dtype=torch.int64),
        }
    )
