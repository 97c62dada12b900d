"""vLLM completes prompts as the built-in engine does: the same choices, log-probabilities, ends and columns."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lucidrl.errors import ConfigError, DataError
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.generation.vllm import VllmEngine
from lucidrl.models.loading import load_tokenizer
from lucidrl.models.policy.policy import Policy
from tests.vllm.vllm_cases import (
    ROUNDING,
    batch_of,
    builtin,
    check_greedy_choices,
    completions_of,
    config_of,
    needs_vllm,
    prompts_of,
    scores,
)

pytestmark = needs_vllm
TOKENIZER = embedded_tokenizer()
PROMPTS = prompts_of(TOKENIZER)
WARM = {"temperature": 1.7, "top_k": 5, "top_p": 0.9, "stop_strings": ["0"], "stop_token_ids": [20]}
"""Everything that changes the sampling."""


@pytest.fixture(scope="module")
def start():
    """Starts an engine. All are shut down at the end, because engines of one process share global state of vLLM."""
    engines = []

    def start_engine(config: Any, tokenizer: Any = TOKENIZER) -> VllmEngine:
        engines.append(VllmEngine(config, tokenizer, 0, None))
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.shutdown()


@pytest.fixture(scope="module")
def engine(start):
    return start(config_of())


@pytest.fixture(scope="module")
def warm_engine(start):
    return start(config_of(**WARM))


@pytest.fixture(scope="module")
def policies():
    """The trained forward pass at both temperatures."""
    return {
        temperature: Policy(config_of(temperature=temperature), TOKENIZER, init_optimizer=False)
        for temperature in (1.0, WARM["temperature"])
    }


def test_greedy_choices_are_those_of_the_builtin_engine_after_every_prefix(engine):
    output = engine.generate(batch_of(PROMPTS), greedy=True)
    assert check_greedy_choices(PROMPTS, output, "embedded", TOKENIZER) > 2 * len(PROMPTS)


def test_columns_and_dtypes_are_those_of_the_builtin_engine(engine):
    rows = batch_of(PROMPTS)
    output = engine.generate(rows, greedy=True)
    expected = builtin("embedded", TOKENIZER, config_of().generation).generate(rows, greedy=True)
    assert {name: (column.dtype, column.shape) for name, column in output.items()} == {
        name: (column.dtype, column.shape) for name, column in expected.items()
    }
    assert torch.equal(output["output_ids"], expected["output_ids"])


def test_logprobs_are_those_of_the_full_distribution_at_the_temperature(engine, warm_engine, policies):
    rows = batch_of(PROMPTS, samples=8)
    for generator, temperature in ((engine, 1.0), (warm_engine, WARM["temperature"])):
        for greedy in (False, True):
            output = generator.generate(rows, greedy=greedy)
            expected = scores(policies[temperature], output)
            assert (output["logprobs"] - expected).abs().max() < ROUNDING, (temperature, greedy)
            assert ((output["logprobs"] != 0) == (expected != 0)).all()


def test_a_text_has_the_log_probabilities_of_the_policy(engine, warm_engine, policies):
    rows = batch_of(PROMPTS[:1])
    for generator, temperature in ((engine, 1.0), (warm_engine, WARM["temperature"])):
        expected = policies[temperature].with_scores(rows.copy(), previous=True, reference=False)["prev_logprobs"]
        assert (generator.score(PROMPTS[0]) - expected[0, 1:]).abs().max() < ROUNDING


def test_draw_keys_alone_decide_the_samples(engine):
    rows = batch_of(PROMPTS, samples=6)
    order = torch.randperm(rows.size, generator=torch.Generator().manual_seed(0))
    shuffled = engine.generate(rows.select_indices(order))
    completions = completions_of(engine.generate(rows))
    assert [completions[row][0] for row in order] == [tokens for tokens, _ in completions_of(shuffled)]
    other = rows.copy()
    other["draw_keys"] = rows["draw_keys"] + 1000
    assert completions != completions_of(engine.generate(other))


def test_top_k_and_top_p_limit_the_samples(start):
    """With top_k=1 every draw is the greedy choice."""
    engine = start(config_of(top_k=1))
    rows = batch_of(PROMPTS, samples=4)
    assert torch.equal(engine.generate(rows)["output_ids"], engine.generate(rows, greedy=True)["output_ids"])


@pytest.mark.parametrize(
    "stops",
    [
        {},
        {"stop_strings": [None, ["2"], [], ["0"], ["99"], ["7"]]},
        {"max_new_tokens": torch.tensor([1, 3, 12, 50, 2, 5])},
    ],
    ids=["configured", "per row", "limits per row"],
)
def test_completions_end_where_those_of_the_builtin_engine_end(warm_engine, engine, stops):
    """At stop strings, stop tokens and the limit; the tokens that ended a completion are kept."""
    generator, settings = (engine, {}) if stops else (warm_engine, WARM)
    rows = batch_of(PROMPTS, **stops)
    output = generator.generate(rows, greedy=True)
    expected = builtin("embedded", TOKENIZER, config_of(**settings).generation).generate(rows, greedy=True)
    for name in ("output_ids", "generation_lengths", "truncated"):
        assert torch.equal(output[name], expected[name]), name


def test_the_limit_of_tokens_and_the_context_truncate_completions(start):
    engine = start(config_of(max_new_tokens=2, vllm={"max_model_len": 64}))
    long = [PROMPTS[0], [6] * 63]
    output = engine.generate(batch_of(long), greedy=True)
    assert output["generation_lengths"].tolist() == [2, 1]
    assert output["truncated"].tolist() == [True, True]
    with pytest.raises(DataError, match="the prompt of row 0 has 64 tokens; give it at least 1 and at most 63"):
        engine.generate(batch_of([[6] * 64]))


def test_more_prompt_tokens_than_a_batch_of_vllm_do_not_split_a_prompt(engine):
    samples = 3000 // sum(map(len, PROMPTS))
    output = engine.generate(batch_of(PROMPTS, samples))
    assert int((output["unpadded_sequence_lengths"] - output["generation_lengths"]).sum()) > 2500
    assert output["generation_lengths"].min() > 0
    with pytest.raises(ConfigError, match="enable_chunked_prefill=true: vLLM cannot split the prompt of a seeded row"):
        VllmEngine(config_of(vllm={"enable_chunked_prefill": True}), TOKENIZER, 0, None)


def test_no_rows_give_no_completions(engine):
    assert engine.generate(batch_of(PROMPTS).select_indices([]))["output_ids"].shape == (0, 0)


def test_settings_that_vllm_refuses_are_one_sentence(start):
    with pytest.raises(ConfigError, match=r"vLLM cannot start: .*max_model_len.*change policy\.generation\.vllm"):
        start(config_of(vllm={"max_model_len": 100_000}))


@pytest.mark.smollm2
def test_greedy_choices_of_a_pretrained_model_are_those_of_the_builtin_engine(start):
    folder = str(Path(os.environ.get("LUCIDRL_SMOLLM2", ".cache/smollm2")))
    tokenizer = load_tokenizer(folder)
    prompts = prompts_of(tokenizer, ("What is the capital of France?", "Name three colors.", "What is 12+30?"))
    engine = start(config_of(folder, max_new_tokens=24, vllm={"max_model_len": 256}), tokenizer)
    output = engine.generate(batch_of(prompts), greedy=True)
    assert check_greedy_choices(prompts, output, folder, tokenizer) > 20
