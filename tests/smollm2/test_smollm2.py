"""A real pretrained model: SmolLM2-135M-Instruct, written by `make smollm2`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lucidrl.data.messages import render_prompt
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.config import ClusterConfig
from lucidrl.losses.nll import NLLLoss
from lucidrl.models.generation.builtin import BuiltinGenerator
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.loading import load_model, load_tokenizer, stop_token_ids
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.policy.config import OptimizerConfig, PolicyConfig
from lucidrl.models.policy.policy import Policy

pytestmark = pytest.mark.smollm2

QUESTIONS = ("What is the capital of France?", "Name three colors.", "What is 12+30? Answer with the number only.")
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def folder() -> str:
    path = Path(os.environ.get("LUCIDRL_SMOLLM2", ".cache/smollm2"))
    assert (path / "config.json").is_file(), f"no model in {path}; write it with `make smollm2`"
    return str(path)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, torch.float32)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[list[int]]:
    return [render_prompt(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]


def batch_of(prompts: list[list[int]], samples: int) -> BatchedDataDict:
    rows = [torch.tensor(prompt) for prompt in prompts for _ in range(samples)]
    lengths = torch.tensor([len(row) for row in rows])
    return BatchedDataDict(
        {"input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), "input_lengths": lengths}
    )


@torch.no_grad()
def test_greedy_tokens_equal_those_of_transformers(model, tokenizer, prompts):
    generator = BuiltinGenerator(LogprobModel(model, 1.0), tokenizer, GenerationConfig(max_new_tokens=NEW_TOKENS))
    output = generator.generate(batch_of(prompts, samples=2), greedy=True)
    for row, prompt in enumerate(prompts):
        model.config._attn_implementation = "sdpa"
        try:
            theirs = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=sorted(stop_token_ids(model, tokenizer)),
            )[0]
        finally:
            model.config._attn_implementation = "lucidrl"
        for sample in (2 * row, 2 * row + 1):
            ours = output["output_ids"][sample, : output["unpadded_sequence_lengths"][sample]]
            assert torch.equal(ours, theirs)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_generation_and_scoring_agree(model, tokenizer, prompts, temperature):
    scorer = LogprobModel(model, temperature)
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, temperature=temperature)
    output = BuiltinGenerator(scorer, tokenizer, config).generate(batch_of(prompts, samples=4))
    scored = scorer(output["output_ids"], output["unpadded_sequence_lengths"], packed=True).logprobs
    is_sampled = output["logprobs"] != 0
    ratio = torch.exp(scored - output["logprobs"])[is_sampled]
    assert torch.allclose(ratio, torch.ones_like(ratio), rtol=0, atol=1e-4)


@torch.no_grad()
def test_logprobs_equal_those_of_transformers(model, prompts):
    batch = batch_of(prompts, samples=1)
    ours = LogprobModel(model, 1.0)(batch["input_ids"], batch["input_lengths"]).logprobs
    model.config._attn_implementation = "sdpa"
    try:
        for row, prompt in enumerate(prompts):
            logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, :-1]
            theirs = logits.log_softmax(-1).gather(1, torch.tensor(prompt)[1:, None])[:, 0]
            assert torch.allclose(ours[row, 1 : len(prompt)], theirs, rtol=0, atol=1e-5)
    finally:
        model.config._attn_implementation = "lucidrl"


def test_two_ranks_train_as_one_rank(folder, tokenizer, prompts):
    config = PolicyConfig(
        model_name=folder, optimizer=OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 1e-3}), max_grad_norm=None
    )
    results = []
    for num_workers in (1, 2):
        batch = batch_of(prompts, samples=2)
        batch["token_mask"] = torch.arange(batch["input_ids"].shape[1]) < batch["input_lengths"][:, None]
        batch["sample_mask"] = torch.ones(batch.size)
        cluster = ClusterConfig(num_workers=num_workers)
        with Policy(config, tokenizer, cluster=cluster, init_reference_model=False) as policy:
            trained = [policy.train(batch, NLLLoss()) for _ in range(2)]
            scored = policy.with_scores(batch, previous=True, reference=False)["prev_logprobs"]
        results.append(([result.loss for result in trained], [result.grad_norm for result in trained], scored))
    (losses, norms, alone), (shared_losses, shared_norms, shared) = results
    assert shared_losses == pytest.approx(losses, rel=5e-5)
    assert shared_norms == pytest.approx(norms, rel=5e-4)
    torch.testing.assert_close(shared, alone, rtol=0, atol=5e-4)
