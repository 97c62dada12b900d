"""A training step and a scoring pass on several local ranks compared with one rank, and the peak memory per rank.

The benchmark makes no claims: on one machine the ranks share the cores. The table shows how much time a layout costs
(in collectives and smaller matrix products) and how much memory it saves. CPU ranks hold their weights in host memory
anyway, so the rows of CPU offload show only its overhead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from harness import arguments, print_table, report

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.config import ClusterConfig
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.loading import load_tokenizer
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.policy import Policy

ROWS, TOKENS = 8, 128
PADDED: dict[str, Any] = {"sequence_packing": {"enabled": False}, "train_micro_batch_size": 4, "logprob_batch_size": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "FSDP2, dp=2": (2, {}),
    "FSDP2, cp=2": (2, {"dtensor_cfg": {"context_parallel_size": 2}}),
    # 3 divides SmolLM2's 9 attention heads and 3 key-value heads; 2 does not.
    "FSDP2, tp=3 (three ranks)": (3, {"dtensor_cfg": {"tensor_parallel_size": 3}}),
    "FSDP2, dp=2, activation checkpointing": (2, {"dtensor_cfg": {"activation_checkpointing": True}}),
    "FSDP2, dp=2, CPU offload": (2, {"dtensor_cfg": {"cpu_offload": True}}),
    "FSDP1, dp=2": (2, {"dtensor_cfg": {"enabled": False}}),
    "FSDP1, dp=2, CPU offload": (2, {"dtensor_cfg": {"enabled": False, "cpu_offload": True}}),
}


def make_batch() -> BatchedDataDict[Any]:
    torch.manual_seed(0)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(6, 100, (ROWS, TOKENS)),
            "input_lengths": torch.full((ROWS,), TOKENS),
            "token_mask": torch.ones(ROWS, TOKENS),
            "sample_mask": torch.ones(ROWS),
        }
    )


def measured(policy: Policy, work: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median seconds of `work`, and the peak memory of any rank in GiB."""
    work()
    policy.group.run_all("reset_peak_memory_stats")
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    peak_mb = max(info["memory_peak_mb"] for info in policy.group.run_all("get_gpu_info"))
    return median(seconds), peak_mb / 1024


def main() -> None:
    options = arguments(
        __doc__, model=(str, ".cache/smollm2", "folder of SmolLM2"), rounds=(int, 3, "timed rounds per layout")
    )
    torch.set_num_threads(options.threads)
    batch, rows = make_batch(), []
    for name, (num_workers, changes) in LAYOUTS.items():
        config = PolicyConfig(model_name=options.model, precision="bfloat16", **PADDED, **changes)
        cluster = ClusterConfig(num_workers=num_workers)
        with Policy(config, load_tokenizer(options.model), cluster=cluster, init_reference_model=False) as policy:
            train_s, train_gib = measured(policy, lambda policy=policy: policy.train(batch, NLLLoss()), options.rounds)
            score = lambda policy=policy: policy.with_scores(batch, previous=True, reference=False)  # noqa: E731
            score_s, score_gib = measured(policy, score, options.rounds)
        rows.append((name, f"{train_s:.2f} s", f"{train_gib:.2f} GiB", f"{score_s:.2f} s", f"{score_gib:.2f} GiB"))
        print_table(rows[-1:], header=("layout", "train", "peak memory", "get_logprobs", "peak memory"))
    print()
    print_table(rows, header=("layout", "train", "peak memory", "get_logprobs", "peak memory"))
    report([], options.json)


if __name__ == "__main__":
    main()
