"""The built-in engine completes requests that come at any time, in a bounded cache, and results do not change by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lucidrl.errors import DataError
from lucidrl.models.generation.cache_space import OWN_PAGE, PREFIX_PAGE, SMALLEST_PAGE
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.decode_layout import DecodeLayout
from lucidrl.models.generation.engine import BuiltinEngine
from lucidrl.models.generation.interfaces import Completion, GenerationRequest
from lucidrl.models.generation.pages import FEWEST_PAGES
from lucidrl.models.loading import load_model
from lucidrl.models.logprobs import LogprobModel
from tests.tiers import slow_except

PROMPTS = [[*range(5, 30)], [20, 30], [5, 6, 7, 8, 9], [*range(5, 30)], [44], [20, 30, 31, 32], [*range(40, 80)], [44]]
LIMITS = [3, 12, 1, 9, 20, 6, 15, 11]
NEW_TOKENS = 20
PAGE = OWN_PAGE
assert PREFIX_PAGE == OWN_PAGE
ARCHITECTURES = ("llama", "mistral_sliding", "gemma2_sliding_capped", "gpt2_learned_positions")


def request_of(number: int, prompt: Sequence[int], limit: int | None = None, **options: Any) -> GenerationRequest:
    return GenerationRequest(f"r{number}", torch.tensor(prompt), draw_key=number, max_new_tokens=limit, **options)


REQUESTS = [request_of(number, *row) for number, row in enumerate(zip(PROMPTS, LIMITS, strict=True))]


@pytest.fixture
def engine_of(tiny_model, tokenizer) -> Callable[..., BuiltinEngine]:
    """Makes engines without stop tokens, so that only limits end completions."""

    def make(name: str = "mistral_sliding", **options: Any) -> BuiltinEngine:
        config = GenerationConfig(**{"max_new_tokens": NEW_TOKENS, **options})
        engine = BuiltinEngine(LogprobModel(load_model(tiny_model(name), torch.float64), 1.0), tokenizer, config)
        engine._stop_ids = set()
        return engine

    return make


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, int]]:
    """The forward calls, those that check a loaded model among them: ("decode", rows) or ("prefill", tokens)."""
    made: list[tuple[str, int]] = []
    own = LogprobModel.hidden_states

    def hidden_states(model, input_ids, position_ids, layout):
        made.append(("decode" if isinstance(layout, DecodeLayout) else "prefill", input_ids.numel()))
        return own(model, input_ids, position_ids, layout)

    monkeypatch.setattr(LogprobModel, "hidden_states", hidden_states)
    return made


def finish(engine: BuiltinEngine, most_steps: int = 1000) -> dict[str, Completion]:
    completions: dict[str, Completion] = {}
    while engine.num_unfinished:
        completions |= {completion.request_id: completion for completion in engine.step()}
        most_steps -= 1
        assert most_steps, "the engine does not finish"
    return completions


def complete(engine: BuiltinEngine, requests: Iterable[GenerationRequest]) -> dict[str, Completion]:
    engine.submit(list(requests))
    return finish(engine)


def tokens_of(completions: dict[str, Completion]) -> dict[str, list[int]]:
    return {name: completion.token_ids.tolist() for name, completion in completions.items()}


def alone(engine: BuiltinEngine, requests: Iterable[GenerationRequest]) -> dict[str, Completion]:
    """Each request completed without any other."""
    completions: dict[str, Completion] = {}
    for request in requests:
        completions |= complete(engine, [request])
        engine.forget()
    return completions


def assert_same(found: dict[str, Completion], expected: dict[str, Completion]) -> None:
    assert tokens_of(found) == tokens_of(expected)
    for name, completion in expected.items():
        torch.testing.assert_close(found[name].logprobs, completion.logprobs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", slow_except(ARCHITECTURES, "mistral_sliding", "gemma2_sliding_capped"))
@pytest.mark.parametrize(
    "options",
    [
        {"max_concurrent_rows": 3},
        {"max_concurrent_rows": 3, "prefill_tokens": 4},
        {"max_concurrent_rows": 4, "cache_tokens": 5 * PAGE},
    ],
    ids=["rows", "chunks", "cache"],
)
def test_a_completion_depends_on_no_other_request(engine_of, name, options):
    """Not on when it arrives, what runs meanwhile, the chunks of prompts, or the size of the cache."""
    expected = alone(engine_of(name), REQUESTS)
    engine = engine_of(name, **options)
    completions: dict[str, Completion] = {}
    for request in REQUESTS:
        engine.submit([request])
        for _ in range(2):
            completions |= {completion.request_id: completion for completion in engine.step()}
    assert_same(completions | finish(engine), expected)


@pytest.mark.parametrize("name", slow_except(ARCHITECTURES, "gemma2_sliding_capped"))
def test_greedy_rows_that_join_one_by_one_equal_transformers(engine_of, tiny_model, name):
    engine = engine_of(name, max_concurrent_rows=3, prefill_tokens=4)
    requests = [request_of(number, prompt, greedy=True) for number, prompt in enumerate(PROMPTS)]
    found = tokens_of(complete(engine, requests))
    model = AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.float64, attn_implementation="eager")
    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            eos_token_id=-1,
        )
        assert found[f"r{number}"] == output[0, len(prompt) :].tolist()


def test_rows_have_separate_limits(engine_of):
    completions = complete(engine_of(max_new_tokens=10), REQUESTS)
    assert [len(completions[f"r{number}"].token_ids) for number in range(8)] == [min(limit, 10) for limit in LIMITS]
    assert all(completion.truncated for completion in completions.values())


def test_greedy_and_sampled_rows_run_together(engine_of):
    mixed = [request_of(number, [20, 30], greedy=number % 2 == 0) for number in range(4)]
    found = complete(engine_of(), mixed)
    assert_same(found, alone(engine_of(), mixed))
    assert tokens_of(found)["r0"] == tokens_of(found)["r2"] != tokens_of(found)["r1"]


def test_a_waiting_request_starts_when_a_row_finishes(engine_of, monkeypatch):
    """So every step samples as many tokens as there may be rows, and there are fewer steps than in whole batches."""
    engine = engine_of(max_concurrent_rows=2)
    sampled: list[int] = []
    own = LogprobModel.next_token_logits

    def next_token_logits(model, hidden):
        sampled.append(len(hidden))
        return own(model, hidden)

    monkeypatch.setattr(LogprobModel, "next_token_logits", next_token_logits)
    complete(engine, REQUESTS)
    assert sum(sampled) == sum(LIMITS)
    num_alone = sampled.count(1)
    assert sampled == [2] * (len(sampled) - num_alone) + [1] * num_alone
    assert len(sampled) < sum(max(pair) for pair in zip(LIMITS[::2], LIMITS[1::2], strict=True))


def test_long_prompts_are_computed_in_chunks_between_decoding_steps(engine_of, calls):
    engine = engine_of(prefill_tokens=7)
    engine.submit([request_of(0, [20, 30])])
    engine.step()
    engine.submit([request_of(1, PROMPTS[6])])
    calls.clear()
    for _ in range(6):  # 40 tokens in chunks of 7
        engine.step()
    assert calls == [("prefill", 7), ("decode", 1)] * 5 + [("prefill", 5), ("decode", 1)]
    calls.clear()
    engine.step()
    assert calls == [("decode", 2)]


def test_a_prompt_is_computed_once_for_all_its_rows_at_any_time(engine_of, calls):
    engine = engine_of(max_concurrent_rows=2)
    calls.clear()
    complete(engine, [request_of(number, PROMPTS[0], 3 + number % 3) for number in range(9)])
    assert [count for kind, count in calls if kind == "prefill"] == [len(PROMPTS[0])]


def test_the_cache_never_exceeds_its_limit(engine_of):
    engine = engine_of(cache_tokens=5 * PAGE, max_concurrent_rows=64)
    requests = [request_of(number, PROMPTS[number % 8], LIMITS[number % 7], may_continue=True) for number in range(40)]
    engine.submit(requests)
    completions: dict[str, Completion] = {}
    allocated = []
    while engine.num_unfinished:
        completions |= {completion.request_id: completion for completion in engine.step()}
        allocated.append(engine.num_cached_tokens)
    assert max(allocated) == 5 * PAGE
    assert len(completions) == 40


def test_without_a_limit_the_cache_is_bounded_by_the_rows(engine_of):
    """Also if rows of many prompts take turns, so that a prompt often waits for its next row."""
    engine = engine_of(max_concurrent_rows=2, max_new_tokens=2)
    prompts = [[number] * 40 for number in range(2, 42)]
    complete(engine, [request_of(number, prompts[number % 40], may_continue=number % 3 == 0) for number in range(120)])
    # The first allocation of both pools. Pages of rows are as small as completions of two tokens allow.
    assert engine.num_cached_tokens == FEWEST_PAGES * (PAGE + SMALLEST_PAGE)


def test_a_request_that_can_never_fit_is_refused(engine_of):
    engine = engine_of(cache_tokens=2 * PAGE)
    with pytest.raises(DataError, match=rf"r1 needs {3 * PAGE} tokens of cache for its prompt of 70 and 20 new tokens"):
        engine.submit([request_of(0, [5]), request_of(1, [5] * 70)])
    assert not engine.num_unfinished


def test_the_memory_of_the_cache_is_freed(engine_of):
    engine = engine_of()
    complete(engine, [request_of(0, [5], may_continue=True)])
    assert engine.num_cached_tokens
    engine.forget()
    assert not engine.num_cached_tokens


def conversation(engine: BuiltinEngine) -> dict[str, list[int]]:
    """Two turns of two conversations, the second with more tokens of a user."""
    first = [request_of(number, PROMPTS[number], may_continue=True) for number in (0, 1)]
    turns = tokens_of(complete(engine, first))
    second = [request_of(2 + number, [*PROMPTS[number], *turns[f"r{number}"], 9, 8, 7]) for number in (0, 1)]
    return turns | tokens_of(complete(engine, second))


@pytest.mark.parametrize("name", slow_except(ARCHITECTURES, "mistral_sliding"))
def test_a_later_turn_reuses_the_cache_of_the_earlier_one(engine_of, calls, name):
    engine = engine_of(name)
    calls.clear()
    found = conversation(engine)
    # The second turn computes the last sampled token, which is not in the cache, and the new ones.
    assert [count for kind, count in calls if kind == "prefill"] == [len(PROMPTS[0]) + len(PROMPTS[1]), 2 * (1 + 3)]
    fresh = [request_of(2 + number, [*PROMPTS[number], *found[f"r{number}"], 9, 8, 7]) for number in (0, 1)]
    expected = tokens_of(alone(engine_of(name), fresh))
    assert {name: found[name] for name in expected} == expected


def test_held_rows_give_way_to_rows_that_start(engine_of, calls):
    """Results stay the same, also if space is so short that nothing is reused."""
    assert conversation(engine_of(cache_tokens=2 * PAGE)) == conversation(engine_of())
    engine = engine_of(max_concurrent_rows=1)
    complete(engine, [request_of(number, [number + 5], may_continue=True) for number in range(5)])
    calls.clear()
    completion = complete(engine, [request_of(9, [10], 1)])
    assert calls == [("prefill", 1)]
    assert_same(completion, alone(engine_of(), [request_of(9, [10], 1)]))


def test_aborted_requests_leave_no_trace(engine_of):
    """Requests that wait, are being prefilled, decode or share a prompt."""
    engine = engine_of(max_concurrent_rows=4, prefill_tokens=8)
    expected = alone(engine_of(), REQUESTS)
    engine.submit(REQUESTS)
    for _ in range(5):
        engine.step()
    aborted = {"r0", "r3", "r5", "r6"}
    engine.abort([*aborted, "unknown"])
    completions = finish(engine)
    assert not aborted & set(completions)
    assert {"r1", "r4", "r7"} <= set(completions)
    assert_same(completions, {name: expected[name] for name in completions})
    assert engine._space.own_pool.num_used == engine._space.prefix_pool.num_used == 0
    assert_same(complete(engine, REQUESTS), expected)


RUNNING = 4


@pytest.fixture
def refitted(engine_of) -> Callable[..., tuple[dict[str, Completion], BuiltinEngine]]:
    """Completes the requests with weights that change after some steps; also returns an engine with the new weights."""

    def run(in_flight: str, **options: Any) -> tuple[dict[str, Completion], BuiltinEngine]:
        engine, renewed = engine_of(in_flight=in_flight, max_concurrent_rows=RUNNING, **options), engine_of()
        negate(renewed)
        engine.submit([request_of(number, prompt, greedy=True) for number, prompt in enumerate(PROMPTS)])
        for _ in range(6):
            assert not engine.step()
        with engine.updating(7):
            negate(engine)
        return finish(engine), renewed

    return run


def negate(engine: BuiltinEngine) -> None:
    """Change the weights a lot."""
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.neg_()


def expected_after(renewed: BuiltinEngine, prompt: Sequence[int], before: Sequence[int]) -> list[int]:
    """What the new weights sample after a prompt and the tokens sampled before."""
    rest = request_of(0, [*prompt, *before], NEW_TOKENS - len(before), greedy=True)
    return [*before, *tokens_of(alone(renewed, [rest]))["r0"]]


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "finish", "abort"])
@pytest.mark.parametrize("prefill_tokens", [4096, 1])
def test_rows_in_flight_when_the_weights_change(refitted, engine_of, in_flight, prefill_tokens):
    completions, renewed = refitted(in_flight, prefill_tokens=prefill_tokens)
    assert len(completions) == len(PROMPTS)
    old = tokens_of(alone(engine_of(), [request_of(n, p, greedy=True) for n, p in enumerate(PROMPTS)]))
    num_old = []
    for number, prompt in enumerate(PROMPTS):
        completion = completions[f"r{number}"]
        tokens, versions = completion.token_ids.tolist(), completion.policy_versions.tolist()
        assert len(tokens) == len(versions) == NEW_TOKENS
        assert versions == sorted(versions)
        assert set(versions) <= {0, 7}
        num_old.append(versions.count(0))
        assert tokens[: num_old[-1]] == old[f"r{number}"][: num_old[-1]]
        if in_flight != "keep" or not num_old[-1]:
            expected = expected_after(renewed, prompt, tokens[: num_old[-1]]) if num_old[-1] < NEW_TOKENS else tokens
            assert tokens == expected
    assert num_old[RUNNING:] == [0] * (len(PROMPTS) - RUNNING)  # requests that waited
    running = num_old[:RUNNING]
    if in_flight in ("keep", "recompute"):
        # With one token of a prompt per step, the third prompt is half computed when the weights change.
        assert running == ([6, 6, 6, 6] if prefill_tokens == 4096 else [6, 4, 0, 6])
    else:
        assert running == [NEW_TOKENS if in_flight == "finish" else 0] * RUNNING


def test_a_row_that_keeps_its_cache_continues_with_the_new_weights(refitted, engine_of):
    """So it has the tokens neither of the old weights nor of the new ones alone."""
    kept, recomputed = refitted("keep")[0], refitted("recompute")[0]
    old = alone(engine_of(), [request_of(n, p, greedy=True) for n, p in enumerate(PROMPTS)])
    assert tokens_of(kept)["r1"] not in (tokens_of(recomputed)["r1"], tokens_of(old)["r1"])


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "abort"])
def test_a_refit_that_fails_changes_nothing(engine_of, in_flight):
    engine = engine_of(in_flight=in_flight, max_concurrent_rows=RUNNING)
    engine.submit(REQUESTS)
    completions = {completion.request_id: completion for completion in engine.step()}
    with pytest.raises(RuntimeError, match="lost"), engine.updating(7):
        raise RuntimeError("lost")
    assert engine.policy_version == 0
    completions |= finish(engine)
    assert_same(completions, alone(engine_of(), REQUESTS))
    assert {int(version) for completion in completions.values() for version in completion.policy_versions} == {0}


@pytest.mark.parametrize(("in_flight", "is_reused"), [("keep", True), ("recompute", False)])
def test_held_rows_outlive_new_weights_only_if_the_cache_is_kept(engine_of, calls, in_flight, is_reused):
    engine = engine_of(in_flight=in_flight)
    first = tokens_of(complete(engine, [request_of(0, PROMPTS[0], may_continue=True)]))["r0"]
    with engine.updating(1):
        pass
    calls.clear()
    complete(engine, [request_of(1, [*PROMPTS[0], *first, 9])])
    assert [count for kind, count in calls if kind == "prefill"] == [2 if is_reused else len(PROMPTS[0]) + 20 + 1]


def test_running_rows_go_on_when_the_cache_gives_pages_of_held_rows_to_a_new_prompt(engine_of):
    """The held rows have the last pages of their pool, which becomes smaller."""
    engine = engine_of(cache_tokens=5 * PAGE, max_new_tokens=PAGE)
    held = [request_of(number, [5, 6, 7], 5, may_continue=True) for number in (1, 2, 3)]
    requests = [request_of(0, [5, 6, 7], 60), *held, request_of(4, [*range(90)], 3)]
    expected = complete(engine_of(max_new_tokens=PAGE), requests)
    engine.submit(requests[:4])
    found = {completion.request_id: completion for _ in range(8) for completion in engine.step()}
    allocated = engine.num_cached_tokens
    engine.submit(requests[4:])
    found |= finish(engine)
    assert allocated <= 5 * PAGE
    assert {name: one.token_ids.tolist() for name, one in found.items()} == {
        name: one.token_ids.tolist() for name, one in expected.items()
    }
