"""Log-probabilities of rows, micro-batch by micro-batch, in step with the other ranks."""

from __future__ import annotations

from typing import Any

import torch

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.collectives import largest_over
from lucidrl.models.policy.interfaces import LogprobOutputSpec
from lucidrl.models.policy.row_plans import RowPlans
from lucidrl.models.policy.sharding import Sharding
from lucidrl.models.policy.train_step import with_empty_rounds


@torch.no_grad()
def score_rows(
    sharding: Sharding, row_plans: RowPlans, data: BatchedDataDict[Any], mbs: int | None, device: torch.device
) -> BatchedDataDict[LogprobOutputSpec]:
    """See `PolicyWorker.get_logprobs`; the results are on the CPU, in the order of the rows."""
    plan, order = row_plans.for_scoring(data, mbs)
    rounds = largest_over(len(plan), sharding.mesh.world)
    micro_batches = data.microbatches(plan, length_multiple=row_plans.sequence_length_round)
    nothing = torch.zeros(data["input_ids"].shape, dtype=torch.float32)
    scored = []
    for micro, is_real in with_empty_rounds(micro_batches, data, rounds):
        tokens, lengths = micro["input_ids"].to(device), micro["input_lengths"].to(device)
        outputs = sharding.root(tokens, lengths, packed=row_plans.are_packed)
        if is_real:
            missing = nothing.shape[1] - outputs.logprobs.shape[1]
            scored.append(torch.nn.functional.pad(outputs.logprobs.float().cpu(), (0, missing)))
    result = BatchedDataDict({"logprobs": torch.cat(scored) if scored else nothing})
    result.reorder_data(order)
    return result
