"""A step of two ranks on Ray compared with the same step of two local ranks.

Both groups exist all the time and take turns; the waiting group uses no CPU. A step covers all that the driver waits
for: generation, scoring and training, and the transfer of batches to the ranks and back.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import torch
from harness import Claim, arguments, print_table, report, take_turns

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.config import ClusterConfig
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.loading import load_tokenizer
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.policy import Policy

ROWS, PROMPT_TOKENS, NEW_TOKENS = 8, 96, 32


def make_prompts() -> BatchedDataDict[Any]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(6, 40, (ROWS, PROMPT_TOKENS), generator=generator)
    return BatchedDataDict({"input_ids": ids, "input_lengths": torch.full((ROWS,), PROMPT_TOKENS)})


def step(policy: Policy, prompts: BatchedDataDict[Any]) -> None:
    completions = policy.generate(prompts)
    lengths = completions["unpadded_sequence_lengths"]
    rows = BatchedDataDict(
        {
            "input_ids": completions["output_ids"],
            "input_lengths": lengths,
            "token_mask": (torch.arange(completions["output_ids"].shape[1]) < lengths[:, None]).float(),
            "sample_mask": torch.ones(ROWS),
        }
    )
    policy.train(policy.with_scores(rows, previous=True, reference=False), NLLLoss())


def main() -> None:
    options = arguments(
        __doc__, model=(str, ".cache/smollm2", "folder of SmolLM2"), rounds=(int, 5, "timed steps per launcher")
    )
    torch.set_num_threads(options.threads)
    prompts, tokenizer = make_prompts(), load_tokenizer(options.model)
    generation = {"max_new_tokens": NEW_TOKENS}
    config = PolicyConfig(model_name=options.model, precision="bfloat16", generation=generation)
    with ExitStack() as stack:
        policies = {
            launcher: stack.enter_context(
                Policy(
                    config,
                    tokenizer,
                    cluster=ClusterConfig(num_workers=2, launcher=launcher, num_threads=1),
                    init_reference_model=False,
                )
            )
            for launcher in ("ray", "local")
        }
        steps = {launcher: partial(step, policy, prompts) for launcher, policy in policies.items()}
        times = take_turns(steps, rounds=options.rounds)
        calls = {launcher: partial(policy.group.run_all, "is_alive") for launcher, policy in policies.items()}
        empty = take_turns(calls, rounds=50, warmups=5)
    rows = [(f"step, {launcher}", f"{times.median(launcher):.2f} s") for launcher in steps] + [
        (f"empty call, {launcher}", f"{1000 * empty.median(launcher):.1f} ms") for launcher in calls
    ]
    print_table(rows, header=("two ranks", "median"))
    ratio = median(ray / local for ray, local in zip(times.seconds["ray"], times.seconds["local"], strict=True))
    report([Claim("step of two ranks: time on Ray / time of local ranks", 1.1, ratio, at_most=True)], options.json)


if __name__ == "__main__":
    main()
