"""Models, prompts and comparisons of the tests of vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from lucidrl.data.messages import render_prompt
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.generation.builtin import BuiltinGenerator
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.vllm import VllmEngine
from lucidrl.models.generation.vllm_settings import is_installed
from lucidrl.models.loading import load_model
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.policy import Policy

needs_vllm = pytest.mark.skipif(not is_installed(), reason="vLLM is not installed; see `make vllm`")
ROUNDING = 1e-3
"""Largest difference of log-probabilities of two float32 implementations."""
QUESTIONS = ("12+30=", "7+8=", "40+41=", "3+3=", "99+1=", "5+67=")


def config_of(model: str = "embedded", **generation: Any) -> PolicyConfig:
    settings = {
        "engine": "vllm",
        "placement": "separate",
        "max_new_tokens": 12,
        "max_concurrent_rows": 32,
        **generation,
    }
    return PolicyConfig(model_name=model, generation=settings)


def write_untied_model(folder: Path) -> str:
    """Write a small random Llama whose head is not tied, with the tokenizer of the embedded model."""
    tokenizer = embedded_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.3,  # far from flat distributions
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def prompts_of(tokenizer: PreTrainedTokenizerBase, questions: tuple[str, ...] = QUESTIONS) -> list[list[int]]:
    return [render_prompt(tokenizer, [{"role": "user", "content": question}]) for question in questions]


def batch_of(prompts: list[list[int]], samples: int = 1, **columns: Any) -> BatchedDataDict[Any]:
    rows = [torch.tensor(prompt) for prompt in prompts for _ in range(samples)]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    keys = torch.arange(len(rows)) - 3
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths, "draw_keys": keys, **columns})


def builtin(model: str, tokenizer: PreTrainedTokenizerBase, config: GenerationConfig) -> BuiltinGenerator:
    scorer = LogprobModel(load_model(model, torch.float32).requires_grad_(False), config.temperature)
    return BuiltinGenerator(scorer, tokenizer, config)


def completions_of(output: BatchedDataDict[Any]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of each completion."""
    ends = output["unpadded_sequence_lengths"].tolist()
    starts = (output["unpadded_sequence_lengths"] - output["generation_lengths"]).tolist()
    return [
        (output["output_ids"][row, start:end].tolist(), output["logprobs"][row, start:end].tolist())
        for row, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def check_greedy_choices(
    prompts: list[list[int]],
    output: BatchedDataDict[Any],
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    temperature: float = 1.0,
) -> int:
    """Compare greedy completions with the choice of the built-in engine after every prefix; return how many tokens.

    Another choice is right if its log-probability is the largest one, within rounding.
    """
    choices = list(zip(prompts, completions_of(output), strict=True))
    prefixes = [prompt + tokens[:end] for prompt, (tokens, _) in choices for end in range(len(tokens))]
    one_token = GenerationConfig(max_new_tokens=1, temperature=temperature)
    expected = completions_of(builtin(model, tokenizer, one_token).generate(batch_of(prefixes), greedy=True))
    found = [pair for _, (tokens, logprobs) in choices for pair in zip(tokens, logprobs, strict=True)]
    others = 0
    for (token, logprob), ([best], [best_logprob]) in zip(found, expected, strict=True):
        assert abs(logprob - best_logprob) < ROUNDING
        others += token != best
    assert others <= len(found) // 50
    return len(found)


def scores(policy: Policy, output: Any) -> torch.Tensor:
    """Log-probabilities of the policy for the completions, in their places; 0 elsewhere."""
    rows = {"input_ids": output["output_ids"], "input_lengths": output["unpadded_sequence_lengths"]}
    scored = policy.with_scores(type(output)(rows), previous=True, reference=False)["prev_logprobs"]
    position = torch.arange(output["output_ids"].shape[1])
    ends = output["unpadded_sequence_lengths"][:, None]
    is_sampled = (position >= ends - output["generation_lengths"][:, None]) & (position < ends)
    return scored * is_sampled


def load(engine: VllmEngine, weights: list[tuple[str, torch.Tensor]]) -> None:
    """Load weights on all ranks, without a refit."""
    engine._engine.collective_rpc("load_rank", args=(weights,))
