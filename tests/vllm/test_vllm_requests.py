"""vLLM behind the interface of engines: requests come and go at any time, also while the weights change."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from lucidrl.errors import DataError
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.generation.interfaces import Completion, GenerationRequest
from lucidrl.models.generation.vllm import VllmEngine
from lucidrl.models.loading import load_model
from lucidrl.models.logprobs import LogprobModel
from tests.vllm.vllm_cases import ROUNDING, batch_of, completions_of, config_of, load, needs_vllm, prompts_of

pytestmark = needs_vllm
TOKENIZER = embedded_tokenizer()
PROMPTS = prompts_of(TOKENIZER)
LONG = TOKENIZER.encode("12+3=" * 40)
"""Fills blocks of the prefix cache."""
IN_FLIGHT = ("keep", "recompute", "finish", "abort")


@pytest.fixture(scope="module")
def engine():
    engine = VllmEngine(config_of(max_new_tokens=8), TOKENIZER, 0, None)
    yield engine
    engine.shutdown()


@pytest.fixture
def endless(engine, monkeypatch):
    """The engine; completions end at the limit only."""
    monkeypatch.setattr(engine, "_stop_ids", [])
    return engine


def request(name: str, prompt: list[int], **options: Any) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_ids=torch.tensor(prompt), draw_key=7, **options)


def finish(engine: VllmEngine) -> dict[str, Completion]:
    found: dict[str, Completion] = {}
    while engine.num_unfinished:
        found |= {completion.request_id: completion for completion in engine.step()}
    return found


def test_requests_that_come_one_by_one_are_completed_as_in_a_batch(engine):
    expected = completions_of(engine.generate(batch_of(PROMPTS), greedy=True))
    found: dict[str, Completion] = {}
    for number, prompt in enumerate(PROMPTS):
        engine.submit([request(str(number), prompt, greedy=True)])
        found |= {completion.request_id: completion for completion in engine.step()}
    found |= finish(engine)
    assert engine.step() == []
    for number, (tokens, logprobs) in enumerate(expected):
        assert found[str(number)].token_ids.tolist() == tokens
        assert found[str(number)].logprobs.tolist() == pytest.approx(logprobs, abs=ROUNDING)


def test_aborted_requests_are_forgotten_and_the_others_go_on(endless):
    engine = endless
    engine.submit([request(name, LONG, max_new_tokens=6) for name in ("first", "second", "third")])
    engine.step()
    engine.abort(["first", "unknown"])
    assert engine.num_unfinished == 2
    engine.submit([request("first", PROMPTS[0])])  # the id is free again
    assert finish(engine).keys() == {"first", "second", "third"}
    with pytest.raises(DataError, match=r"the prompt of bad has 0 tokens"):
        engine.submit([request("good", PROMPTS[0]), request("bad", [])])
    assert engine.num_unfinished == 0


def test_a_text_is_scored_beside_running_rows(endless):
    engine = endless
    alone = engine.score(PROMPTS[0])
    engine.submit([request(str(number), LONG, max_new_tokens=3) for number in range(3)])
    torch.testing.assert_close(engine.score(PROMPTS[0]), alone, rtol=0, atol=ROUNDING)
    assert finish(engine).keys() == {"0", "1", "2"}


@pytest.fixture(scope="module")
def models():
    """The embedded model with different noise, which makes it unsure."""
    noisy = []
    for seed in range(2):
        model = load_model("embedded", torch.float32).requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
        noisy.append(model)
    return noisy


def scored(model: Any, prompt: list[int], completion: Completion) -> torch.Tensor:
    row = torch.tensor([prompt + completion.token_ids.tolist()])
    logprobs: torch.Tensor = LogprobModel(model, 1.0)(row, torch.tensor([row.shape[1]])).logprobs
    return logprobs[0, len(prompt) :]


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
def test_rows_in_flight_when_the_weights_change(endless, models, in_flight, monkeypatch):
    engine, (old, new) = endless, models
    monkeypatch.setattr(engine, "_config", engine._config.model_copy(update={"in_flight": in_flight, "top_k": 3}))
    with engine.updating(0):
        load(engine, tied(old))
    prompts = {"a": LONG, "b": LONG[:30], "waiting": LONG, "after": LONG}
    engine.submit([request(name, prompts[name]) for name in "ab"])
    for _ in range(3):
        engine.step()
    engine.submit([request("waiting", LONG)])
    with engine.updating(1):
        load(engine, tied(new))
    engine.submit([request("after", LONG)])
    found = finish(engine)
    assert found.keys() == prompts.keys()
    for name, completion in found.items():
        of_old, of_new = (scored(model, prompts[name], completion) for model in (old, new))
        versions, difference = completion.policy_versions, (completion.logprobs - of_new).abs()
        assert (of_old - of_new).abs().max() > 10 * ROUNDING
        if name in ("waiting", "after") or in_flight == "abort":
            assert set(versions.tolist()) == {1}
            assert difference.max() < ROUNDING
        elif in_flight == "finish":
            assert set(versions.tolist()) == {0}
            assert (completion.logprobs - of_old).abs().max() < ROUNDING
        else:
            num_old = int((versions == 0).sum())
            assert 0 < num_old < len(versions)
            assert versions.tolist() == [0] * num_old + [1] * (len(versions) - num_old)
            assert (completion.logprobs - of_old)[:num_old].abs().max() < ROUNDING
            # Kept keys and values are those of the earlier weights.
            assert (difference[num_old:].max() < ROUNDING) == (in_flight == "recompute")


def tied(model: Any) -> list[tuple[str, torch.Tensor]]:
    return list(model.named_parameters(remove_duplicate=False))


def test_on_a_cpu_an_engine_that_may_sleep_answers_as_one_that_may_not(engine, models, caplog):
    caplog.set_level(logging.WARNING)
    sleeper = VllmEngine(config_of(max_new_tokens=8, sleep=True), TOKENIZER, 0, None)
    rows = batch_of(PROMPTS, samples=2)
    for version, model in enumerate(models):
        for one in (engine, sleeper):
            with one.updating(version):
                load(one, tied(model))
        sleeper.sleep()
        expected = engine.generate(rows)
        for _ in range(2):
            found = sleeper.generate(rows)
            assert torch.equal(found["output_ids"], expected["output_ids"])
            assert torch.allclose(found["logprobs"], expected["logprobs"], rtol=0, atol=1e-6)
            sleeper.sleep()
    sleeper.shutdown()
    assert caplog.text.count("policy.generation.sleep has no effect, because vLLM cannot free the memory of a CPU") == 1
