"""Continuous batching, compared with batches that start when the whole previous one is complete.

256 chat prompts with different numbers of new tokens: from 8 to 256, log-uniform, in random order. 32 rows are decoded
at a time. Both candidates use the built-in engine: one gets all prompts, the other 32 at a time. Besides seconds, the
benchmark counts steps, which do not depend on the machine.

Known limit, measured on two cores: 1.4 times for the embedded model. Compared with the engine before continuous
batching, 1.2 times (2.7 s and 3.25 s; the target is 2), and 1.42 times for SmolLM2 (43.6 s and 62.1 s, one run each;
the target is 1.5). The number of steps falls from 1,881 to 719, but most steps of whole batches have few rows left and
take half as long. For the embedded model, a step of 32 rows takes 3.6 ms: a quarter for products of the weights, a
quarter for reading keys and values, and most of the rest for the Python code of transformers' forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from harness import Claim, arguments, report, take_turns

from lucidrl.data.messages import render_prompt
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.models.generation.builtin import BuiltinGenerator
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.synchronous import admission_order
from lucidrl.models.loading import DTYPES, load_model, load_tokenizer
from lucidrl.models.logprobs import LogprobModel
from lucidrl.utils.allocator import keep_freed_memory

PROMPTS, ROWS, SHORTEST, LONGEST = 256, 32, 8, 256
EMBEDDED = "embedded-untrained"


def new_generator(name: str, precision: str) -> BuiltinGenerator:
    """A generator whose completions end at their token limit."""
    model, tokenizer = load_model(name, DTYPES[precision]), load_tokenizer(name)
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    config = GenerationConfig(max_new_tokens=LONGEST, max_concurrent_rows=ROWS)
    return BuiltinGenerator(LogprobModel(model.requires_grad_(False), 1.0), tokenizer, config)


def requests(name: str) -> BatchedDataDict:
    tokenizer = load_tokenizer(name)
    texts = [f"Tell me something about the number {number}." for number in range(1000, 1000 + PROMPTS)]
    ids = torch.tensor([render_prompt(tokenizer, [{"role": "user", "content": text}]) for text in texts])
    limits = np.random.default_rng(0).permutation(np.geomspace(SHORTEST, LONGEST, PROMPTS))
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.full((PROMPTS,), ids.shape[1]),
            "max_new_tokens": torch.from_numpy(limits.round().astype(np.int64)),
        }
    )


def measure(name: str, precision: str, target: float, rounds: int) -> list[Claim]:
    generator, data = new_generator(name, precision), requests(name)
    batches = [data.select_indices(rows) for rows in _split(admission_order(data), ROWS)]
    steps = dict.fromkeys(("continuous", "in batches"), 0)
    engine_step = generator.engine.step

    def run(candidate: str, parts: Sequence[BatchedDataDict]) -> None:
        steps[candidate] = 0

        def counted_step():
            steps[candidate] += 1
            return engine_step()

        generator.engine.step = counted_step
        sampled = sum(int(generator.generate(part)["generation_lengths"].sum()) for part in parts)
        assert sampled == int(data["max_new_tokens"].sum())

    candidates = {"continuous": lambda: run("continuous", [data]), "in batches": lambda: run("in batches", batches)}
    times, what = take_turns(candidates, rounds), Path(name).name
    for candidate, count in steps.items():
        rate = int(data["max_new_tokens"].sum()) / times.median(candidate)
        print(f"{what}, {candidate}: {count} steps, {times.median(candidate):.2f} s, {rate:.0f} tokens/s")
    return [
        Claim(f"continuous batching vs whole batches, {what}", target, times.speedup("continuous", "in batches")),
        Claim(f"decoding steps vs whole batches, {what}", 2.5, steps["in batches"] / steps["continuous"]),
    ]


def _split(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def main() -> None:
    options = arguments(
        __doc__,
        model=(str, ".cache/smollm2", "folder of the pretrained model"),
        rounds=(int, 3, "timed rounds"),
        only=(str, "", "measure this model only: embedded or pretrained"),
    )
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as in runs
    claims = []
    if options.only != "pretrained":
        claims += measure(EMBEDDED, "float32", 2.0, options.rounds)
    if options.only != "embedded":
        claims += measure(options.model, "bfloat16", 1.5, 1)
    report(claims, options.json)


if __name__ == "__main__":
    main()
