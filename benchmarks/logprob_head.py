"""The chunked head compared with a float32 log-softmax over all logits: time and peak extra memory.

Hidden size 576, vocabulary 49,152 (the head of SmolLM2), in float32 and bfloat16. Both sides compute the same
log-probabilities; training adds the gradients of hidden states and head. Times are for 2048 tokens. Memory is for 8192
tokens, a usual micro-batch: with few tokens the head's gradient (108 MiB in float32, on both sides) dominates.

At 2048 tokens float32 training takes more of the full head's memory, because that gradient is a third of it.

Known limit: on one machine without bfloat16 instructions, float32 scoring was 1.05 times as fast as the full head, and
training 0.94 times, where it was 0.79 times with one product of gradients per chunk. On a second machine float32
scoring was 0.90 to 0.96 times as fast. On a third one with bfloat16 instructions, float32 scoring was 1.05 times as
fast and training 0.88 times, bfloat16 scoring 0.92 and training 1.53 times. Matrix products of a chunk's 170 rows are
less efficient than one of 2048 rows, and float32 needs no conversion that chunks could save. Training evaluates the
head again for every second chunk, which the full head does not. Logits of all chunks would take more than a quarter of
the full head's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from harness import NOISE, Claim, arguments, peak_extra_bytes, print_table, report, take_turns
from torch import nn

from lucidrl.models.head import LogitTransform, token_logprobs

TIMED_TOKENS, MEASURED_TOKENS, HIDDEN, VOCABULARY = 2048, 8192, 576, 49152


class Problem:
    """One head, its input, and the candidates that evaluate it."""

    def __init__(self, dtype: torch.dtype, tokens: int):
        torch.manual_seed(0)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False).to(dtype)
        self.hidden = torch.randn(tokens, HIDDEN).to(dtype).requires_grad_()
        self.targets = torch.randint(VOCABULARY, (tokens,))
        self.upstream = torch.randn(tokens)

    def full(self) -> torch.Tensor:
        logits = self.head(self.hidden).float()
        return torch.log_softmax(logits, dim=-1).gather(1, self.targets[:, None])[:, 0]

    def chunked(self, recompute: bool = False) -> torch.Tensor:
        return token_logprobs(self.hidden, self.head, self.targets, LogitTransform(), recompute=recompute).logprobs

    def scoring(self) -> dict[str, Callable[[], object]]:
        return {name: torch.no_grad()(run) for name, run in {"full": self.full, "chunked": self.chunked}.items()}

    def training(self) -> dict[str, Callable[[], object]]:
        def trained(logprobs: Callable[[], torch.Tensor]) -> Callable[[], None]:
            def run() -> None:
                logprobs().backward(self.upstream)
                self.hidden.grad = self.head.weight.grad = None

            return run

        recompute = partial(self.chunked, recompute=True)
        return {"full": trained(self.full), "chunked": trained(self.chunked), "recompute": trained(recompute)}


def measure(dtype: torch.dtype) -> list[Claim]:
    label = str(dtype).removeprefix("torch.")
    claims, rows = [], []
    for phase, candidates_of in (("scoring", Problem.scoring), ("training", Problem.training)):
        times = take_turns(candidates_of(Problem(dtype, TIMED_TOKENS)))
        large = candidates_of(Problem(dtype, MEASURED_TOKENS))
        memory = {name: peak_extra_bytes(run) for name, run in large.items()}
        for name in large:
            rows.append((label, phase, name, f"{times.median(name):.3f} s", f"{memory[name] / 2**20:.0f} MiB"))
            if name == "full":
                continue
            speed, share = TARGETS[phase, name]
            what = f"head, {label}, {phase}" + (" with recompute" if name == "recompute" else "")
            claims += [
                Claim(f"{what}: speed", speed, times.speedup(name, "full")),
                Claim(f"{what}: memory", share, memory[name] / memory["full"], at_most=True),
            ]
    print_table(rows, header=("dtype", "phase", "head", "median", "peak extra memory"))
    return claims


TARGETS = {
    ("scoring", "chunked"): (NOISE, 1 / 8),
    ("training", "chunked"): (NOISE, 1 / 4),
    ("training", "recompute"): (0.65, 1 / 8),
}
"""(minimum speed, maximum memory), both relative to the full head."""


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(options.threads)
    claims = []
    for dtype in (torch.float32, torch.bfloat16):
        claims += measure(dtype)
    report(claims, options.json)


if __name__ == "__main__":
    main()
