"""Training on rows of mixed lengths: dynamic micro-batches compared with fixed ones padded to the batch maximum.

Lengths are log-uniform in 16-512. Both sides use the same model, loss and optimizer of Lucid RL, and their largest
micro-batches have equally many tokens. The benchmark counts real tokens per second, without padding.
"""

from __future__ import annotations

from typing import Any

import torch
from harness import Claim, arguments, report, take_turns

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.losses.interfaces import valid_token_mask
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.loading import load_tokenizer
from lucidrl.models.policy.config import (
    DynamicBatchingConfig,
    OptimizerConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker

ROWS, SHORTEST, LONGEST = 64, 16, 512
MICRO_BATCH_ROWS = 8


def make_batch() -> BatchedDataDict[Any]:
    torch.manual_seed(0)
    exponents = torch.rand(ROWS) * torch.tensor(LONGEST / SHORTEST).log()
    lengths = (SHORTEST * exponents.exp()).long()
    lengths[0] = LONGEST
    within = torch.arange(LONGEST) < lengths[:, None]
    return BatchedDataDict(
        {
            "input_ids": torch.randint(6, 100, (ROWS, LONGEST)) * within,
            "input_lengths": lengths,
            "token_mask": within.float(),
            "sample_mask": torch.ones(ROWS),
        }
    )


def make_worker(**batching: Any) -> DTensorPolicyWorker:
    optimizer = OptimizerConfig(kwargs={"lr": 1e-5})
    config = PolicyConfig(model_name="embedded-untrained", optimizer=optimizer, **batching)
    return DTensorPolicyWorker(config, load_tokenizer("embedded"), init_reference_model=False)


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(options.threads)
    batch, loss_fn = make_batch(), NLLLoss()
    off = SequencePackingConfig(enabled=False)
    budget = DynamicBatchingConfig(enabled=True, train_mb_tokens=MICRO_BATCH_ROWS * LONGEST)
    dynamic, packed = make_worker(sequence_packing=off, dynamic_batching=budget), make_worker()
    fixed = make_worker(sequence_packing=off)

    def fixed_step() -> None:
        """Pad every micro-batch to the width of the batch; `train` would cut each to its longest row."""
        assert fixed.optimizer is not None
        counts = batch["sample_mask"].sum(), valid_token_mask(batch).sum()
        for start in range(0, ROWS, MICRO_BATCH_ROWS):
            micro = batch.slice(start, start + MICRO_BATCH_ROWS)
            mask = valid_token_mask(micro)
            outputs = fixed.model(micro["input_ids"], micro["input_lengths"], loss_fn.needs, selected=mask)
            loss_fn(outputs, micro, *counts)[0].backward()
        fixed.optimizer.step()

    times = take_turns(
        {
            "dynamic": lambda: dynamic.train(batch, loss_fn),
            "packed": lambda: packed.train(batch, loss_fn),
            "fixed": fixed_step,
        }
    )
    tokens = int(batch["input_lengths"].sum())
    for name in ("fixed", "dynamic", "packed"):
        print(f"{name}: {tokens / times.median(name):,.0f} real tokens/s")
    print(f"packed (default) vs fixed: {times.speedup('packed', 'fixed'):.2f} x")
    text = f"dynamic vs fixed micro-batches, lengths {SHORTEST}-{LONGEST}: tokens/s"
    report([Claim(text, 2.0, times.speedup("dynamic", "fixed"))], options.json)


if __name__ == "__main__":
    main()
