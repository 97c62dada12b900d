"""A training step of the policy worker compared with the shortest PyTorch loop for the same step.

Both sides compute the negative log-likelihood of the same tokens in the same micro-batches, then clip gradients and
step a fused AdamW. The bare loop calls the Hugging Face model (sdpa) and takes a float32 log-softmax. In bfloat16 its
parameters and optimizer state are bfloat16, while Lucid RL keeps float32 master weights. The table also shows, without
a claim, rows of mixed lengths, padded and packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import Claim, arguments, print_table, report, take_turns
from transformers import AutoModelForCausalLM

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.embedded import embedded_model
from lucidrl.models.loading import load_tokenizer
from lucidrl.models.policy.config import OptimizerConfig, PolicyConfig, Precision, SequencePackingConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker

LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Case:
    label: str
    model_name: str
    precision: Precision
    rows: int
    tokens: int
    micro_batch: int


def make_batch(case: Case, mixed_lengths: bool) -> BatchedDataDict:
    """Random tokens; lengths are equal, or spread evenly from an eighth of the longest to the longest."""
    torch.manual_seed(0)
    longest = case.tokens
    lengths = torch.linspace(longest // 8, longest, case.rows).long() if mixed_lengths else torch.tensor([longest])
    lengths = lengths.expand(case.rows)[torch.randperm(case.rows)]
    within = torch.arange(longest) < lengths[:, None]
    return BatchedDataDict(
        {
            "input_ids": torch.randint(6, 100, (case.rows, longest)) * within,
            "input_lengths": lengths,
            "token_mask": within.float(),
            "sample_mask": torch.ones(case.rows),
        }
    )


def our_step(case: Case, batch: BatchedDataDict, packed: bool) -> Callable[[], object]:
    config = PolicyConfig(
        model_name=case.model_name,
        precision=case.precision,
        train_micro_batch_size=case.micro_batch,
        sequence_packing=SequencePackingConfig(enabled=packed, train_mb_tokens=case.micro_batch * case.tokens),
        optimizer=OptimizerConfig(kwargs={"lr": LEARNING_RATE}),
    )
    worker = DTensorPolicyWorker(config, load_tokenizer(case.model_name), init_reference_model=False)
    return lambda: worker.train(batch, NLLLoss())


def bare_step(case: Case, batch: BatchedDataDict) -> Callable[[], object]:
    dtype = getattr(torch, case.precision)
    if case.model_name.startswith("embedded"):
        model = embedded_model(warm=False, seed=0, attn_implementation="sdpa").to(dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(case.model_name, dtype=dtype)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    ids, mask = batch["input_ids"], batch["token_mask"]

    def step() -> None:
        total = mask[:, 1:].sum()
        for rows in torch.arange(case.rows).split(case.micro_batch):
            logits = model(input_ids=ids[rows], use_cache=False).logits[:, :-1].float()
            logprobs = torch.log_softmax(logits, dim=-1).gather(2, ids[rows, 1:, None])[..., 0]
            (-(logprobs * mask[rows, 1:]).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    options = arguments(__doc__, model=(str, ".cache/smollm2", "folder of SmolLM2"))
    torch.set_num_threads(options.threads)
    cases = [
        Case("tiny, float32", "embedded-untrained", "float32", rows=64, tokens=64, micro_batch=32),
        Case("SmolLM2, bfloat16", options.model, "bfloat16", rows=16, tokens=128, micro_batch=8),
    ]
    claims, rows = [], []
    for case in cases:
        batch, mixed = make_batch(case, mixed_lengths=False), make_batch(case, mixed_lengths=True)
        times = take_turns({"lucidrl": our_step(case, batch, packed=False), "bare": bare_step(case, batch)})
        claims.append(Claim(f"training step vs bare loop, {case.label}", 0.95, times.speedup("lucidrl", "bare")))
        packing = take_turns({"packed": our_step(case, mixed, True), "padded": our_step(case, mixed, False)})
        rows.append((case.label, f"{times.median('lucidrl'):.3f} s", f"bare: {times.median('bare'):.3f} s"))
        gain = f"padded: {packing.median('padded'):.3f} s, {packing.speedup('packed', 'padded'):.2f} x"
        rows.append((f"{case.label}, mixed lengths, packed", f"{packing.median('packed'):.3f} s", gain))
    print_table(rows, header=("case", "Lucid RL", "compared with"))
    report(claims, options.json)


if __name__ == "__main__":
    main()
