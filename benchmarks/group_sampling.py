"""Sampling 8 completions per prompt, compared with `generate` of transformers, in tokens per second.

SmolLM2-135M-Instruct in bfloat16, 16 chat prompts x 8 samples, 64 new tokens each, temperature 1 over the full
vocabulary. Neither side has an end-of-sequence id, so every completion has 64 tokens; the benchmark checks the counts.
transformers uses its default cache and attention (sdpa), with `num_return_sequences=8`.
"""

from __future__ import annotations

import torch
from harness import Claim, arguments, report, take_turns
from transformers import AutoModelForCausalLM

from lucidrl.data.messages import render_prompt
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.models.generation.builtin import BuiltinGenerator
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.loading import load_model, load_tokenizer
from lucidrl.models.logprobs import LogprobModel
from lucidrl.utils.allocator import keep_freed_memory

PROMPTS, SAMPLES, NEW_TOKENS = 16, 8, 64


def main() -> None:
    options = arguments(__doc__, model=(str, ".cache/smollm2", "folder of the model"))
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as in runs
    tokenizer = load_tokenizer(options.model)
    texts = [f"Tell me something about the number {number}, please." for number in range(10, 10 + PROMPTS)]
    prompts = torch.tensor([render_prompt(tokenizer, [{"role": "user", "content": text}]) for text in texts])
    tokenizer.eos_token = None

    theirs = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    our_model = load_model(options.model, torch.bfloat16)
    for model in (theirs, our_model):
        model.generation_config.eos_token_id = None
    generator = BuiltinGenerator(
        LogprobModel(our_model, temperature=1.0), tokenizer, GenerationConfig(max_new_tokens=NEW_TOKENS)
    )
    rows = prompts.repeat_interleave(SAMPLES, dim=0)
    data = BatchedDataDict({"input_ids": rows, "input_lengths": torch.full((len(rows),), rows.shape[1])})
    sampled = dict.fromkeys(("lucidrl", "transformers"), 0)

    def run_ours() -> None:
        sampled["lucidrl"] = int(generator.generate(data)["generation_lengths"].sum())

    @torch.no_grad()
    def run_theirs() -> None:
        output = theirs.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            num_return_sequences=SAMPLES,
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=tokenizer.pad_token_id,
        )
        sampled["transformers"] = (output.shape[1] - prompts.shape[1]) * len(output)

    times = take_turns({"lucidrl": run_ours, "transformers": run_theirs})
    print(f"{prompts.shape[1]} tokens per prompt; sampled tokens: {sampled}")
    assert len(set(sampled.values())) == 1
    for name, count in sampled.items():
        print(f"{name}: {count / times.median(name):.0f} tokens/s")
    report([Claim("group sampling vs transformers", 2.6, times.speedup("lucidrl", "transformers"))], options.json)


if __name__ == "__main__":
    main()
