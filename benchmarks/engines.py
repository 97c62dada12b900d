"""Sampled tokens per second of the built-in engine, vLLM and transformers' `generate`, side by side.

The engines take turns on the same 4 prompts of 64 tokens, with 16 samples each (embedded models) or 8. Sampled tokens
are counted, up to each completion's end. vLLM is not in the environment of `make bench`: run this with the environment
of `make vllm`.

Known limit, measured on two cores: SmolLM2 1.02 times vLLM's speed with 32 new tokens and 0.71 times with 128, the
embedded model 1.43 and 0.88 times; the target is 1.2. SmolLM2 spends 60 % of a step in products of the weights. vLLM
packs the weights for them; packed products are bit-identical and 1.2 to 1.35 times as fast with 32 rows, but take twice
the memory of the weights and must be packed again after each update. Attention is another fifth with long completions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import Claim, arguments, print_table, report, take_turns

from lucidrl.data.messages import render_prompt
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.models import embedded
from lucidrl.models.generation.builtin import BuiltinGenerator
from lucidrl.models.generation.vllm import VllmEngine
from lucidrl.models.loading import DTYPES, load_model, load_tokenizer
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.policy.config import EMBEDDED_MODELS, PolicyConfig
from lucidrl.utils.allocator import keep_freed_memory

QUESTIONS = ("What is 12+30?", "What is 7+8?", "What is 40+41?", "What is 3+3?")
TEXT = (
    "This conversation is about numbers, and how they are added, subtracted and compared. Answer each question in full "
    "sentences. Explain every step of the computation, name the rule that you used, and check the result with another "
    "method before you give the final answer to the user."
)
PROMPT_TOKENS, PAD = 64, 0


def peer(name: str, dtype: torch.dtype) -> Any:
    """The model with transformers' own attention."""
    from transformers import AutoModelForCausalLM

    if name in EMBEDDED_MODELS:
        warm = name == EMBEDDED_MODELS[0]
        return embedded.embedded_model(warm=warm, seed=0, attn_implementation="sdpa").to(dtype).eval()
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, local_files_only=True).eval()


def rows_of(tokenizer: Any, samples: int) -> BatchedDataDict[Any]:
    messages = [[{"role": "user", "content": f"{question} {TEXT}"}] for question in QUESTIONS]
    prompts = [render_prompt(tokenizer, message)[:PROMPT_TOKENS] for message in messages]
    assert all(len(prompt) == PROMPT_TOKENS for prompt in prompts)
    rows = [torch.tensor(prompt) for prompt in prompts for _ in range(samples)]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths})


def candidates(name: str, precision: str, new_tokens: int, samples: int) -> dict[str, Callable[[], int]]:
    """Engine → a function that completes the prompts once and returns the number of sampled tokens."""
    tokenizer = load_tokenizer(name)
    generation = {"engine": "vllm", "placement": "separate", "max_new_tokens": new_tokens}
    config = PolicyConfig(model_name=name, precision=precision, generation=generation)
    rows, calls = rows_of(tokenizer, samples), itertools.count()
    builtin = BuiltinGenerator(
        LogprobModel(load_model(name, DTYPES[precision]).requires_grad_(False), 1.0), tokenizer, config.generation
    )
    engine = VllmEngine(config, tokenizer, 0, None)
    theirs = peer(name, DTYPES[precision])
    # Rows of transformers are padded on the left.
    width = int(rows["input_lengths"].max())
    pairs = list(zip(rows["input_ids"], rows["input_lengths"].tolist(), strict=True))
    padded = torch.stack([torch.cat([row.new_full((width - length,), PAD), row[:length]]) for row, length in pairs])
    mask = torch.stack([(torch.arange(width) >= width - length).long() for _, length in pairs])
    end = tokenizer.eos_token_id

    def ours(generator: Any) -> int:
        return int(generator.generate(rows)["generation_lengths"].sum())

    def transformers() -> int:
        torch.manual_seed(next(calls))
        output = theirs.generate(
            padded,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=new_tokens,
            eos_token_id=end,
            pad_token_id=end,
        )[:, width:]
        is_after_end = (output == end).cumsum(dim=1) > 1
        return int((~is_after_end).sum())

    return {"built-in": lambda: ours(builtin), "vLLM": lambda: ours(engine), "transformers": transformers}


def measure(name: str, precision: str, new_tokens: int, samples: int, rounds: int) -> tuple[list[float], float]:
    """Median of sampled tokens per second of each engine, over the rounds, and the speed of ours compared with vLLM."""
    tokens: dict[str, list[int]] = {}

    def counted(engine: str, run: Callable[[], int]) -> Callable[[], None]:
        tokens[engine] = []
        return lambda: tokens[engine].append(run())

    runs = {engine: counted(engine, run) for engine, run in candidates(name, precision, new_tokens, samples).items()}
    times = take_turns(runs, rounds)
    rates = {
        engine: [count / seconds for count, seconds in zip(counts[-rounds:], times.seconds[engine], strict=True)]
        for engine, counts in tokens.items()
    }
    ratios = [ours / theirs for ours, theirs in zip(rates["built-in"], rates["vLLM"], strict=True)]
    return [median(of_engine) for of_engine in rates.values()], median(ratios)


def main() -> None:
    options = arguments(
        __doc__,
        models=(str, "embedded-untrained", "embedded models or model folders, separated by commas"),
        lengths=(str, "32,128", "most new tokens, separated by commas"),
        rounds=(int, 3, "timed rounds"),
    )
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as in runs
    header = ("model", "precision", "rows", "new tokens at most", "built-in", "vLLM", "transformers")
    table, claims = [], []
    for name, new_tokens in itertools.product(options.models.split(","), map(int, options.lengths.split(","))):
        precision, samples = ("float32", 16) if name in EMBEDDED_MODELS else ("bfloat16", 8)
        rates, ratio = measure(name, precision, new_tokens, samples, options.rounds)
        what = Path(name).name, precision, str(len(QUESTIONS) * samples), str(new_tokens)
        table.append((*what, *(f"{rate:,.0f}" for rate in rates)))
        claims.append(Claim(f"built-in engine vs vLLM on a CPU, {what[0]}, {new_tokens} new tokens", 1.2, ratio))
    print_table(table, header)
    report(claims, options.json)


if __name__ == "__main__":
    main()
