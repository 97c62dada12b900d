"""Training with shared prefixes computed once, compared with every row computed alone.

SmolLM2 in bfloat16, one optimizer step with a policy-gradient loss. The cases are 4 prompts x 8 samples with short and
long prompts, a multi-turn conversation that branches (a root and 4 binary branchings, segments of 64 tokens), and rows
without common tokens. The token counts limit what can be gained: 2.4 (short), 4.5 (long) and 2.58 (multi-turn) times
fewer tokens. Memory is the peak of tensors that one micro-batch of a prompt's 8 samples allocates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import Claim, arguments, peak_extra_bytes, print_table, report, take_turns

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.losses.config import ClippedPGConfig
from lucidrl.losses.policy_gradient import ClippedPGLoss
from lucidrl.models.loading import load_tokenizer
from lucidrl.models.policy.config import OptimizerConfig, PolicyConfig
from lucidrl.models.policy.dtensor_policy_worker import DTensorPolicyWorker

PROMPTS, SAMPLES = 4, 8
TURN, BRANCHINGS = 64, 4


def group_batch(prompts: int, prompt: int, new: int) -> BatchedDataDict[Any]:
    """Prompts with 8 samples each."""
    rows = [random_tokens(prompt) for _ in range(prompts)]
    return batch_of([torch.cat((row, random_tokens(new))) for row in rows for _ in range(SAMPLES)], prompt)


def branching_batch() -> BatchedDataDict[Any]:
    """A conversation of which every turn has two continuations."""
    rows = [random_tokens(TURN)]
    for _ in range(BRANCHINGS):
        rows = [torch.cat((row, random_tokens(TURN))) for row in rows for _ in range(2)]
    return batch_of(rows, TURN)


def random_tokens(length: int) -> torch.Tensor:
    return torch.randint(100, 40_000, (length,))


def batch_of(rows: list[torch.Tensor], num_prompt_tokens: int) -> BatchedDataDict[Any]:
    ids = torch.stack(rows)
    mask = (torch.arange(ids.shape[1]) >= num_prompt_tokens).float().expand_as(ids)
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.full((len(ids),), ids.shape[1]),
            "token_mask": mask,
            "sample_mask": torch.ones(len(ids)),
            "advantages": torch.randn(len(ids)),
            "generation_logprobs": torch.full(ids.shape, -1.0),
        }
    )


def worker(model: str, share: bool) -> DTensorPolicyWorker:
    config = PolicyConfig(
        model_name=model,
        precision="bfloat16",
        share_prefixes=share,
        optimizer=OptimizerConfig(kwargs={"lr": 1e-6}),
    )
    return DTensorPolicyWorker(config, load_tokenizer(model), init_reference_model=False)


def main() -> None:
    options = arguments(__doc__, model=(str, ".cache/smollm2", "folder of SmolLM2"), rounds=(int, 5, "timed rounds"))
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    cases = {
        "prompts of 48 tokens, 24 new": (group_batch(PROMPTS, 48, 24), 1.6),
        "prompts of 512 tokens, 64 new": (group_batch(PROMPTS, 512, 64), 3.3),
        "multi-turn, 4 branchings": (branching_batch(), 2.0),
        "nothing in common": (group_batch(1, 1, 143), 0.98),
    }
    workers = {"shared": worker(options.model, True), "alone": worker(options.model, False)}
    loss = ClippedPGLoss(ClippedPGConfig(), on_policy=True)
    claims, table = [], []

    def training(name: str, batch: BatchedDataDict[Any], mbs: int | None = None) -> Callable[[], object]:
        return lambda: workers[name].train(batch, loss, mbs=mbs)

    for label, (batch, target) in cases.items():
        times = take_turns({name: training(name, batch) for name in workers}, rounds=options.rounds)
        speedup = times.speedup("shared", "alone")
        claims.append(Claim(f"shared prefixes, training: {label}", target, speedup))
        table.append((label, f"{times.median('shared'):.2f} s", f"{times.median('alone'):.2f} s", f"{speedup:.2f} x"))
    group = group_batch(1, 512, 64)
    peak = {name: peak_extra_bytes(training(name, group, mbs=SAMPLES)) for name in workers}
    share = peak["shared"] / peak["alone"]
    claims.append(Claim("shared prefixes, 512 + 64 tokens: peak memory", 0.4, share, at_most=True))
    table.append(("memory of 512 + 64", *(f"{peak[name] / 2**20:.0f} MiB" for name in workers), f"{share:.2f} x"))
    print_table(table, header=("case", "shared", "alone", "ratio"))
    report(claims, options.json)


if __name__ == "__main__":
    main()
